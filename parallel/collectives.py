"""Collectives with exact adjoints, on plain tensors: what a gather sends, a reduction sums back.

With every pair of forward and backward exact, the gradient of a parameter that all ranks hold is
the sum of the ranks' local gradients, whatever travels in between.

N ranks of the group, B batch, S sequence, s = S / N the part of it on one rank.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor

Group = dist.ProcessGroup
# The operators themselves: torch has renamed the functions around them.
_collectives = torch.ops._c10d_functional


def stack_ranks(x: Tensor, group: Group) -> Tensor:
    """Return every rank's ``x`` on a new first dimension, (N, ...), without a gradient."""
    N = group.size()
    gathered = _collectives.all_gather_into_tensor(x.contiguous(), N, group.group_name)
    return wait_tensor(gathered).view(N, *x.shape)


def _sum_parts(x: Tensor, group: Group) -> Tensor:
    """Return this rank's part of the sum of all ranks' ``x`` (N, ...)."""
    rows = x.contiguous().flatten(0, 1)
    summed = _collectives.reduce_scatter_tensor(rows, "sum", group.size(), group.group_name)
    return wait_tensor(summed).view(x.shape[1:])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return stack_ranks(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum_parts(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _sum_parts(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return stack_ranks(grad, ctx.group), None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, received: list[int] | None, sent: list[int] | None, group: Group
    ) -> Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return wait_tensor(all_to_all_single(x.contiguous(), received, sent, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        back = all_to_all_single(grad.contiguous(), ctx.sent, ctx.received, ctx.group)
        return wait_tensor(back), None, None, None


def gather(x: Tensor, group: Group) -> Tensor:
    """Return every rank's ``x``, (N, ...); backward sums the gradients of each rank's part."""
    return _Gather.apply(x, group)


def exchange(
    x: Tensor, group: Group, received: list[int] | None = None, sent: list[int] | None = None
) -> Tensor:
    """Send rows to each rank, receive rows from each; backward sends the gradients home.

    Args:
        x: rows by destination; equal numbers unless ``sent`` says how many to each rank.
        received: rows to expect from each rank, where numbers differ.
    """
    return _Exchange.apply(x, received, sent, group)


def gather_sequence(x: Tensor, group: Group) -> Tensor:
    """Return the whole sequence (B, S, ...) from the parts (B, s, ...) in order of rank."""
    return gather(x, group).transpose(0, 1).flatten(1, 2)


def reduce_scatter_sequence(x: Tensor, group: Group) -> Tensor:
    """Return this rank's part (B, s, ...) of the sum of all ranks' ``x`` (B, S, ...)."""
    return _Reduce.apply(x.unflatten(1, (group.size(), -1)).transpose(0, 1), group)
