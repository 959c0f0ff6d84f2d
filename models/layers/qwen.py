"""What the Qwen families share: normed queries and keys; a dense layer, or experts by softmax."""

import msgspec
from torch import nn

from models.initialization import fan_in
from models.layers.feed_forward import FeedForward
from models.layers.gqa import GroupedQueryAttention, check_heads, gqa_parameters
from models.layers.moe import GroupedExperts, MoE
from models.layers.norm import Norm
from models.layers.router import Router, RouterConfig


class QwenConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers that every Qwen network has. ValueError where they do not fit together."""

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_dim: int
    """Width of the feed-forward layer; with experts, that of each and of a shared one."""
    num_experts: int = 0
    """0 for a dense network."""
    num_experts_per_token: int = 0
    tied: bool = False
    """Whether the head's weight is the embedding's."""
    norm_eps: float = 1e-6
    loss_chunk_tokens: int = 512

    def __post_init__(self) -> None:
        check_heads(self.num_heads, self.num_kv_heads, self.head_dim)
        if self.num_experts:
            self.router()
        elif self.num_experts_per_token:
            raise ValueError(f"{self.num_experts_per_token} experts per token of a dense network")

    def router(self) -> RouterConfig:
        """The router of each layer with experts."""
        return RouterConfig(
            num_experts=self.num_experts,
            num_experts_per_token=self.num_experts_per_token,
            score_function="softmax",
        )

    def attention_parameters(self, *, gated: bool) -> int:
        """Parameters of the full attention of a layer."""
        return gqa_parameters(
            self.dim,
            self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            normed=True,
            gated=gated,
        )

    def feed_forward_parameters(self, *, shared: bool) -> tuple[int, int]:
        """All of a layer's but for attention, and those of them that work on one token.

        `shared`: beside experts there is one for all tokens, with a gate.
        """
        feed_forward, norms = 3 * self.dim * self.hidden_dim, 2 * self.dim
        if not self.num_experts:
            return norms + feed_forward, norms + feed_forward
        common = norms + self.dim * self.num_experts
        common += feed_forward + self.dim if shared else 0
        active = common + self.num_experts_per_token * feed_forward
        return common + self.num_experts * feed_forward, active


def qwen_attention(
    config: QwenConfig, norm: type[Norm], *, gated: bool, output_scale: float
) -> GroupedQueryAttention:
    """The full attention of a layer; `norm` is the kind for queries and keys."""
    return GroupedQueryAttention(
        config.dim,
        config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        query_norm=norm(config.head_dim, config.norm_eps),
        key_norm=norm(config.head_dim, config.norm_eps),
        gated=gated,
        output_scale=output_scale,
    )


def qwen_feed_forward(
    config: QwenConfig, routing: str, *, output_scale: float, shared: nn.Module | None = None
) -> nn.Module:
    """The dense layer, or the experts with one that is shared."""
    dim, hidden = config.dim, config.hidden_dim
    if not config.num_experts:
        return FeedForward(dim, hidden, output_scale=output_scale)
    return MoE(
        Router(dim, config.router(), routing=routing, init=fan_in(dim)),
        GroupedExperts(config.num_experts, dim, hidden, output_scale=output_scale),
        shared=shared,
    )
