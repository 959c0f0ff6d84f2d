"""DeepSeek V3 (arXiv:2412.19437): latent attention, group-limited experts, several predictions."""

import math
from typing import Literal

import msgspec

from models.counts import AttentionLayers, FlopsLedger, ParameterCounts, flops_ledger
from models.decoder import Block, Decoder, Rotary, residual_scale
from models.initialization import fan_in
from models.layers.feed_forward import FeedForward
from models.layers.mla import MultiHeadLatentAttention
from models.layers.moe import GroupedExperts, MoE
from models.layers.mtp import MTPBlock
from models.layers.rotary import Yarn, yarn_scale
from models.layers.router import Router, RouterConfig


class DeepSeekV3Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of a DeepSeek V2 or V3 network. ValueError where they do not fit together."""

    vocab_size: int
    dim: int
    num_layers: int
    num_dense_layers: int
    """Layers at the start with a dense feed-forward layer."""
    num_heads: int
    q_lora_rank: int
    """Width of the queries' latent; 0 for none."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    dense_hidden_dim: int
    expert_hidden_dim: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    num_expert_groups: int = 1
    num_limited_groups: int = 1
    num_group_votes: int = 2
    """Best experts of a group whose sum decides whether the group is kept."""
    score_function: Literal["sigmoid", "softmax"] = "sigmoid"
    normalize_weights: bool = True
    route_scale: float = 1.0
    norm_eps: float = 1e-6
    latent_norm_eps: float = 1e-6
    """Epsilon of the norms of the queries' and the keys' latents."""
    rope_theta: float = 10000.0
    rope_factor: float = 40.0
    rope_original_context: int = 4096
    rope_mscale: float = 1.0
    num_mtp_layers: int = 0
    mtp_loss_weight: float = 0.3
    loss_chunk_tokens: int = 512

    def __post_init__(self) -> None:
        if not 0 <= self.num_dense_layers <= self.num_layers:
            raise ValueError(f"{self.num_dense_layers} dense layers out of {self.num_layers}")
        widths = (self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim)
        if any(width % 2 for width in widths):
            raise ValueError(
                "heads are rotated in pairs: kv_lora_rank, qk_nope_head_dim and qk_rope_head_dim "
                f"must be even, not {widths}"
            )
        if self.num_mtp_layers < 0:
            raise ValueError(f"num_mtp_layers is {self.num_mtp_layers}")
        self.router()

    def build(self, routing: str = "learned") -> "DeepSeekV3":
        """The network on the default device, without values."""
        return DeepSeekV3(self, routing)

    def router(self) -> RouterConfig:
        """The router of each mixture-of-experts layer."""
        return RouterConfig(
            num_experts=self.num_experts,
            num_experts_per_token=self.num_experts_per_token,
            score_function=self.score_function,
            num_groups=self.num_expert_groups,
            num_limited_groups=self.num_limited_groups,
            num_group_votes=self.num_group_votes,
            normalize_weights=self.normalize_weights,
            weight_scale=self.route_scale,
        )

    def counts(self) -> ParameterCounts:
        """Exact parameter counts."""
        expert = 3 * self.dim * self.expert_hidden_dim
        common = self._attention_parameters() + 2 * self.dim
        dense = common + 3 * self.dim * self.dense_hidden_dim
        sparse = common + self.dim * self.num_experts + self.num_shared_experts * expert
        num_sparse = self.num_layers - self.num_dense_layers
        routed, active = self.num_experts * expert, self.num_experts_per_token * expert
        merge = 2 * self.dim * self.dim + 3 * self.dim
        # A network of dense layers alone has a dense block in its MTP modules too.
        mtp_block, mtp_active = (sparse + routed, sparse + active) if num_sparse else (dense, dense)
        return ParameterCounts(
            embedding=self.vocab_size * self.dim,
            layers=self.num_dense_layers * dense + num_sparse * (sparse + routed),
            active_layers=self.num_dense_layers * dense + num_sparse * (sparse + active),
            final_norm=self.dim,
            head=self.vocab_size * self.dim,
            mtp=self.num_mtp_layers * (merge + mtp_block),
            active_mtp=self.num_mtp_layers * (merge + mtp_active),
        )

    def flops_per_token(self, sequence_length: int) -> FlopsLedger:
        """FLOPs of forward and backward for one token, term by term."""
        return flops_ledger(
            self.counts(),
            sequence_length=sequence_length,
            attention=[self._attention_layers(self.num_layers)],
            mtp_attention=self._attention_layers(self.num_mtp_layers),
        )

    def _attention_parameters(self) -> int:
        queries = self.num_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        values = self.num_heads * self.v_head_dim
        rank = self.q_lora_rank
        q = self.dim * rank + rank + rank * queries if rank else self.dim * queries
        kv_down = self.dim * (self.kv_lora_rank + self.qk_rope_head_dim) + self.kv_lora_rank
        kv_up = self.kv_lora_rank * (self.num_heads * self.qk_nope_head_dim + values)
        return q + kv_down + kv_up + values * self.dim

    def _attention_layers(self, num_layers: int) -> AttentionLayers:
        return AttentionLayers(
            num_layers=num_layers,
            num_heads=self.num_heads,
            qk_head_dim=self.qk_nope_head_dim + self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
        )


