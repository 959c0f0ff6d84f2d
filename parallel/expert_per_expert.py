"""Expert exchange with a row for every token and expert.

T tokens of this rank, K experts per token, R rows of this rank's experts, N expert ranks, L experts
of a rank.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from models.layers.moe import Dispatched, gather_rows
from parallel.dispatcher import Chunk, ExpertDispatcher, exchange_counts, inverted, regroup
from parallel.exchange import InFlight, Sizes, finish, start


class Home(NamedTuple):
    """What the sums of this rank's tokens are made with."""

    weights_TK: Tensor
    place_TK: Tensor
    """Flat: where the k-th expert of token t has its row among those that leave."""
    sizes: Sizes


class Sending(NamedTuple):
    """Rows on their way to their experts."""

    rows: InFlight
    received_NL: Tensor
    home: Home


class State(NamedTuple):
    """What brings outputs back."""

    order_R: Tensor
    inverse_R: Tensor
    home: Home


class SendingBack(NamedTuple):
    """Outputs on their way to the ranks of their tokens."""

    rows: InFlight
    home: Home


class PerExpertDispatcher(ExpertDispatcher):
    """Sends a token once for each of its experts, and weights what comes back."""

    def send(self, chunks: Sequence[Chunk]) -> list[Sending]:
        """Sort tokens by expert and start to send them."""
        N = self.group.size()
        sorted_rows = [self.local.dispatch(x, routes.experts_TK) for x, routes in chunks]
        counts = [
            torch.diff(ends, prepend=ends.new_zeros(1)).view(N, -1) for _, ends, _ in sorted_rows
        ]
        received = exchange_counts(counts, self.group)
        # The one synchronization with the host: split sizes are host integers.
        sizes = torch.stack([torch.stack(counts), torch.stack(received)], dim=1).sum(-1).tolist()
        sendings = []
        for (_, routes), (rows, _, place), received_NL, numbers in zip(
            chunks, sorted_rows, received, sizes, strict=True
        ):
            home = Home(routes.weights_TK, place, Sizes(*numbers))
            sendings.append(Sending(start(rows, self.group, home.sizes), received_NL, home))
        return sendings

    def receive(self, sending: Sending) -> Dispatched:
        """Wait for the rows and sort them by expert."""
        num_rows = sum(sending.home.sizes.received)
        order_R, ends_L = regroup(sending.received_NL, num_rows)
        state = State(order_R, inverted(order_R), sending.home)
        rows = gather_rows(finish(sending.rows), state.order_R, state.inverse_R)
        return Dispatched(rows, ends_L, state)

    def send_back(self, rows_RD: Tensor, state: State) -> SendingBack:
        """Sort the outputs by the rank they go to and start to send them."""
        rows = gather_rows(rows_RD, state.inverse_R, state.order_R)
        return SendingBack(start(rows, self.group, state.home.sizes.back), state.home)

    def receive_back(self, sending: SendingBack) -> Tensor:
        """Wait for the outputs, weight and sum them."""
        home = sending.home
        return self.local.combine(finish(sending.rows), home.weights_TK, home.place_TK)
