"""Expert parallelism: experts spread over ranks, tokens exchanged by an autograd all-to-all.

T tokens of this rank, K experts per token, R rows received, E experts in all, N expert ranks,
L experts of this rank.
Dropless: every (token, expert) pair travels as one row and returns as one row.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import (
    all_to_all_single,
    all_to_all_single_autograd,
)
from torch.distributed.device_mesh import DeviceMesh

from models.layers.moe import Dispatched, Dispatcher, gather_rows
from models.protocol import Model
from parallel.layout import divide_weight


class Exchange(NamedTuple):
    """How one dispatch went, for its combine: row counts by rank, and the regrouping of rows."""

    local: Any
    sent: list[int]
    received: list[int]
    order_R: torch.Tensor
    inverse_R: torch.Tensor


class ExpertParallelDispatcher(nn.Module):
    """Sorts rows by expert, sends them to the expert's rank, and brings the results back."""

    def __init__(self, local: Dispatcher, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.local = local
        self.group = group

    def dispatch(self, x_TD: torch.Tensor, experts_TK: torch.Tensor) -> Dispatched:
        """Return this rank's rows (R, D) sorted by its experts, their cumulative ends, the state.

        Args:
            x_TD: this rank's tokens.
            experts_TK: the chosen experts, numbered over all ranks.
        """
        rows, offsets_E, local_state = self.local.dispatch(x_TD, experts_TK)
        counts_NL = torch.diff(offsets_E, prepend=offsets_E.new_zeros(1))
        counts_NL = counts_NL.view(self.group.size(), -1)
        received_NL = all_to_all_single(counts_NL, None, None, self.group)
        # The one synchronization with the host: split sizes are host integers.
        sent, received = torch.stack((counts_NL.sum(1), received_NL.sum(1))).tolist()
        rows = all_to_all_single_autograd(rows, received, sent, self.group)
        order_R, inverse_R, offsets_L = regroup(received_NL)
        exchange = Exchange(local_state, sent, received, order_R, inverse_R)
        return Dispatched(gather_rows(rows, order_R, inverse_R), offsets_L, exchange)

    def combine(
        self, rows_RD: torch.Tensor, weights_TK: torch.Tensor, state: Exchange
    ) -> torch.Tensor:
        """Send the experts' outputs back and return each token's weighted sum (T, D)."""
        rows = gather_rows(rows_RD, state.inverse_R, state.order_R)
        rows = all_to_all_single_autograd(rows, state.sent, state.received, self.group)
        return self.local.combine(rows, weights_TK, state.local)


def regroup(received_NL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the order that sorts received rows by local expert, its inverse, the row ends.

    Args:
        received_NL: rows received by source rank and local expert; rows arrive in that order.
    """
    N, L = received_NL.shape
    expert_R = torch.arange(L, device=received_NL.device).repeat(N)
    order_R = expert_R.repeat_interleave(received_NL.flatten()).argsort(stable=True)
    rows_R = torch.arange(order_R.numel(), device=order_R.device)
    inverse_R = torch.empty_like(order_R).scatter_(0, order_R, rows_R)
    return order_R, inverse_R, received_NL.sum(0).cumsum(0).to(torch.int32)


def spread_experts(model: Model, mesh: DeviceMesh) -> None:
    """Spread every expert layer of a meta-device model over ``mesh``, in place."""
    for _, moe in model.moe_layers():
        for name, weight in list(moe.experts.named_parameters(recurse=False)):
            assert weight.dim() > 1, "only stacked weights and biases can be spread"
            setattr(moe.experts, name, divide_weight(weight, mesh, 0))
        moe.dispatcher = ExpertParallelDispatcher(moe.dispatcher, mesh.get_group())
