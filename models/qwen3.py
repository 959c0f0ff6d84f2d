"""Qwen3 (arXiv:2505.09388): normed queries and keys; dense, or experts in every layer."""

import msgspec
from msgspec.structs import replace
from torch import nn

from models.counts import FlopsLedger, ParameterCounts, flops_ledger
from models.decoder import Block, Decoder, Rotary, residual_scale
from models.initialization import fan_in
from models.layers.feed_forward import FeedForward
from models.layers.gqa import GroupedQueryAttention, check_heads, gqa_layers, gqa_parameters
from models.layers.moe import GroupedExperts, MoE
from models.layers.norm import RMSNorm
from models.layers.router import Router, RouterConfig


class Qwen3Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of a Qwen3 network. ValueError where they do not fit together."""

    vocab_size: int = 151936
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    hidden_dim: int
    """Width of the feed-forward layer, or of each expert where there are experts."""
    num_experts: int = 0
    """0 for a dense network."""
    num_experts_per_token: int = 0
    tied: bool = False
    """Whether the head's weight is the embedding's."""
    norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    loss_chunk_tokens: int = 512

    def __post_init__(self) -> None:
        check_heads(self.num_heads, self.num_kv_heads, self.head_dim)
        if self.num_experts:
            self.router()
        elif self.num_experts_per_token:
            raise ValueError(f"{self.num_experts_per_token} experts per token of a dense network")

    @property
    def num_mtp_layers(self) -> int:
        """There are no MTP modules."""
        return 0

    def build(self, routing: str = "learned") -> Decoder:
        """The network on the default device, without values."""
        return Decoder(
            self,
            (qwen3_block(self, routing) for _ in range(self.num_layers)),
            rotary=Rotary(self.head_dim, self.rope_theta),
            tied=self.tied,
        )

    def router(self) -> RouterConfig:
        """The router of each layer."""
        return RouterConfig(
            num_experts=self.num_experts,
            num_experts_per_token=self.num_experts_per_token,
            score_function="softmax",
        )

    def counts(self) -> ParameterCounts:
        """Exact parameter counts."""
        attention = gqa_parameters(
            self.dim,
            self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            normed=True,
        )
        common = attention + 2 * self.dim + self.dim * self.num_experts
        feed_forward = 3 * self.dim * self.hidden_dim
        num_active = self.num_experts_per_token if self.num_experts else 1
        return ParameterCounts(
            embedding=self.vocab_size * self.dim,
            layers=self.num_layers * (common + max(self.num_experts, 1) * feed_forward),
            active_layers=self.num_layers * (common + num_active * feed_forward),
            final_norm=self.dim,
            head=self.vocab_size * self.dim,
            tied=self.tied,
        )

    def flops_per_token(self, sequence_length: int) -> FlopsLedger:
        """FLOPs of forward and backward for one token, term by term."""
        return flops_ledger(
            self.counts(),
            sequence_length=sequence_length,
            attention=gqa_layers(self.num_heads, self.head_dim, num_full=self.num_layers),
        )


def qwen3_block(config: Qwen3Config, routing: str) -> Block:
    """A layer of the network."""
    output_scale = residual_scale(config.num_layers)
    return Block(
        config.dim,
        config.norm_eps,
        attention=GroupedQueryAttention(
            config.dim,
            config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            query_norm=RMSNorm(config.head_dim, config.norm_eps),
            key_norm=RMSNorm(config.head_dim, config.norm_eps),
            output_scale=output_scale,
        ),
        feed_forward=_feed_forward(config, routing, output_scale),
    )


def _feed_forward(config: Qwen3Config, routing: str, output_scale: float) -> nn.Module:
    dim, hidden = config.dim, config.hidden_dim
    if not config.num_experts:
        return FeedForward(dim, hidden, output_scale=output_scale)
    return MoE(
        Router(dim, config.router(), routing=routing, init=fan_in(dim)),
        GroupedExperts(config.num_experts, dim, hidden, output_scale=output_scale),
    )


QWEN3_1_7B = Qwen3Config(
    dim=2048, num_layers=28, num_heads=16, num_kv_heads=8, hidden_dim=6144, tied=True
)

QWEN3_4B = Qwen3Config(
    dim=2560, num_layers=36, num_heads=32, num_kv_heads=8, hidden_dim=9728, tied=True
)

QWEN3_8B = Qwen3Config(dim=4096, num_layers=36, num_heads=32, num_kv_heads=8, hidden_dim=12288)

QWEN3_32B = Qwen3Config(dim=5120, num_layers=64, num_heads=64, num_kv_heads=8, hidden_dim=25600)

QWEN3_30B_A3B = Qwen3Config(
    dim=2048,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    hidden_dim=768,
    num_experts=128,
    num_experts_per_token=8,
)

QWEN3_235B_A22B = replace(QWEN3_30B_A3B, dim=4096, num_layers=94, num_heads=64, hidden_dim=1536)

QWEN3_PROXY = Qwen3Config(
    vocab_size=512,
    dim=128,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    hidden_dim=64,
    num_experts=16,
    num_experts_per_token=4,
    loss_chunk_tokens=256,
)
"""Every feature of the mixtures of experts, for two CPU ranks."""

QWEN3_DENSE_PROXY = replace(
    QWEN3_PROXY, hidden_dim=384, num_experts=0, num_experts_per_token=0, tied=True
)
"""Every feature of the small dense sizes, for two CPU ranks."""
