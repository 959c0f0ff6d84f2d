"""Exchanges of rows between ranks that go on in the background until they are finished.

What runs between the start and the finish of an exchange overlaps with it, and so does its backward
with the exchange of the gradients: those leave where the rows arrived and are awaited where the
rows left.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed._functional_collectives import wait_tensor

from parallel.collectives import Group


class Sizes(NamedTuple):
    """Rows that go to and come from each rank."""

    sent: list[int]
    received: list[int]

    @property
    def back(self) -> "Sizes":
        """The sizes of the way back."""
        return Sizes(self.received, self.sent)


class _Route:
    """Who sends how many rows to whom, and the gradients that are on their way home."""

    def __init__(self, group: Group, sizes: Sizes) -> None:
        self.group = group
        self.sizes = sizes
        self.grad: Tensor | None = None

    def send_home(self, grad: Tensor) -> None:
        assert self.grad is None, "one backward for one forward"
        self.grad = _all_to_all(grad, self.group, self.sizes.back)

    def await_home(self) -> Tensor:
        assert self.grad is not None, "gradients are awaited after they were sent"
        grad, self.grad = self.grad, None
        return wait_tensor(grad)


class InFlight(NamedTuple):
    """Rows on their way; nobody may look at them before ``finish``."""

    rows: Tensor
    route: _Route


def _all_to_all(rows: Tensor, group: Group, sizes: Sizes) -> Tensor:
    """Return rows that have yet to arrive."""
    operator = torch.ops._c10d_functional.all_to_all_single
    return operator(rows.contiguous(), sizes.received, sizes.sent, group.group_name)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: _Route) -> Tensor:
        ctx.route = route
        return _all_to_all(rows, route.group, route.sizes)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.route.await_home(), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: _Route) -> Tensor:
        ctx.route = route
        return wait_tensor(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.route.send_home(grad)
        # Only says that the gradient is on its way: `_Start` takes it from the route.
        return grad, None


@torch.compiler.disable
def start(rows: Tensor, group: Group, sizes: Sizes) -> InFlight:
    """Send rows, sorted by destination, and return without waiting for those to be received."""
    route = _Route(group, sizes)
    return InFlight(_Start.apply(rows, route), route)


@torch.compiler.disable
def finish(flight: InFlight) -> Tensor:
    """Wait for the rows of an exchange and return them in order of the ranks they come from."""
    return _Finish.apply(*flight)
