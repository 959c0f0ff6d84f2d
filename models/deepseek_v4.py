"""DeepSeek V4: compressed attention, several residual streams, clamped experts, hashed routing.

The released networks' MTP module is num_mtp_layers=1; its loss weight and the speed at which biases
balance the experts are not published, those of DeepSeek V3 stand in. Their indexers are not trained
here (models.layers.compressed_attention) but counted as trained. Sequences cannot be divided over
tensor- or context-parallel ranks: all heads share one key, and entries are made from whole blocks.

B batch, S sequence, D model width, N streams; M = N D is the width of the streams side by side.
"""

from functools import partial

import msgspec
from msgspec.structs import replace
from torch import Tensor

from models.batch import Context
from models.counts import (
    FlopsLedger,
    ParameterCounts,
    entry_attention_term,
    flops_ledger,
)
from models.decoder import Rotary, residual_scale
from models.initialization import fan_in
from models.layers.compressed_attention import (
    Compressed,
    CompressedAttention,
    compressed_contexts,
)
from models.layers.compressed_attention_config import CompressedAttentionConfig, IndexerConfig
from models.layers.feed_forward import FeedForward, clamped_swiglu
from models.layers.gqa import gqa_layers
from models.layers.hyper_connections import (
    StreamConfig,
    collapsing_parameters,
    hyper_connection_parameters,
)
from models.layers.moe import GroupedExperts, MoE
from models.layers.rotary import Yarn
from models.layers.router import Router, RouterConfig
from models.layers.stream_block import StreamBlock, StreamMTPBlock
from models.stream_decoder import StreamDecoder


