"""The grouped product: each group of rows times the matrix of its expert.

T rows sorted by group, E groups, K inputs, N outputs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from models.ops.asked_gradients import asked_gradients


@torch.library.custom_op("titanbench::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Rows [offsets[e-1], offsets[e]) of x (T,K) times weight[e] (N,K) transposed, (T,N).

    offsets (E,) int32 are cumulative ends. A group may be empty; rows after the last end give 0.
    """
    product = F.grouped_mm(x, weight.transpose(1, 2), offs=offsets)
    return _clear_tail(product, offsets)


@grouped_mm.register_fake
def _(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op("titanbench::grouped_mm_weight_grad", mutates_args=())
def grouped_mm_weight_grad(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """The gradient (E,N,K) of the weight: per group, dy (T,N) transposed times x (T,K)."""
    return F.grouped_mm(dy.t(), x, offs=offsets)


@grouped_mm_weight_grad.register_fake
def _(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(offsets.shape[0], dy.shape[1], x.shape[1])


def _clear_tail(product: Tensor, offsets: Tensor) -> Tensor:
    """Zero the rows that belong to no group; on a GPU without waiting for the offsets."""
    if product.device.type == "cpu":
        product[int(offsets[-1]) :] = 0
        return product
    rows = torch.arange(product.shape[0], device=product.device)
    return product.masked_fill_((rows >= offsets[-1])[:, None], 0)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, offsets = ctx.saved_tensors
    dy = dy.contiguous()
    input_asked, weight_asked, _ = asked_gradients(ctx)
    dx = grouped_mm(dy, weight.transpose(1, 2), offsets) if input_asked else None
    dw = grouped_mm_weight_grad(dy, x, offsets) if weight_asked else None
    return dx, dw, None


grouped_mm.register_autograd(_backward, setup_context=_setup_context)


@register_flop_formula(torch.ops.titanbench.grouped_mm)
def grouped_mm_flops(
    x_shape: torch.Size, weight_shape: torch.Size, offsets_shape: torch.Size, **_: Any
) -> int:
    """Every row meets one matrix."""
    return 2 * x_shape[0] * weight_shape[1] * weight_shape[2]


@register_flop_formula(torch.ops.titanbench.grouped_mm_weight_grad)
def grouped_mm_weight_grad_flops(
    dy_shape: torch.Size, x_shape: torch.Size, offsets_shape: torch.Size, **_: Any
) -> int:
    """Every row adds one outer product."""
    return 2 * x_shape[0] * dy_shape[1] * x_shape[1]
