"""Attention with sinks: a logit per head that takes part in the softmax and has no value.

The kernel is that of attention without sinks. With p = sigmoid(lse - sink), the share of the
softmax that is left to the keys, its output becomes p * out. In backward the scores' gradient is
P * (dP - delta) with delta = rowsum(dout * out) for the kernel's own P. Here dout becomes p * dout,
and through p a gradient (1 - p) * rowsum(dout * p * out) reaches lse. It turns delta into
rowsum((p * dout) * (p * out)): what the kernel makes of the output with sinks in place of its own.

B batch, S sequence, H query heads, D width of values.
"""

from typing import Any

import torch
from torch import Tensor

from models.ops.attention import attention, attention_backward


class _SinkAttention(torch.autograd.Function):
    """Keeps the output with sinks and the log-sum-exp without them."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks_H: Tensor,
        positions: Tensor,
        scale: float,
        window: int,
    ) -> Tensor:
        out, lse = attention(q, k, v, positions, scale, window)
        out = out * _share_of_keys(lse, sinks_H).to(out.dtype)
        ctx.save_for_backward(q, k, v, sinks_H, positions, out, lse)
        ctx.scale, ctx.window = scale, window
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks_H, positions, out, lse = ctx.saved_tensors
        share_BSH1 = _share_of_keys(lse, sinks_H)
        product_BSH = torch.linalg.vecdot(dout.float(), out.float())
        dsinks_H = -(product_BSH * (1 - share_BSH1.squeeze(-1))).sum((0, 1))
        dout = dout * share_BSH1.to(dout.dtype)
        dq, dk, dv = attention_backward(dout, q, k, v, out, lse, positions, ctx.scale, ctx.window)
        return dq, dk, dv, dsinks_H.to(sinks_H.dtype), None, None, None


def _share_of_keys(lse_BHS: Tensor, sinks_H: Tensor) -> Tensor:
    """(B,S,H,1) float32: the softmax's weight that does not go to the sink."""
    return torch.sigmoid(lse_BHS.transpose(1, 2) - sinks_H.float())[..., None]


def attention_with_sinks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks_H: Tensor,
    positions: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    """The output (B,S,H,Dv) of `models.ops.attention.attention` with a sink logit per head.

    The weights of a query's keys are exp(score) / (exp(sink) + sum of exp(score) over its keys).
    """
    return _SinkAttention.apply(q, k, v, sinks_H, positions, scale, window)
