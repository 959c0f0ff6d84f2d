"""Rotation: tensors that travel from rank to rank around a ring while the ranks work on them.

N ranks of the group.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Transfer(NamedTuple):
    """A tensor on its way to the next rank, and the one of the rank before on its way here."""

    leaving: Tensor
    arriving: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        """Return what has arrived."""
        for work in self.works:
            work.wait()
        return self.arriving


def send_on(x: Tensor, group: dist.ProcessGroup) -> Transfer:
    """Start sending ``x`` to the next rank and receiving its like from the one before."""
    N, rank = group.size(), group.rank()
    arriving = torch.empty_like(x)
    operations = [
        dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % N),
        dist.P2POp(dist.irecv, arriving, group=group, group_peer=(rank - 1) % N),
    ]
    return Transfer(x, arriving, dist.batch_isend_irecv(operations))


def visits(own: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank's ``own`` with that rank: this one's first, then those before it.

    The next one travels while the caller works.
    """
    N, rank = group.size(), group.rank()
    here = own
    for step in range(N):
        transfer = send_on(here, group) if step < N - 1 else None
        yield (rank - step) % N, here
        if transfer is not None:
            here = transfer.wait()


def carry_home(shares: Iterable[Tensor], group: dist.ProcessGroup) -> Tensor:
    """Return the sum of what all ranks have for this one.

    ``shares`` are what this rank has for each, in the order of ``visits``. A sum follows the visit
    of its owner's tensor from rank to rank, each adds its share, and the last one sends it home.
    """
    home, transfer = None, None
    for share in shares:
        if home is None:
            home = share
            continue
        if transfer is not None:
            share += transfer.wait()
        transfer = send_on(share, group)
    assert home is not None, "a rank has a share for itself"
    return home if transfer is None else home.add_(transfer.wait())