class DeepSeekV3(Decoder):
    """The language model with its MTP modules; see models.protocol."""

    def __init__(self, config: DeepSeekV3Config, routing: str = "learned") -> None:
        dense, num_layers = config.num_dense_layers, config.num_layers
        super().__init__(
            config,
            (_block(config, sparse=i >= dense, routing=routing) for i in range(num_layers)),
            rotary=Rotary(
                config.qk_rope_head_dim,
                config.rope_theta,
                Yarn(factor=config.rope_factor, original_context=config.rope_original_context),
            ),
            mtp=(
                MTPBlock(
                    config.dim,
                    _block(config, sparse=dense < num_layers, routing=routing),
                    norm_eps=config.norm_eps,
                )
                for _ in range(config.num_mtp_layers)
            ),
        )
        self.mtp_loss_weight = config.mtp_loss_weight


def _block(config: DeepSeekV3Config, *, sparse: bool, routing: str) -> Block:
    dim, output_scale = config.dim, residual_scale(config.num_layers)
    return Block(
        dim,
        config.norm_eps,
        attention=_attention(config, output_scale),
        feed_forward=_mixture(config, routing, output_scale)
        if sparse
        else FeedForward(dim, config.dense_hidden_dim, output_scale=output_scale),
    )


def _attention(config: DeepSeekV3Config, output_scale: float) -> MultiHeadLatentAttention:
    stretch = yarn_scale(config.rope_factor, config.rope_mscale)
    return MultiHeadLatentAttention(
        config.dim,
        config.num_heads,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        norm_eps=config.latent_norm_eps,
        scale=stretch**2 / math.sqrt(config.qk_nope_head_dim + config.qk_rope_head_dim),
        output_scale=output_scale,
    )


def _mixture(config: DeepSeekV3Config, routing: str, output_scale: float) -> MoE:
    dim, hidden = config.dim, config.expert_hidden_dim
    shared = config.num_shared_experts * hidden
    return MoE(
        Router(dim, config.router(), routing=routing, init=fan_in(dim)),
        GroupedExperts(config.num_experts, dim, hidden, output_scale=output_scale),
        shared=FeedForward(dim, shared, output_scale=output_scale) if shared else None,
    )


DEEPSEEK_V3_671B = DeepSeekV3Config(
    vocab_size=129280,
    dim=7168,
    num_layers=61,
    num_dense_layers=3,
    num_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    dense_hidden_dim=18432,
    expert_hidden_dim=2048,
    num_experts=256,
    num_experts_per_token=8,
    num_shared_experts=1,
    num_expert_groups=8,
    num_limited_groups=4,
    route_scale=2.5,
)
"""The released network; its MTP module is num_mtp_layers=1."""

DEEPSEEK_V3_671B_MTP1 = msgspec.structs.replace(DEEPSEEK_V3_671B, num_mtp_layers=1)

DEEPSEEK_V3_DEBUG = DeepSeekV3Config(
    vocab_size=2048,
    dim=256,
    num_layers=6,
    num_dense_layers=1,
    num_heads=16,
    q_lora_rank=0,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    dense_hidden_dim=1024,
    expert_hidden_dim=256,
    num_experts=8,
    num_experts_per_token=3,
    num_shared_experts=2,
    score_function="softmax",
    normalize_weights=False,
    rope_mscale=0.7,
)
"""TorchTitan's debug size: full-size heads on a narrow model."""

DEEPSEEK_V3_PROXY = DeepSeekV3Config(
    vocab_size=512,
    dim=128,
    num_layers=3,
    num_dense_layers=1,
    num_heads=4,
    q_lora_rank=64,
    kv_lora_rank=64,
    qk_nope_head_dim=64,
    qk_rope_head_dim=64,
    v_head_dim=64,
    dense_hidden_dim=384,
    expert_hidden_dim=64,
    num_experts=16,
    num_experts_per_token=4,
    num_shared_experts=1,
    num_expert_groups=4,
    num_limited_groups=2,
    route_scale=2.5,
    num_mtp_layers=1,
    loss_chunk_tokens=256,
)
"""Every feature of the full size, for two CPU ranks."""
