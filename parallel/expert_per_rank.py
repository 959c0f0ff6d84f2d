"""Expert exchange with a row for every token and rank that has experts of its.

With a row travel tickets, one for each of its experts there: the expert's weight and the row's
number. The rank of the experts weights and sums their outputs, so that one row comes back.

T tokens of this rank, K experts per token, N expert ranks, L experts of a rank; S rows leave and M
arrive; P = T * K tickets leave and R arrive.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from models.layers.moe import Dispatched
from models.layers.router import Routes
from parallel.copies import Copies, copies_of, merge, spread
from parallel.dispatcher import Chunk, ExpertDispatcher, exchange_counts, regroup
from parallel.exchange import InFlight, Sizes, finish, start

LARGEST_NUMBER = 2**24
"""Up to which every integer is a float32."""


class Visits(NamedTuple):
    """Which ranks the tokens visit."""

    visited_NT: Tensor
    """bool."""
    tickets_P2: Tensor
    """float32: weight, and number of the row among those to the rank; in order of the expert."""
    counts_NX: Tensor
    """int32: tickets by expert of the rank, and rows; X = L + 1."""


class Home(NamedTuple):
    """The rows that leave, as copies of this rank's tokens."""

    leaving: Copies
    sizes: Sizes


class Sending(NamedTuple):
    """Rows and their tickets on their way to the experts' ranks."""

    rows: InFlight
    tickets: InFlight
    received_NX: Tensor
    num_tickets: int
    """R."""
    home: Home


class State(NamedTuple):
    """The rows of experts as copies of rows that arrived, with their weights."""

    arrived: Copies
    weights_R: Tensor
    home: Home


class SendingBack(NamedTuple):
    """Sums on their way to the ranks of their tokens."""

    rows: InFlight
    leaving: Copies


class PerRankDispatcher(ExpertDispatcher):
    """Sends a token once to each rank that has experts of its, and sums what comes back."""

    def send(self, chunks: Sequence[Chunk]) -> list[Sending]:
        """Start to send tokens and tickets."""
        N = self.group.size()
        visits = [find_visits(routes, self.local.num_experts, N) for _, routes in chunks]
        counts = [visit.counts_NX for visit in visits]
        received = exchange_counts(counts, self.group)
        # The one synchronization with the host: split sizes are host integers.
        both = torch.stack([torch.stack(counts), torch.stack(received)], dim=1)
        sizes = torch.stack([both[..., :-1].sum(-1), both[..., -1]], dim=1).tolist()
        return [
            self._send(chunk.x_TD, visit, received_NX, *(Sizes(*numbers) for numbers in kinds))
            for chunk, visit, received_NX, kinds in zip(
                chunks, visits, received, sizes, strict=True
            )
        ]

    def _send(
        self, x_TD: Tensor, visits: Visits, received_NX: Tensor, tickets: Sizes, rows: Sizes
    ) -> Sending:
        token_S = torch.nonzero_static(visits.visited_NT, size=sum(rows.sent))[:, 1]
        leaving = copies_of(token_S, len(x_TD))
        return Sending(
            rows=start(spread(x_TD, leaving), self.group, rows),
            tickets=start(visits.tickets_P2, self.group, tickets),
            received_NX=received_NX,
            num_tickets=sum(tickets.received),
            home=Home(leaving, rows),
        )

    def receive(self, sending: Sending) -> Dispatched:
        """Wait for the rows and copy each to its experts."""
        received_NL, rows_N = sending.received_NX[:, :-1], sending.received_NX[:, -1]
        order_R, ends_L = regroup(received_NL, sending.num_tickets)
        begin_N = rows_N.cumsum(0) - rows_N
        begin_R = begin_N.repeat_interleave(received_NL.sum(1), output_size=sending.num_tickets)
        weight_R, row_R = finish(sending.tickets).unbind(1)
        source_R = (row_R.detach().long() + begin_R).index_select(0, order_R)
        arrived = copies_of(source_R, sum(sending.home.sizes.received))
        rows = spread(finish(sending.rows), arrived)
        return Dispatched(rows, ends_L, State(arrived, weight_R[order_R], sending.home))

    def send_back(self, rows_RD: Tensor, state: State) -> SendingBack:
        """Weight and sum the outputs for each row that arrived, and start to send the sums."""
        sums_MD = merge(rows_RD, state.arrived, state.weights_R)
        home = state.home
        return SendingBack(start(sums_MD, self.group, home.sizes.back), home.leaving)

    def receive_back(self, sending: SendingBack) -> Tensor:
        """Wait for the sums and add up each token's."""
        return merge(finish(sending.rows), sending.leaving)


def find_visits(routes: Routes, num_experts: int, num_ranks: int) -> Visits:
    """Return the ranks that tokens visit: rows leave in order of the rank and then of the token.

    Args:
        routes: each token's experts, all different, numbered over all ranks.
    """
    weights_TK, experts_TK = routes
    T, _ = experts_TK.shape
    assert T <= LARGEST_NUMBER, f"{T} tokens: float32 does not tell their numbers apart"
    rank_TK = experts_TK // (num_experts // num_ranks)
    visited_NT = rank_TK.new_zeros(T, num_ranks).scatter_(1, rank_TK, 1).t()
    number_TK = (visited_NT.cumsum(1) - 1).t().gather(1, rank_TK)
    tickets_P2 = torch.stack((weights_TK, number_TK.to(weights_TK.dtype)), dim=-1).flatten(0, 1)
    expert_P, order_P = experts_TK.flatten().sort(stable=True)
    counts_E = torch.zeros(num_experts, dtype=torch.int32, device=expert_P.device)
    counts_E.scatter_add_(0, expert_P, torch.ones_like(expert_P, dtype=torch.int32))
    rows_N1 = visited_NT.sum(1, keepdim=True, dtype=torch.int32)
    return Visits(
        visited_NT=visited_NT.bool(),
        tickets_P2=tickets_P2.index_select(0, order_P),
        counts_NX=torch.cat((counts_E.view(num_ranks, -1), rows_N1), dim=1),
    )
