"""Copies of rows, as when a token goes to several experts: spread out, and summed again.

T rows, R copies. Both directions gather, forward and backward: no sum depends on the order in which
threads arrive.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Copies(NamedTuple):
    """Which rows are copied; a row may have any number of copies."""

    source_R: Tensor
    """The row that each is a copy of."""
    order_R: Tensor
    """The copies in order of their rows."""
    bounds: Tensor
    """(T + 1,): those of row t are bounds[t] to bounds[t + 1] of that order."""


def copies_of(source_R: Tensor, num_rows: int) -> Copies:
    """Return the copies of T rows."""
    sorted_R, order_R = source_R.sort(stable=True)
    rows = torch.arange(num_rows + 1, device=source_R.device)
    return Copies(source_R, order_R, torch.searchsorted(sorted_R, rows))


def spread(x_TD: Tensor, copies: Copies) -> Tensor:
    """Return the copies (R, D); backward sums the gradients of each row's."""
    return _Spread.apply(x_TD, *copies)


def merge(copies_RD: Tensor, copies: Copies, weights_R: Tensor | None = None) -> Tensor:
    """Return the sum of each row's copies (T, D), weighted in their dtype."""
    if weights_R is None:
        return _Merge.apply(copies_RD, *copies)
    return _WeightedMerge.apply(copies_RD, weights_R.to(copies_RD.dtype), *copies)


def _sum(copies_RD: Tensor, order_R: Tensor, bounds: Tensor, weights_R: Tensor | None) -> Tensor:
    return F.embedding_bag(
        order_R,
        copies_RD.contiguous(),
        bounds,
        mode="sum",
        per_sample_weights=None if weights_R is None else weights_R[order_R],
        include_last_offset=True,
    )


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, order: Tensor, bounds: Tensor) -> Tensor:
        ctx.save_for_backward(order, bounds)
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        order, bounds = ctx.saved_tensors
        return _sum(grad, order, bounds, None), None, None, None


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, order: Tensor, bounds: Tensor) -> Tensor:
        ctx.save_for_backward(source)
        return _sum(x, order, bounds, None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (source,) = ctx.saved_tensors
        return grad.index_select(0, source), None, None, None


class _WeightedMerge(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, source: Tensor, order: Tensor, bounds: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weights, source)
        return _sum(x, order, bounds, weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x, weights, source = ctx.saved_tensors
        grad_RD = grad.index_select(0, source)
        grad_R = torch.bmm(x[:, None], grad_RD[:, :, None]).view(-1)
        return grad_RD * weights[:, None], grad_R, None, None, None
