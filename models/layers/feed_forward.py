"""The gated feed-forward layer (arXiv:2002.05202): down(activation(gate x, up x))."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.initialization import fan_in
from models.layers.linear import Linear
from models.layers.tensor_plan import TensorPlan

Activation = Callable[[Tensor, Tensor], Tensor]
"""Hidden units from the gate and up products, all of one shape."""


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up that keeps its two inputs alone for backward."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        dgate = torch.ops.aten.silu_backward(grad * up, gate)
        return dgate, F.silu(gate).mul_(grad)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, of one shape."""
    return _SwiGLU.apply(gate, up)


class _ClampedSwiGLU(torch.autograd.Function):
    """As _SwiGLU of gate and up within bounds, but keeps the two as they come."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.limit = limit
        return F.silu(gate.clamp(max=limit)).mul_(up.clamp(-limit, limit))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        raw_gate, raw_up = ctx.saved_tensors
        gate, up = raw_gate.clamp(max=ctx.limit), raw_up.clamp(-ctx.limit, ctx.limit)
        dgate = torch.ops.aten.silu_backward(grad * up, gate).mul_(raw_gate <= ctx.limit)
        dup = F.silu(gate).mul_(grad).mul_(raw_up.abs() <= ctx.limit)
        return dgate, dup, None


def clamped_swiglu(gate: Tensor, up: Tensor, *, limit: float) -> Tensor:
    """silu(gate) * up with gate at most `limit` and up within +-limit."""
    return _ClampedSwiGLU.apply(gate, up, limit)


class FeedForward(nn.Module):
    """A gated layer of width `hidden_dim`, (..., D) to (..., D)."""

    def __init__(
        self, dim: int, hidden_dim: int, *, output_scale: float, activation: Activation = swiglu
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj = Linear(dim, hidden_dim)
        self.up_proj = Linear(dim, hidden_dim)
        self.down_proj = Linear(hidden_dim, dim, init=fan_in(hidden_dim, scale=output_scale))

    @property
    def tensor_plan(self) -> TensorPlan:
        """Hidden units are divided."""
        return TensorPlan(
            columns=("gate_proj", "up_proj"), rows=("down_proj",), gather_inputs=("",)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x), self.up_proj(x)))


class GatedFeedForward(FeedForward):
    """sigmoid(w x) times a gated layer: a shared expert that a token may close."""

    def __init__(self, dim: int, hidden_dim: int, *, output_scale: float) -> None:
        super().__init__(dim, hidden_dim, output_scale=output_scale)
        self.output_gate_proj = Linear(dim, 1)

    @property
    def tensor_plan(self) -> TensorPlan:
        """Nothing: it works on the tokens that the routed experts beside it get."""
        return TensorPlan()

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.output_gate_proj(x)) * super().forward(x)
