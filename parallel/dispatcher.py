"""A dispatcher of expert parallelism: tokens to the experts' ranks and back, while others work.

T tokens of this rank, K experts per token, numbered over all ranks, R rows of this rank's experts,
N expert ranks, L experts of a rank.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single

from models.layers.moe import Dispatched, LocalDispatcher, MoE, Parts
from models.layers.router import Routes
from parallel.collectives import Group


class Chunk(NamedTuple):
    """Some of the tokens, and where they go."""

    x_TD: Tensor
    routes: Routes


class ExpertDispatcher(nn.Module, ABC):
    """Exchanges rows twice, each time with a start and a finish.

    In a backward pass the gradients travel in the reverse order, with the same work beside them.
    """

    def __init__(
        self, local: LocalDispatcher, group: Group, *, num_chunks: int, overlap: bool
    ) -> None:
        """Set the schedule.

        Args:
            num_chunks: parts of the tokens, of which one is worked on while others travel.
            overlap: whether the shared expert's part is computed while tokens travel.
        """
        super().__init__()
        self.local = local
        self.group = group
        self.num_chunks = num_chunks
        self.overlap = overlap

    def forward(self, moe: MoE, inputs_TD: Tensor, routes: Routes, x_TD: Tensor) -> Parts:
        """Return the weighted sums (T, D) and the shared part; see ``Dispatcher``.

        All chunks leave at once. The outputs of one return while the next is worked on.
        """
        pieces = zip(
            *(tensor.chunk(self.num_chunks) for tensor in (inputs_TD, *routes)), strict=True
        )
        sent = self.send([Chunk(x, Routes(*piece)) for x, *piece in pieces])
        shared = moe.share(x_TD) if self.overlap else None
        returning = moe.work(sent, self.receive, self.send_back)
        out_TD = torch.cat([self.receive_back(sending) for sending in returning])
        return Parts(out_TD, shared if self.overlap else moe.share(x_TD))

    @abstractmethod
    def send(self, chunks: Sequence[Chunk]) -> list[Any]:
        """Start to send tokens to their experts; return what ``receive`` takes."""

    @abstractmethod
    def receive(self, sending: Any) -> Dispatched:
        """Wait for the rows of this rank's experts."""

    @abstractmethod
    def send_back(self, rows_RD: Tensor, state: Any) -> Any:
        """Start to send the experts' outputs back; return what ``receive_back`` takes."""

    @abstractmethod
    def receive_back(self, sending: Any) -> Tensor:
        """Wait for the outputs for this rank's tokens and return their sums (T, D)."""


def exchange_counts(counts: Sequence[Tensor], group: Group) -> list[Tensor]:
    """Return what each rank will send for each chunk, from what is sent to each, (N, ...) each."""
    received = all_to_all_single(torch.stack(list(counts), dim=1), None, None, group)
    return list(received.unbind(1))


def regroup(received_NL: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the order that sorts received rows by local expert, and the experts' int32 ends (L,).

    Args:
        received_NL: rows received by source rank and local expert; rows arrive in that order.
        num_rows: their number, R.
    """
    N, L = received_NL.shape
    expert_X = torch.arange(L, device=received_NL.device).repeat(N)
    expert_R = expert_X.repeat_interleave(received_NL.flatten(), output_size=num_rows)
    return expert_R.argsort(stable=True), received_NL.sum(0).cumsum(0).to(torch.int32)


def inverted(order: Tensor) -> Tensor:
    """Return the order that undoes ``order``."""
    places = torch.arange(order.numel(), device=order.device)
    return torch.empty_like(order).scatter_(0, order, places)
