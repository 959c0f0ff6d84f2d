"""Muse Glimmer: dense, windows and full attention in turn, norms before and after each layer.

The language model of Muse Glimmer 30B; its vision tower is out of scope.
B batch, S sequence, D model width.
"""

from torch import Tensor, nn

from models.batch import Context
from models.counts import FlopsLedger, ParameterCounts, flops_ledger
from models.decoder import Decoder, Rotary, residual_scale
from models.layers.feed_forward import FeedForward
from models.layers.muse import MuseConfig, muse_attention, muse_head
from models.layers.norm import CentredRMSNorm, rms_norm


class MuseGlimmerConfig(MuseConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of a Muse Glimmer network. ValueError where they do not fit together."""

    hidden_dim: int
    query_scale: float = 3.87
    """What normed queries are scaled by, on top of head_dim^-0.5."""

    def build(self, routing: str = "learned") -> "MuseGlimmer":
        """The network on the default device, without values; there is nothing to route."""
        return MuseGlimmer(self)

    def counts(self) -> ParameterCounts:
        """Exact parameter counts."""
        feed_forward = 3 * self.dim * self.hidden_dim
        layers = self.num_layers * (self.attention_parameters() + feed_forward + 4 * self.dim)
        return ParameterCounts(
            embedding=self.vocab_size * self.dim,
            layers=layers,
            active_layers=layers,
            final_norm=self.dim,
            head=self.vocab_size * self.dim,
        )

    def flops_per_token(self, sequence_length: int) -> FlopsLedger:
        """FLOPs of forward and backward for one token, term by term."""
        return flops_ledger(
            self.counts(), sequence_length=sequence_length, attention=self.attention_layers()
        )


class MuseGlimmerBlock(nn.Module):
    """x + norm(attention(norm x)), then x + norm(feed_forward(norm x))."""

    def __init__(self, config: MuseGlimmerConfig, layer: int) -> None:
        super().__init__()
        dim = config.dim
        self.attention_norm = CentredRMSNorm(dim, config.norm_eps)
        self.attention = muse_attention(
            config,
            layer,
            query_scale=config.query_scale,
            output_scale=residual_scale(config.num_layers),
        )
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
        self.head = muse_head(config)

    def embed(self, tokens_BS: Tensor) -> Tensor:
        """The normed embedding."""
        return rms_norm(super().embed(tokens_BS), self.norm_eps)


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