class DeepSeekV4Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of a DeepSeek V4 network. ValueError where they do not fit together."""

    vocab_size: int = 129280
    dim: int
    num_layers: int
    blocks: tuple[int, ...]
    """Tokens of an entry in each layer, 0 for a window alone; beyond num_layers not used."""
    sparse_block: int = 4
    heavy_block: int = 128
    num_heads: int
    head_dim: int = 512
    rope_dim: int = 64
    q_lora_rank: int
    num_output_groups: int
    o_lora_rank: int = 1024
    window: int = 128
    num_index_heads: int = 64
    index_head_dim: int = 128
    num_chosen_entries: int
    expert_hidden_dim: int
    num_experts: int
    num_experts_per_token: int = 6
    num_hashed_layers: int = 3
    """Layers at the start whose experts are chosen by token ids."""
    route_scale: float
    swiglu_limit: float = 10.0
    num_streams: int = 4
    num_sinkhorn_iterations: int = 20
    stream_eps: float = 1e-6
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    """Of layers with a window alone, which are not stretched."""
    compressed_rope_theta: float = 160_000.0
    rope_factor: float = 16.0
    rope_original_context: int = 65536
    num_mtp_layers: int = 0
    mtp_loss_weight: float = 0.3
    loss_chunk_tokens: int = 512

    def __post_init__(self) -> None:
        kinds = {0, self.sparse_block, self.heavy_block}
        if len(self.blocks) < self.num_layers or not kinds.issuperset(self.blocks):
            raise ValueError(
                f"blocks has {len(self.blocks)} entries for {self.num_layers} layers, each one of "
                f"{', '.join(map(str, sorted(kinds)))}"
            )
        if min(self.sparse_block, self.heavy_block) < 1 or self.sparse_block == self.heavy_block:
            raise ValueError(f"sparse_block {self.sparse_block}, heavy_block {self.heavy_block}")
        if self.num_mtp_layers < 0 or self.num_streams < 1:
            raise ValueError(f"{self.num_mtp_layers} MTP layers, {self.num_streams} streams")
        self.attention(0)
        self.router()

    @property
    def layer_blocks(self) -> tuple[int, ...]:
        """Tokens of an entry in each of the layers that there are."""
        return self.blocks[: self.num_layers]

    def build(self, routing: str = "learned") -> "DeepSeekV4":
        """The network on the default device, without values."""
        return DeepSeekV4(self, routing)

    def attention(self, block: int) -> CompressedAttentionConfig:
        """The attention of a layer whose entries have `block` tokens."""
        indexer = IndexerConfig(
            num_heads=self.num_index_heads,
            head_dim=self.index_head_dim,
            num_chosen=self.num_chosen_entries,
        )
        return CompressedAttentionConfig(
            dim=self.dim,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            rope_dim=self.rope_dim,
            q_lora_rank=self.q_lora_rank,
            num_output_groups=self.num_output_groups,
            o_lora_rank=self.o_lora_rank,
            window=self.window,
            block=block,
            indexer=indexer if block == self.sparse_block else None,
            norm_eps=self.norm_eps,
        )

    def router(self, *, hashed: bool = False) -> RouterConfig:
        """The router of a layer."""
        return RouterConfig(
            num_experts=self.num_experts,
            num_experts_per_token=self.num_experts_per_token,
            score_function="sqrt_softplus",
            weight_scale=self.route_scale,
            hashed=hashed,
        )

    def streams(self) -> StreamConfig:
        """The residual streams."""
        iterations = self.num_sinkhorn_iterations
        return StreamConfig(self.dim, self.num_streams, iterations, self.stream_eps, self.norm_eps)

    def counts(self) -> ParameterCounts:
        """Exact parameter counts."""
        expert = 3 * self.dim * self.expert_hidden_dim
        routed, active = self.num_experts * expert, self.num_experts_per_token * expert
        connections = 2 * hyper_connection_parameters(self.dim, self.num_streams)
        common = connections + 2 * self.dim + self.dim * self.num_experts + expert
        attention = sum(self.attention(block).num_parameters for block in self.layer_blocks)
        final_norm = self.dim + collapsing_parameters(self.dim, self.num_streams)
        mtp = 2 * self.dim * self.dim + 2 * self.dim + final_norm
        mtp += self.attention(0).num_parameters + common
        return ParameterCounts(
            embedding=self.vocab_size * self.dim,
            layers=attention + self.num_layers * (common + routed),
            active_layers=attention + self.num_layers * (common + active),
            final_norm=final_norm,
            head=self.vocab_size * self.dim,
            mtp=self.num_mtp_layers * (mtp + routed),
            active_mtp=self.num_mtp_layers * (mtp + active),
        )

    def flops_per_token(self, sequence_length: int) -> FlopsLedger:
        """FLOPs of forward and backward for one token, term by term."""
        num_layers, window = self.num_layers, self.window
        _, windows = gqa_layers(
            self.num_heads, self.head_dim, num_full=0, num_windowed=num_layers, window=window
        )
        ledger = flops_ledger(
            self.counts(),
            sequence_length=sequence_length,
            attention=[windows],
            mtp_attention=replace(windows, num_layers=self.num_mtp_layers),
        )
        terms = dict(ledger.terms)
        for block in (self.sparse_block, self.heavy_block):
            kinds = self.attention(block).entry_layers(self.layer_blocks.count(block))
            terms |= {name: entry_attention_term(kinds[name], sequence_length) for name in kinds}
        return replace(ledger, terms=terms)


class DeepSeekV4(StreamDecoder):
    """The language model with its MTP modules; see models.protocol."""

    def __init__(self, config: DeepSeekV4Config, routing: str = "learned") -> None:
        super().__init__(
            config,
            (
                _block(config, tokens, hashed=layer < config.num_hashed_layers, routing=routing)
                for layer, tokens in enumerate(config.layer_blocks)
            ),
            streams=config.streams(),
            rotary=Rotary(config.rope_dim, config.rope_theta),
            mtp=(
                StreamMTPBlock(config.streams(), _block(config, 0, hashed=False, routing=routing))
                for _ in range(config.num_mtp_layers)
            ),
        )
        yarn = Yarn(factor=config.rope_factor, original_context=config.rope_original_context)
        self.compressed_rotary = Rotary(config.rope_dim, config.compressed_rope_theta, yarn)
        self.blocks_of_entries = {*config.layer_blocks} - {0}
        self.mtp_loss_weight = config.mtp_loss_weight

    def context(self, positions_BS: Tensor) -> Context:
        """What the blocks of one forward pass share: entries and rotations for each kind."""
        plain = super().context(positions_BS)
        kinds = compressed_contexts(positions_BS, self.blocks_of_entries, self.compressed_rotary)
        return plain._replace(family={0: Compressed(plain), **kinds})


def _block(config: DeepSeekV4Config, tokens: int, *, hashed: bool, routing: str) -> StreamBlock:
    output_scale = residual_scale(config.num_layers)
    return StreamBlock(
        config.streams(),
        attention=CompressedAttention(config.attention(tokens), output_scale=output_scale),
        feed_forward=_mixture(config, hashed, routing, output_scale),
    )


def _mixture(config: DeepSeekV4Config, hashed: bool, routing: str, output_scale: float) -> MoE:
    dim, hidden = config.dim, config.expert_hidden_dim
    activation = partial(clamped_swiglu, limit=config.swiglu_limit)
    return MoE(
        Router(dim, config.router(hashed=hashed), routing=routing, init=fan_in(dim)),
        GroupedExperts(
            config.num_experts, dim, hidden, output_scale=output_scale, activation=activation
        ),
        shared=FeedForward(dim, hidden, output_scale=output_scale, activation=activation),
    )


DEEPSEEK_V4_FLASH = DeepSeekV4Config(
    dim=4096,
    num_layers=43,
    blocks=(0, 0, *(4, 128) * 20, 4),
    num_heads=64,
    q_lora_rank=1024,
    num_output_groups=8,
    num_chosen_entries=512,
    expert_hidden_dim=2048,
    num_experts=256,
    route_scale=1.5,
)

DEEPSEEK_V4_PRO = DeepSeekV4Config(
    dim=7168,
    num_layers=61,
    blocks=(128, 128, *(4, 128) * 29, 4),
    num_heads=128,
    q_lora_rank=1536,
    num_output_groups=16,
    num_chosen_entries=1024,
    expert_hidden_dim=3072,
    num_experts=384,
    route_scale=2.5,
)

DEEPSEEK_V4_PROXY = DeepSeekV4Config(
    vocab_size=512,
    dim=128,
    num_layers=4,
    blocks=(0, 4, 32, 4),
    heavy_block=32,
    num_heads=4,
    head_dim=64,
    rope_dim=16,
    q_lora_rank=64,
    num_output_groups=2,
    o_lora_rank=64,
    window=64,
    num_index_heads=4,
    index_head_dim=32,
    num_chosen_entries=32,
    expert_hidden_dim=64,
    num_experts=16,
    num_experts_per_token=4,
    num_hashed_layers=1,
    route_scale=1.5,
    rope_original_context=256,
    num_mtp_layers=1,
    loss_chunk_tokens=256,
)
"""Every feature of the full sizes, for two CPU ranks."""
