"""Kimi K3: Kimi Delta Attention, latent attention without rotation, experts in a latent space.

The language model; its vision tower is out of scope. Every layer's inputs are mixtures of earlier
states of the stream (models.layers.attention_residual). FLOPs of the linear attention's state are
a term of their own: TorchTitan's count is without them.
"""

import msgspec

from models.counts import (
    AttentionLayers,
    FlopsLedger,
    LinearAttentionLayers,
    ParameterCounts,
    flops_ledger,
)
from models.decoder import residual_scale
from models.layers.attention_residual import MixedBlock
from models.layers.kimi_delta_attention import KimiDeltaAttention, kimi_delta_attention_parameters
from models.layers.latent_mixture import LatentMixtureConfig
from models.layers.mla import MultiHeadLatentAttention, mla_parameters
from models.mixed_decoder import MixedDecoder


class KimiK3Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of a Kimi K3 network. ValueError where they do not fit together."""

    vocab_size: int
    dim: int
    num_layers: int
    num_dense_layers: int = 1
    """Layers at the start with a dense feed-forward layer."""
    full_attention_interval: int = 4
    """The last of every n layers, and the last of all, has latent attention."""
    residual_block: int = 12
    """Layers after whose first the stream starts anew, its state until then kept as a source."""
    num_heads: int
    """Of both kinds of attention."""
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    """Width of the part of a key that all heads share; it is not rotated."""
    v_head_dim: int
    linear_head_dim: int
    decay_rank: int
    decay_bound: float = -5.0
    convolution_width: int = 4
    dense_hidden_dim: int
    latent_dim: int
    """Width at which the routed experts work."""
    expert_hidden_dim: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    """Merged into one of their summed width, at the model's width."""
    gate_bound: float = 4.0
    up_bound: float = 25.0
    norm_eps: float = 1e-5
    latent_norm_eps: float = 1e-6
    loss_chunk_tokens: int = 512

    def __post_init__(self) -> None:
        if not 0 <= self.num_dense_layers <= self.num_layers:
            raise ValueError(f"{self.num_dense_layers} dense layers out of {self.num_layers}")
        for name in ("full_attention_interval", "residual_block", "num_shared_experts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must be at least 1")
        if self.decay_bound >= 0:
            raise ValueError(f"decay_bound {self.decay_bound}: the least log decay is below 0")
        self.mixture().router()

    @property
    def num_mtp_layers(self) -> int:
        """The released network has no MTP modules."""
        return 0

    @property
    def full_layers(self) -> list[int]:
        """Layers (from 0) with latent attention."""
        last, interval = self.num_layers - 1, self.full_attention_interval
        return [i for i in range(self.num_layers) if i == last or (i + 1) % interval == 0]

    def build(self, routing: str = "learned") -> MixedDecoder:
        """The network on the default device, without values."""
        layers = (_block(self, layer, routing=routing) for layer in range(self.num_layers))
        return MixedDecoder(self, layers, residual_block=self.residual_block)

    def mixture(self) -> LatentMixtureConfig:
        """The experts of each layer that has some."""
        return LatentMixtureConfig(
            dim=self.dim,
            latent_dim=self.latent_dim,
            expert_hidden_dim=self.expert_hidden_dim,
            num_experts=self.num_experts,
            num_experts_per_token=self.num_experts_per_token,
            num_shared_experts=self.num_shared_experts,
            gate_bound=self.gate_bound,
            up_bound=self.up_bound,
            norm_eps=self.norm_eps,
        )

    def counts(self) -> ParameterCounts:
        """Exact parameter counts."""
        dim, num_full = self.dim, len(self.full_layers)
        linear = kimi_delta_attention_parameters(
            dim,
            self.num_heads,
            head_dim=self.linear_head_dim,
            decay_rank=self.decay_rank,
            convolution_width=self.convolution_width,
        )
        latent_attention = mla_parameters(
            dim,
            self.num_heads,
            q_lora_rank=self.q_lora_rank,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
            gated=True,
        )
        attention = num_full * latent_attention + (self.num_layers - num_full) * linear
        # Two norms and the gains and queries of two mixtures in each layer.
        rest = attention + self.num_layers * 6 * dim
        rest += self.num_dense_layers * 3 * dim * self.dense_hidden_dim
        num_sparse = self.num_layers - self.num_dense_layers
        mixture, active_mixture = self.mixture().parameters()
        return ParameterCounts(
            embedding=self.vocab_size * dim,
            layers=rest + num_sparse * mixture,
            active_layers=rest + num_sparse * active_mixture,
            final_norm=3 * dim,
            head=self.vocab_size * dim,
        )

    def flops_per_token(self, sequence_length: int) -> FlopsLedger:
        """FLOPs of forward and backward for one token, term by term."""
        full = AttentionLayers(
            num_layers=len(self.full_layers),
            num_heads=self.num_heads,
            qk_head_dim=self.qk_nope_head_dim + self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
        )
        return flops_ledger(
            self.counts(),
            sequence_length=sequence_length,
            attention=[full],
            linear_attention=LinearAttentionLayers(
                num_layers=self.num_layers - len(self.full_layers),
                num_heads=self.num_heads,
                qk_head_dim=self.linear_head_dim,
                v_head_dim=self.linear_head_dim,
            ),
        )


def _block(config: KimiK3Config, layer: int, *, routing: str) -> MixedBlock:
    scale, experts = residual_scale(config.num_layers), config.mixture()
    fully, sparse = layer in config.full_layers, layer >= config.num_dense_layers
    return MixedBlock(
        config.dim,
        config.norm_eps,
        attention=_latent_attention(config, scale) if fully else _delta_attention(config, scale),
        feed_forward=experts.build(routing, scale)
        if sparse
        else experts.dense(config.dense_hidden_dim, scale),
        starts_block=layer % config.residual_block == 0,
    )


def _latent_attention(config: KimiK3Config, output_scale: float) -> MultiHeadLatentAttention:
    return MultiHeadLatentAttention(
        config.dim,
        config.num_heads,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        norm_eps=config.latent_norm_eps,
        scale=(config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5,
        output_scale=output_scale,
        rotary=False,
        gated=True,
    )


def _delta_attention(config: KimiK3Config, output_scale: float) -> KimiDeltaAttention:
    return KimiDeltaAttention(
        config.dim,
        config.num_heads,
        head_dim=config.linear_head_dim,
        decay_rank=config.decay_rank,
        decay_bound=config.decay_bound,
        convolution_width=config.convolution_width,
        norm_eps=config.norm_eps,
        output_scale=output_scale,
    )


KIMI_K3 = KimiK3Config(
    vocab_size=163840,
    dim=7168,
    num_layers=93,
    num_heads=96,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    linear_head_dim=128,
    decay_rank=128,
    dense_hidden_dim=33792,
    latent_dim=3584,
    expert_hidden_dim=3072,
    num_experts=896,
    num_experts_per_token=16,
    num_shared_experts=2,
)
"""The language model of Kimi K3."""

KIMI_K3_PROXY = KimiK3Config(
    vocab_size=512,
    dim=128,
    num_layers=5,
    residual_block=2,
    num_heads=4,
    q_lora_rank=64,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=32,
    v_head_dim=32,
    linear_head_dim=32,
    decay_rank=32,
    dense_hidden_dim=384,
    latent_dim=64,
    expert_hidden_dim=64,
    num_experts=16,
    num_experts_per_token=4,
    num_shared_experts=2,
    loss_chunk_tokens=256,
)
"""Every feature of the full size, for two CPU ranks."""
