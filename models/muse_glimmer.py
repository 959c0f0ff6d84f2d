"""Muse Glimmer: dense, windows and full attention in turn, norms before and after each layer.

The language model of Muse Glimmer 30B; its vision tower is out of scope.
B batch, S sequence, D model width.
"""

import math

import msgspec
from torch import Tensor, nn

from models.batch import Context
from models.counts import FlopsLedger, ParameterCounts, flops_ledger
from models.decoder import Decoder, Rotary, residual_scale
from models.initialization import fan_in
from models.layers.feed_forward import FeedForward
from models.layers.gqa import GroupedQueryAttention, check_heads, gqa_layers, gqa_parameters
from models.layers.head import LogitScaling, OutputHead
from models.layers.norm import CentredRMSNorm, UnitRMSNorm, rms_norm


class MuseGlimmerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of a Muse Glimmer network. ValueError where they do not fit together."""

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_dim: int
    window: int
    full_attention_interval: int = 4
    """Every n-th layer, counted from the last, attends fully and without rotation."""
    query_scale: float = 3.87
    """What normed queries are scaled by, on top of head_dim^-0.5."""
    base_dim: int = 256
    """Width at which logits are not scaled: sqrt(base_dim / dim) otherwise."""
    logit_soft_cap: float = 20.0
    norm_eps: float = 1e-5
    post_norm_eps: float = 1e-8
    rope_theta: float = 500_000.0
    loss_chunk_tokens: int = 512

    def __post_init__(self) -> None:
        check_heads(self.num_heads, self.num_kv_heads, self.head_dim)
        if self.window < 1 or self.full_attention_interval < 1:
            raise ValueError(
                f"window {self.window} and full_attention_interval "
                f"{self.full_attention_interval} must be at least 1"
            )

    @property
    def num_mtp_layers(self) -> int:
        """There are no MTP modules."""
        return 0

    @property
    def logit_scale(self) -> float:
        """Multiplier of the logits of the head."""
        return math.sqrt(self.base_dim / self.dim)

    def attends_fully(self, layer: int) -> bool:
        """Whether layer (from 0) attends to its whole document, without rotation."""
        return (self.num_layers - 1 - layer) % self.full_attention_interval == 0

    def build(self, routing: str = "learned") -> "MuseGlimmer":
        """The network on the default device, without values; there is nothing to route."""
        return MuseGlimmer(self)

    def counts(self) -> ParameterCounts:
        """Exact parameter counts."""
        attention = gqa_parameters(
            self.dim,
            self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            gated=True,
        )
        layers = self.num_layers * (attention + 3 * self.dim * self.hidden_dim + 4 * self.dim)
        return ParameterCounts(
            embedding=self.vocab_size * self.dim,
            layers=layers,
            active_layers=layers,
            final_norm=self.dim,
            head=self.vocab_size * self.dim,
        )

    def flops_per_token(self, sequence_length: int) -> FlopsLedger:
        """FLOPs of forward and backward for one token, term by term."""
        num_full = sum(self.attends_fully(layer) for layer in range(self.num_layers))
        return flops_ledger(
            self.counts(),
            sequence_length=sequence_length,
            attention=gqa_layers(
                self.num_heads,
                self.head_dim,
                num_full=num_full,
                num_windowed=self.num_layers - num_full,
                window=self.window,
            ),
        )


class MuseGlimmerBlock(nn.Module):
    """x + norm(attention(norm x)), then x + norm(feed_forward(norm x))."""

    def __init__(self, config: MuseGlimmerConfig, layer: int) -> None:
        super().__init__()
        dim = config.dim
        self.attention_norm = CentredRMSNorm(dim, config.norm_eps)
        self.attention = _attention(config, layer)
        self.attention_post_norm = CentredRMSNorm(dim, config.post_norm_eps)
        self.feed_forward_norm = CentredRMSNorm(dim, config.norm_eps)
        self.feed_forward = FeedForward(
            dim, config.hidden_dim, output_scale=residual_scale(config.num_layers)
        )
        self.feed_forward_post_norm = CentredRMSNorm(dim, config.post_norm_eps)

    def forward(self, x_BSD: Tensor, context: Context) -> Tensor:
        y_BSD = self.attention(self.attention_norm(x_BSD), context)
        x_BSD = x_BSD + self.attention_post_norm(y_BSD)
        y_BSD = self.feed_forward(self.feed_forward_norm(x_BSD))
        return x_BSD + self.feed_forward_post_norm(y_BSD)


class MuseGlimmer(Decoder):
    """The language model: a normed embedding, and logits that are scaled and capped."""

    def __init__(self, config: MuseGlimmerConfig) -> None:
        super().__init__(
            config,
            (MuseGlimmerBlock(config, layer) for layer in range(config.num_layers)),
            rotary=Rotary(config.head_dim, config.rope_theta),
        )
        self.norm_eps = config.norm_eps
        self.head = OutputHead(
            config.dim,
            config.vocab_size,
            # Logits start with unit variance: the multiplier undoes this standard deviation.
            init=fan_in(config.base_dim),
            chunk_tokens=config.loss_chunk_tokens,
            scaling=LogitScaling(config.logit_scale, config.logit_soft_cap),
        )

    def embed(self, tokens_BS: Tensor) -> Tensor:
        """The normed embedding."""
        return rms_norm(super().embed(tokens_BS), self.norm_eps)


def _attention(config: MuseGlimmerConfig, layer: int) -> GroupedQueryAttention:
    fully = config.attends_fully(layer)
    return GroupedQueryAttention(
        config.dim,
        config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        output_scale=residual_scale(config.num_layers),
        window=0 if fully else config.window,
        rotary=not fully,
        query_norm=UnitRMSNorm(config.norm_eps, scale=config.query_scale),
        key_norm=UnitRMSNorm(config.norm_eps),
        gated=True,
    )


MUSE_GLIMMER_30B = MuseGlimmerConfig(
    vocab_size=202048,
    dim=6656,
    num_layers=52,
    num_heads=32,
    num_kv_heads=2,
    head_dim=128,
    hidden_dim=19968,
    window=2048,
)
"""The language model of Muse Glimmer 30B."""

MUSE_GLIMMER_PROXY = MuseGlimmerConfig(
    vocab_size=512,
    dim=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    hidden_dim=384,
    window=128,
    loss_chunk_tokens=256,
)
"""Every feature of the full size, for two CPU ranks."""
