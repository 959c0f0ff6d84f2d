"""The short causal convolution of linear attention layers: each channel by itself, then SiLU.

`titanbench::short_convolution` is one operator on every device. It computes in float32 and stays
within documents.

B batch, S sequence, C channels, W width (taps): a token sees itself and the W - 1 before it.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula


@torch.library.custom_op("titanbench::short_convolution", mutates_args=())
def short_convolution(
    x: Tensor, weight: Tensor, positions: Tensor, preceding: Tensor | None
) -> Tensor:
    """silu(convolution of x), (B,S,C).

    weight (C,W), its last column for the token itself; positions (B,S) int64 within the document:
    nothing before position 0 is seen; preceding (B,W-1,C), the tokens before the first (None where
    there are none).
    """
    padded = _padded(x, weight, preceding)
    return F.silu(_convolve(padded, weight, positions)).to(x.dtype)


@short_convolution.register_fake
def _(x: Tensor, weight: Tensor, positions: Tensor, preceding: Tensor | None) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("titanbench::short_convolution_backward", mutates_args=())
def short_convolution_backward(
    dout: Tensor, x: Tensor, weight: Tensor, positions: Tensor, preceding: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of the weight and of the tokens before the first (B,W-1,C)."""
    padded = _padded(x, weight, preceding)
    pre_activation = _convolve(padded, weight, positions)
    grad = torch.ops.aten.silu_backward(dout.to(padded.dtype), pre_activation)
    dpadded = torch.zeros_like(padded)
    dweight = torch.empty(weight.shape, dtype=padded.dtype, device=weight.device)
    for tap, tokens, seen in _taps(weight, positions):
        seen_grad = grad * seen
        dpadded[:, tokens] += seen_grad * weight[:, tap]
        dweight[:, tap] = (seen_grad * padded[:, tokens]).sum((0, 1))
    before = weight.shape[1] - 1
    return (
        dpadded[:, before:].to(x.dtype, copy=True),
        dweight.to(weight.dtype),
        dpadded[:, :before].to(x.dtype, copy=True),
    )


@short_convolution_backward.register_fake
def _(
    dout: Tensor, x: Tensor, weight: Tensor, positions: Tensor, preceding: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    before = x.new_empty(x.shape[0], weight.shape[1] - 1, x.shape[2])
    return x.new_empty(x.shape), weight.new_empty(weight.shape), before


def _padded(x: Tensor, weight: Tensor, preceding: Tensor | None) -> Tensor:
    """(B,W-1+S,C) in the dtype of the computation."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if preceding is None:
        return F.pad(x, (0, 0, weight.shape[1] - 1, 0))
    return torch.cat((preceding.to(x.dtype), x), dim=1)


def _taps(weight: Tensor, positions: Tensor) -> Iterator[tuple[int, slice, Tensor]]:
    """(tap, the padded tokens under it, whether they are of the same document (B,S,1))."""
    taps = weight.shape[1]
    for tap in range(taps):
        tokens = slice(tap, tap + positions.shape[1])
        yield tap, tokens, (positions >= taps - 1 - tap)[..., None]


def _convolve(padded: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    total = padded.new_zeros(())
    for tap, tokens, seen in _taps(weight, positions):
        total = total + padded[:, tokens] * seen * weight[:, tap]
    return total


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, positions, preceding = inputs
    ctx.save_for_backward(x, weight, positions, preceding)


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, positions, preceding = ctx.saved_tensors
    dx, dweight, dbefore = short_convolution_backward(dout, x, weight, positions, preceding)
    return dx, dweight, None, dbefore if preceding is not None else None


short_convolution.register_autograd(_backward, setup_context=_setup_context)


@register_flop_formula(torch.ops.titanbench.short_convolution)
def short_convolution_flops(
    x_shape: torch.Size, weight_shape: torch.Size, *_: Any, **__: Any
) -> int:
    """A multiplication and an addition per tap."""
    return 2 * x_shape.numel() * weight_shape[1]


@register_flop_formula(torch.ops.titanbench.short_convolution_backward)
def short_convolution_backward_flops(
    dout_shape: torch.Size, x_shape: torch.Size, weight_shape: torch.Size, *_: Any, **__: Any
) -> int:
    """Twice the forward, and the forward again, which belongs to no model FLOPs."""
    return 3 * 2 * x_shape.numel() * weight_shape[1]
