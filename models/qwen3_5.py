"""Qwen3.5: Gated DeltaNet with full attention in every fourth layer; dense, or experts everywhere.

The language models; their vision towers are out of scope. Positions of text are the same on the
three axes of the interleaved MRoPE, which is then plain rotary embedding of a part of each head.
FLOPs of the linear attention's state are a term of their own: TorchTitan's count is without them.
"""

from msgspec.structs import replace

from models.counts import FlopsLedger, LinearAttentionLayers, ParameterCounts, flops_ledger
from models.decoder import Block, Decoder, Rotary, residual_scale
from models.layers.feed_forward import GatedFeedForward
from models.layers.gated_delta_net import GatedDeltaNet, gated_delta_net_parameters
from models.layers.gqa import gqa_layers
from models.layers.mtp import MTPBlock
from models.layers.norm import CentredRMSNorm
from models.layers.qwen import QwenConfig, qwen_attention, qwen_feed_forward


class Qwen35Config(QwenConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of a Qwen3.5 network. ValueError where they do not fit together.

    Experts are balanced by their bias, not by the published auxiliary loss.
    """

    vocab_size: int = 248320
    full_attention_interval: int = 4
    """The last of every n layers attends fully; the others are Gated DeltaNet."""
    head_dim: int = 256
    rotary_dim: int = 64
    """Dimensions of each head that are rotated, from the first."""
    num_linear_heads: int
    """Value heads, and states, of Gated DeltaNet."""
    num_linear_qk_heads: int = 16
    linear_head_dim: int = 128
    convolution_width: int = 4
    rope_theta: float = 10_000_000.0
    num_mtp_layers: int = 0
    mtp_loss_weight: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ValueError(f"{self.rotary_dim} of {self.head_dim} dimensions to rotate in pairs")
        if self.num_linear_heads % self.num_linear_qk_heads:
            raise ValueError(
                f"{self.num_linear_qk_heads} query heads do not serve {self.num_linear_heads} "
                "linear heads alike"
            )
        if self.full_attention_interval < 1 or self.num_mtp_layers < 0:
            raise ValueError(
                f"full_attention_interval {self.full_attention_interval} must be at least 1 and "
                f"num_mtp_layers {self.num_mtp_layers} at least 0"
            )

    @property
    def num_full_layers(self) -> int:
        """Layers with full attention."""
        return self.num_layers // self.full_attention_interval

    def attends_fully(self, layer: int) -> bool:
        """Whether layer (from 0) has full attention."""
        return (layer + 1) % self.full_attention_interval == 0

    def build(self, routing: str = "learned") -> "Qwen35":
        """The network on the default device, without values."""
        return Qwen35(self, routing)

    def counts(self) -> ParameterCounts:
        """Exact parameter counts."""
        attention = self.attention_parameters(gated=True)
        delta_net = gated_delta_net_parameters(
            self.dim,
            self.num_linear_heads,
            num_qk_heads=self.num_linear_qk_heads,
            head_dim=self.linear_head_dim,
            convolution_width=self.convolution_width,
        )
        full = self.num_full_layers
        mixers = full * attention + (self.num_layers - full) * delta_net
        rest, active_rest = self.feed_forward_parameters(shared=True)
        mtp = 2 * self.dim * self.dim + 3 * self.dim + attention
        return ParameterCounts(
            embedding=self.vocab_size * self.dim,
            layers=mixers + self.num_layers * rest,
            active_layers=mixers + self.num_layers * active_rest,
            final_norm=self.dim,
            head=self.vocab_size * self.dim,
            tied=self.tied,
            mtp=self.num_mtp_layers * (mtp + rest),
            active_mtp=self.num_mtp_layers * (mtp + active_rest),
        )

    def flops_per_token(self, sequence_length: int) -> FlopsLedger:
        """FLOPs of forward and backward for one token, term by term."""
        (full,) = gqa_layers(self.num_heads, self.head_dim, num_full=self.num_full_layers)
        return flops_ledger(
            self.counts(),
            sequence_length=sequence_length,
            attention=[full],
            linear_attention=LinearAttentionLayers(
                num_layers=self.num_layers - self.num_full_layers,
                num_heads=self.num_linear_heads,
                qk_head_dim=self.linear_head_dim,
                v_head_dim=self.linear_head_dim,
            ),
            mtp_attention=replace(full, num_layers=self.num_mtp_layers),
        )


class Qwen35(Decoder):
    """The language model with its MTP modules; see models.protocol."""

    def __init__(self, config: Qwen35Config, routing: str = "learned") -> None:
        num_layers, fully = config.num_layers, config.attends_fully
        super().__init__(
            config,
            (_block(config, fully=fully(i), routing=routing) for i in range(num_layers)),
            rotary=Rotary(config.rotary_dim, config.rope_theta),
            mtp=(
                MTPBlock(
                    config.dim,
                    _block(config, fully=True, routing=routing),
                    norm_eps=config.norm_eps,
                    norm=CentredRMSNorm,
                )
                for _ in range(config.num_mtp_layers)
            ),
            norm=CentredRMSNorm,
            tied=config.tied,
        )
        self.mtp_loss_weight = config.mtp_loss_weight


def _block(config: Qwen35Config, *, fully: bool, routing: str) -> Block:
    dim, scale = config.dim, residual_scale(config.num_layers)
    shared = GatedFeedForward(dim, config.hidden_dim, output_scale=scale)
    return Block(
        dim,
        config.norm_eps,
        attention=qwen_attention(config, CentredRMSNorm, gated=True, output_scale=scale)
        if fully
        else _delta_net(config, scale),
        feed_forward=qwen_feed_forward(
            config,
            routing,
            output_scale=scale,
            shared=shared if config.num_experts else None,
        ),
        norm=CentredRMSNorm,
    )


def _delta_net(config: Qwen35Config, output_scale: float) -> GatedDeltaNet:
    return GatedDeltaNet(
        config.dim,
        config.num_linear_heads,
        num_qk_heads=config.num_linear_qk_heads,
        head_dim=config.linear_head_dim,
        convolution_width=config.convolution_width,
        norm_eps=config.norm_eps,
        output_scale=output_scale,
    )


QWEN3_5_0_8B = Qwen35Config(
    dim=1024,
    num_layers=24,
    num_heads=8,
    num_kv_heads=2,
    num_linear_heads=16,
    hidden_dim=3584,
    tied=True,
)
"""This and the other released networks have one MTP module: num_mtp_layers=1."""

QWEN3_5_2B = replace(QWEN3_5_0_8B, dim=2048, hidden_dim=6144)

QWEN3_5_4B = Qwen35Config(
    dim=2560,
    num_layers=32,
    num_heads=16,
    num_kv_heads=4,
    num_linear_heads=32,
    hidden_dim=9216,
    tied=True,
)

QWEN3_5_9B = replace(QWEN3_5_4B, dim=4096, hidden_dim=12288, tied=False)

QWEN3_5_27B = Qwen35Config(
    dim=5120, num_layers=64, num_heads=24, num_kv_heads=4, num_linear_heads=48, hidden_dim=17408
)

QWEN3_5_35B_A3B = Qwen35Config(
    dim=2048,
    num_layers=40,
    num_heads=16,
    num_kv_heads=2,
    num_linear_heads=32,
    hidden_dim=512,
    num_experts=256,
    num_experts_per_token=8,
)

QWEN3_5_122B_A10B = replace(
    QWEN3_5_35B_A3B, dim=3072, num_layers=48, num_heads=32, num_linear_heads=64, hidden_dim=1024
)

QWEN3_5_397B_A17B = replace(
    QWEN3_5_122B_A10B, dim=4096, num_layers=60, num_experts=512, num_experts_per_token=10
)

QWEN3_5_PROXY = Qwen35Config(
    vocab_size=512,
    dim=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    rotary_dim=16,
    num_linear_heads=4,
    num_linear_qk_heads=2,
    linear_head_dim=32,
    hidden_dim=64,
    num_experts=16,
    num_experts_per_token=4,
    num_mtp_layers=1,
    loss_chunk_tokens=256,
)
"""Every feature of the mixtures of experts, for two CPU ranks."""

QWEN3_5_DENSE_PROXY = replace(
    QWEN3_5_PROXY, hidden_dim=384, num_experts=0, num_experts_per_token=0, tied=True
)
"""Every feature of the small dense sizes, for two CPU ranks."""
