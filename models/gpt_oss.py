"""GPT-OSS (arXiv:2508.10925): windows on every other layer, sinks, biases, clamped experts."""

from functools import partial
from typing import Any

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from models.counts import FlopsLedger, ParameterCounts, flops_ledger
from models.decoder import Block, Decoder, Rotary, residual_scale
from models.initialization import fan_in
from models.layers.gqa import GroupedQueryAttention, check_heads, gqa_layers, gqa_parameters
from models.layers.moe import GroupedExperts, MoE
from models.layers.rotary import Yarn, yarn_scale
from models.layers.router import Router, RouterConfig


class GptOssConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of a GPT-OSS network. ValueError where they do not fit together."""

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int
    """Keys that a query sees in the layers of even index; the others attend fully."""
    expert_hidden_dim: int
    num_experts: int
    num_experts_per_token: int
    swiglu_limit: float = 7.0
    swiglu_slope: float = 1.702
    norm_eps: float = 1e-5
    rope_theta: float = 150_000.0
    rope_factor: float = 32.0
    rope_original_context: int = 4096
    loss_chunk_tokens: int = 512

    def __post_init__(self) -> None:
        check_heads(self.num_heads, self.num_kv_heads, self.head_dim)
        if self.window < 1:
            raise ValueError(f"window {self.window} must be at least 1")
        self.router()

    @property
    def num_mtp_layers(self) -> int:
        """There are no MTP modules."""
        return 0

    def build(self, routing: str = "learned") -> Decoder:
        """The network on the default device, without values."""
        yarn = Yarn(
            factor=self.rope_factor, original_context=self.rope_original_context, whole_pairs=False
        )
        return Decoder(
            self,
            (_block(self, layer, routing) for layer in range(self.num_layers)),
            rotary=Rotary(self.head_dim, self.rope_theta, yarn),
        )

    def router(self) -> RouterConfig:
        """The router of each layer: a softmax over the chosen experts alone.

        That is the softmax over all of them, divided by its sum over the chosen.
        """
        return RouterConfig(
            num_experts=self.num_experts,
            num_experts_per_token=self.num_experts_per_token,
            score_function="softmax",
            normalize_eps=0.0,
            bias=True,
        )

    def counts(self) -> ParameterCounts:
        """Exact parameter counts."""
        dim, hidden = self.dim, self.expert_hidden_dim
        attention = gqa_parameters(
            dim,
            self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            bias=True,
            sinks=True,
        )
        common = attention + 2 * dim + (dim + 1) * self.num_experts
        expert = 3 * dim * hidden + 2 * hidden + dim
        return ParameterCounts(
            embedding=self.vocab_size * dim,
            layers=self.num_layers * (common + self.num_experts * expert),
            active_layers=self.num_layers * (common + self.num_experts_per_token * expert),
            final_norm=dim,
            head=self.vocab_size * dim,
        )

    def flops_per_token(self, sequence_length: int) -> FlopsLedger:
        """FLOPs of forward and backward for one token, term by term."""
        num_full = self.num_layers // 2
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


class _ClampedSwiGLU(torch.autograd.Function):
    """(up + 1) * gate * sigmoid(slope * gate), both clamped; keeps its two inputs alone."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, limit: float, slope: float) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.limit, ctx.slope = limit, slope
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return torch.sigmoid(slope * gate).mul_(gate).mul_(up + 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        raw_gate, raw_up = ctx.saved_tensors
        gate, up = raw_gate.clamp(max=ctx.limit), raw_up.clamp(-ctx.limit, ctx.limit)
        sigmoid = torch.sigmoid(ctx.slope * gate)
        dup = grad * gate * sigmoid * (raw_up.abs() <= ctx.limit)
        slope = sigmoid * (1 + ctx.slope * gate * (1 - sigmoid))
        dgate = grad * (up + 1) * slope * (raw_gate <= ctx.limit)
        return dgate, dup, None, None


def clamped_swiglu(gate: Tensor, up: Tensor, *, limit: float, slope: float) -> Tensor:
    """(up + 1) * gate * sigmoid(slope * gate) with gate at most limit and up within +-limit."""
    return _ClampedSwiGLU.apply(gate, up, limit, slope)


def _block(config: GptOssConfig, layer: int, routing: str) -> Block:
    output_scale = residual_scale(config.num_layers)
    # Queries and keys are rotated whole: YaRN's factor on both is a factor on their products.
    stretch = yarn_scale(config.rope_factor, mscale=1.0)
    return Block(
        config.dim,
        config.norm_eps,
        attention=GroupedQueryAttention(
            config.dim,
            config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            output_scale=output_scale,
            window=0 if layer % 2 else config.window,
            scale=stretch**2 * config.head_dim**-0.5,
            bias=True,
            sinks=True,
        ),
        feed_forward=_mixture(config, routing, output_scale),
    )


def _mixture(config: GptOssConfig, routing: str, output_scale: float) -> MoE:
    activation = partial(clamped_swiglu, limit=config.swiglu_limit, slope=config.swiglu_slope)
    return MoE(
        Router(config.dim, config.router(), routing=routing, init=fan_in(config.dim)),
        GroupedExperts(
            config.num_experts,
            config.dim,
            config.expert_hidden_dim,
            output_scale=output_scale,
            activation=activation,
            bias=True,
        ),
    )


GPT_OSS_20B = GptOssConfig(
    vocab_size=201088,
    dim=2880,
    num_layers=24,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    window=128,
    expert_hidden_dim=2880,
    num_experts=32,
    num_experts_per_token=4,
)

GPT_OSS_120B = replace(GPT_OSS_20B, num_layers=36, num_experts=128)

GPT_OSS_PROXY = GptOssConfig(
    vocab_size=512,
    dim=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    window=128,
    expert_hidden_dim=64,
    num_experts=16,
    num_experts_per_token=4,
    rope_original_context=256,
    loss_chunk_tokens=256,
)
"""Every feature of the full sizes, for two CPU ranks."""
