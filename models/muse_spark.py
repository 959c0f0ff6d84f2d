"""Muse Spark: windows and full attention in turn, experts in a latent space, gated residuals.

The language model of Muse Spark Open 816B-A42B; its vision and audio towers are out of scope.
B batch, S sequence, D model width.
"""

import math

import torch
from torch import Tensor, nn

from models.batch import Context
from models.counts import FlopsLedger, ParameterCounts, flops_ledger
from models.initialization import Normal, fan_in
from models.layers.linear import Embedding, Linear
from models.layers.moe import GroupedExperts, MoE
from models.layers.muse import MuseConfig, muse_attention, muse_head
from models.layers.norm import (
    CentredRMSNorm,
    InputScaledRMSNorm,
    RMSNorm,
    UnitRMSNorm,
    rms_norm,
)
from models.layers.residual import ResidualGate
from models.layers.rotary import rotary_context
from models.layers.router import Router, RouterConfig
from models.protocol import Model


class MuseSparkConfig(MuseConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of a Muse Spark network. ValueError where they do not fit together."""

    latent_dim: int
    """Width at which the experts work."""
    expert_hidden_dim: int
    num_experts: int
    num_experts_per_token: int
    query_key_scale: float = 43.7840518911
    """Times head_dim^-0.5, what normed queries are scaled by."""
    residual_gate_temperature: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        self.router()

    def build(self, routing: str = "learned") -> "MuseSpark":
        """The network on the default device, without values."""
        return MuseSpark(self, routing)

    def router(self) -> RouterConfig:
        """The router of each layer."""
        return RouterConfig(
            num_experts=self.num_experts,
            num_experts_per_token=self.num_experts_per_token,
            normalize_eps=1e-15,
            logit_scale=self.logit_scale,
        )

    def counts(self) -> ParameterCounts:
        """Exact parameter counts."""
        latent = 2 * self.dim * self.latent_dim + 2 * self.latent_dim
        gains = 5 * self.dim
        common = self.attention_parameters() + self.dim * self.num_experts + latent + gains
        expert = 3 * self.latent_dim * self.expert_hidden_dim
        return ParameterCounts(
            embedding=self.vocab_size * self.dim,
            layers=self.num_layers * (common + self.num_experts * expert),
            active_layers=self.num_layers * (common + self.num_experts_per_token * expert),
            final_norm=self.dim,
            head=self.vocab_size * self.dim,
        )

    def flops_per_token(self, sequence_length: int) -> FlopsLedger:
        """FLOPs of forward and backward for one token, term by term."""
        return flops_ledger(
            self.counts(), sequence_length=sequence_length, attention=self.attention_layers()
        )


class MuseSparkBlock(nn.Module):
    """Attention and experts, each normed before and after and gated into a float32 stream."""

    def __init__(self, config: MuseSparkConfig, layer: int, *, routing: str) -> None:
        super().__init__()
        dim = config.dim
        self.attention_norm = CentredRMSNorm(dim, config.norm_eps)
        self.attention = muse_attention(
            config,
            layer,
            query_scale=config.query_key_scale / math.sqrt(config.head_dim),
            output_scale=1.0,
            output_norm=UnitRMSNorm(config.norm_eps),
        )
        self.post_norm_eps = config.post_norm_eps
        self.attention_gate = _residual_gate(config)
        self.feed_forward_norm = CentredRMSNorm(dim, config.norm_eps)
        self.feed_forward = _mixture(config, routing)
        self.feed_forward_post_norm = InputScaledRMSNorm(dim, config.post_norm_eps)
        self.feed_forward_gate = _residual_gate(config)

    def forward(self, x_BSD: Tensor, context: Context) -> Tensor:
        dtype = self.attention.q_proj.weight.dtype
        y = self.attention(self.attention_norm(x_BSD).to(dtype), context)
        x_BSD = self.attention_gate(x_BSD, rms_norm(y, self.post_norm_eps))
        y = self.feed_forward(self.feed_forward_norm(x_BSD).to(dtype))
        return self.feed_forward_gate(x_BSD, self.feed_forward_post_norm(y))


class MuseSpark(Model):
    """The language model; see models.protocol."""

    def __init__(self, config: MuseSparkConfig, routing: str = "learned") -> None:
        super().__init__()
        self.config: MuseSparkConfig = config
        self.embedding = Embedding(config.vocab_size, config.dim, init=Normal(1.0))
        self.layers = nn.ModuleList(
            MuseSparkBlock(config, layer, routing=routing) for layer in range(config.num_layers)
        )
        self.mtp = nn.ModuleList()
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = muse_head(config)

    def embed(self, tokens_BS: Tensor) -> Tensor:
        """The normed embedding; the stream stays in float32 from here on."""
        assert self.embedding is not None
        return rms_norm(self.embedding(tokens_BS), self.config.norm_eps).float()

    def last_hidden(self, x_BSD: Tensor) -> Tensor:
        """The final norm, in the compute dtype."""
        assert self.norm is not None
        return self.norm(x_BSD).to(self.norm.weight.dtype)

    def stream_dtype(self, compute_dtype: torch.dtype) -> torch.dtype:
        """float32, whatever the layers compute in."""
        return torch.float32

    def context(self, positions_BS: Tensor) -> Context:
        """What the blocks of one forward pass share."""
        return rotary_context(positions_BS, self.config.head_dim, self.config.rope_theta, None)


def _residual_gate(config: MuseSparkConfig) -> ResidualGate:
    temperature = config.residual_gate_temperature
    return ResidualGate(config.dim, temperature=temperature, init=Normal(0.02))


def _mixture(config: MuseSparkConfig, routing: str) -> MoE:
    dim, latent = config.dim, config.latent_dim
    output_norm = InputScaledRMSNorm(latent, config.post_norm_eps)
    # The multiplier of the logits undoes this standard deviation, as in the head.
    router_init = fan_in(config.base_dim)
    return MoE(
        Router(dim, config.router(), routing=routing, init=router_init),
        GroupedExperts(config.num_experts, latent, config.expert_hidden_dim),
        output_norm=output_norm,
        entry=nn.Sequential(Linear(dim, latent), CentredRMSNorm(latent, config.norm_eps)),
        exit=Linear(latent, dim),
    )


MUSE_SPARK = MuseSparkConfig(
    vocab_size=202048,
    dim=8192,
    num_layers=62,
    num_heads=128,
    num_kv_heads=16,
    head_dim=64,
    window=2048,
    latent_dim=4096,
    expert_hidden_dim=4096,
    num_experts=256,
    num_experts_per_token=8,
)
"""The language model of Muse Spark Open 816B-A42B."""

MUSE_SPARK_PROXY = MuseSparkConfig(
    vocab_size=512,
    dim=256,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    window=128,
    latent_dim=128,
    expert_hidden_dim=128,
    num_experts=16,
    num_experts_per_token=4,
    loss_chunk_tokens=256,
)
"""Every feature of the full size, for two CPU ranks."""
