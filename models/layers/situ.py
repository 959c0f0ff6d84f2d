"""SiTU-GLU, the gated activation of Kimi K3: bounded on both sides.

[b tanh(gate / b) sigmoid(gate)] * [c tanh(up / c)]
"""

from typing import Any

import torch
from torch import Tensor


class _SituGLU(torch.autograd.Function):
    """Computed in float32; keeps its two inputs alone for backward."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, gate_bound: float, up_bound: float) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.bounds = gate_bound, up_bound
        bounded = gate_bound * torch.tanh(gate.float() / gate_bound)
        linear = up_bound * torch.tanh(up.float() / up_bound)
        return (bounded * torch.sigmoid(gate.float()) * linear).to(gate.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gate, up = ctx.saved_tensors
        gate_bound, up_bound = ctx.bounds
        tanh_gate = torch.tanh(gate.float() / gate_bound)
        tanh_up = torch.tanh(up.float() / up_bound)
        opening = torch.sigmoid(gate.float())
        bounded = gate_bound * tanh_gate
        slope = opening * (1 - tanh_gate.square() + bounded * (1 - opening))
        dgate = grad * slope * up_bound * tanh_up
        dup = grad * bounded * opening * (1 - tanh_up.square())
        return dgate.to(gate.dtype), dup.to(up.dtype), None, None


def situ_glu(gate: Tensor, up: Tensor, *, gate_bound: float, up_bound: float) -> Tensor:
    """Hidden units from the gate and up products, of one shape."""
    return _SituGLU.apply(gate, up, gate_bound, up_bound)
