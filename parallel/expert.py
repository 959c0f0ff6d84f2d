"""Expert parallelism: experts spread over ranks, tokens exchanged by an autograd all-to-all.

T tokens of this rank, K experts per token, R rows received, E experts in all, N expert ranks.
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
from torch.distributed.tensor import DTensor, Shard

from models.layers.moe import LocalDispatcher
from models.protocol import LanguageModel


class Exchange(NamedTuple):
    """How one dispatch went, for its combine: row counts by rank, and the regrouping of rows."""

    local: Any
    sent: list[int]
    received: list[int]
    order_R: torch.Tensor


class ExpertParallelDispatcher(nn.Module):
    """Sorts rows by expert, sends them to the expert's rank, and brings the results back."""

    def __init__(self, local: LocalDispatcher, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.local = local
        self.group = group

    def dispatch(
        self, x_TD: torch.Tensor, experts_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Exchange]:
        """Return this rank's rows (R, D) sorted by local expert, their cumulative ends, the state.

        Args:
            x_TD: this rank's tokens.
            experts_TK: the chosen experts, global numbers.
        """
        rows, offsets_E, state = self.local.dispatch(x_TD, experts_TK)
        counts_NL = self._counts_by_rank(offsets_E)
        received_NL = all_to_all_single(counts_NL, None, None, self.group)
        # The one synchronization with the host: split sizes are host integers.
        sent, received = torch.stack((counts_NL.sum(1), received_NL.sum(1))).tolist()
        rows = all_to_all_single_autograd(rows, received, sent, self.group)
        order_R, local_offsets = regroup(received_NL)
        return rows[order_R], local_offsets, Exchange(state, sent, received, order_R)

    def combine(
        self, rows_RD: torch.Tensor, weights_TK: torch.Tensor, exchange: Exchange
    ) -> torch.Tensor:
        """Send the experts' outputs back and return the weighted sums (T, D)."""
        by_rank = torch.empty_like(exchange.order_R)
        by_rank[exchange.order_R] = torch.arange(by_rank.numel(), device=by_rank.device)
        rows = all_to_all_single_autograd(
            rows_RD[by_rank], exchange.sent, exchange.received, self.group
        )
        return self.local.combine(rows, weights_TK, exchange.local)

    def _counts_by_rank(self, offsets_E: torch.Tensor) -> torch.Tensor:
        counts_E = torch.diff(offsets_E, prepend=offsets_E.new_zeros(1))
        return counts_E.view(self.group.size(), -1)


def regroup(received_NL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the order that sorts received rows by local expert, and the experts' row ends.

    Args:
        received_NL: rows received by source rank and local expert; rows arrive in that order.
    """
    num_local = received_NL.shape[1]
    local_expert = torch.arange(num_local, device=received_NL.device).repeat(received_NL.shape[0])
    expert_R = local_expert.repeat_interleave(received_NL.flatten())
    ends = received_NL.sum(0).cumsum(0).to(torch.int32)
    return expert_R.argsort(stable=True), ends


def spread_experts(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Spread every expert layer of a meta-device model over ``mesh``, in place."""
    for _, moe in model.moe_layers():
        for name, weight in list(moe.experts.named_parameters(recurse=False)):
            if weight.dim() == 3:
                setattr(moe.experts, name, _shard_experts(weight, mesh))
        moe.experts.product = LocalProduct(moe.experts.product)
        moe.dispatcher = ExpertParallelDispatcher(moe.dispatcher, mesh.get_group())


def _shard_experts(weight: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    num_local = weight.shape[0] // mesh.size()
    local = weight.new_empty((num_local, *weight.shape[1:]))
    return nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))


class LocalProduct(nn.Module):
    """A grouped product on this rank's experts of a weight that is spread over ranks."""

    def __init__(self, product: Any) -> None:
        super().__init__()
        self.product = product

    def forward(
        self, x_RD: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        """Return ``product`` of the rows and the local slice of ``weight``."""
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        return self.product(x_RD, local, offsets)
