"""What the Muse families share: windows and full attention in turn, a head that scales and caps."""

import math

import msgspec

from models.counts import AttentionLayers
from models.initialization import fan_in
from models.layers.gqa import GroupedQueryAttention, check_heads, gqa_layers, gqa_parameters
from models.layers.head import LogitScaling, OutputHead
from models.layers.norm import UnitRMSNorm


class MuseConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers that every Muse network has. ValueError where they do not fit together."""

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int
    full_attention_interval: int = 4
    """Every n-th layer, counted from the last, attends fully and without rotation."""
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
        """Multiplier of the logits of the head, and of routers."""
        return math.sqrt(self.base_dim / self.dim)

    @property
    def num_full_layers(self) -> int:
        """Layers with full attention."""
        return sum(self.attends_fully(layer) for layer in range(self.num_layers))

    def attends_fully(self, layer: int) -> bool:
        """Whether layer (from 0) attends to its whole document, without rotation."""
        return (self.num_layers - 1 - layer) % self.full_attention_interval == 0

    def attention_parameters(self) -> int:
        """Parameters of the attention of a layer."""
        return gqa_parameters(
            self.dim,
            self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            gated=True,
        )

    def attention_layers(self) -> list[AttentionLayers]:
        """What the FLOPs of attention come from: full layers, then those with a window."""
        return gqa_layers(
            self.num_heads,
            self.head_dim,
            num_full=self.num_full_layers,
            num_windowed=self.num_layers - self.num_full_layers,
            window=self.window,
        )


def muse_attention(
    config: MuseConfig,
    layer: int,
    *,
    query_scale: float,
    output_scale: float,
    output_norm: UnitRMSNorm | None = None,
) -> GroupedQueryAttention:
    """The attention of a layer (from 0), its normed queries times `query_scale`."""
    fully = config.attends_fully(layer)
    return GroupedQueryAttention(
        config.dim,
        config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        output_scale=output_scale,
        window=0 if fully else config.window,
        rotary=not fully,
        query_norm=UnitRMSNorm(config.norm_eps, scale=query_scale),
        key_norm=UnitRMSNorm(config.norm_eps),
        output_norm=output_norm,
        gated=True,
    )


def muse_head(config: MuseConfig) -> OutputHead:
    """The output head."""
    return OutputHead(
        config.dim,
        config.vocab_size,
        # Logits start with unit variance: the multiplier undoes this standard deviation.
        init=fan_in(config.base_dim),
        chunk_tokens=config.loss_chunk_tokens,
        scaling=LogitScaling(config.logit_scale, config.logit_soft_cap),
    )
