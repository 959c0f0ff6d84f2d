"""Exposed communication of each rank told apart: moving data, or waiting for a rank that is late.

The last rank to arrive waits for nobody, so what a collective takes there is its transfer. Of the
exposed part of any other rank's collective, what exceeds the transfer is waiting for that rank:
a lower bound, since compute beside a collective is taken to run at its begin.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from msgspec import Struct

from reports.traces.communication import Collective
from reports.traces.matching import Member, clock_offsets, match
from reports.traces.summary import TraceSummary, overall


class Wait(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one rank waits for another in collectives of one axis and kind, in ns, exposed only."""

    rank: int
    late_rank: int
    axis: str
    kind: str
    count: int
    wait_ns: int


def exposed_waits(traces: TraceSummary) -> list[Wait]:
    """Return the waits of all ranks within their windows, the longest first.

    Empty where fewer than two ranks share a collective.
    """
    inside = {summary.rank: overall(summary) for summary in traces.ranks}
    series: dict[int, Sequence[Collective]] = {
        summary.rank: [
            one
            for one in summary.collectives
            if 0 <= one.start_ns - inside[summary.rank].start_ns < inside[summary.rank].duration_ns
        ]
        for summary in traces.ranks
    }
    groups = match(series)
    offsets = clock_offsets(groups, sorted(series))
    sums: dict[tuple[int, int, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for group in groups:
        for members in group.matches:
            for key, wait in _waits(members, offsets):
                sums[key][0] += 1
                sums[key][1] += wait
    rows = [
        Wait(rank=rank, late_rank=late, axis=axis, kind=kind, count=count, wait_ns=wait)
        for (rank, late, axis, kind), (count, wait) in sums.items()
    ]
    return sorted(rows, key=lambda row: -row.wait_ns)


def _waits(
    members: Sequence[Member], offsets: Mapping[int, int]
) -> list[tuple[tuple[int, int, str, str], int]]:
    """Return (rank, late rank, axis, kind) and the exposed wait of each member that waits."""
    last = max(members, key=lambda member: _arrival(member, offsets))
    transfer = last.collective.duration_ns
    found = []
    for member in members:
        one = member.collective
        early = _arrival(last, offsets) - _arrival(member, offsets)
        wait = min(max(one.exposed_ns - transfer, 0), early)
        if member is not last and wait > 0:
            found.append(((member.rank, last.rank, one.axis, one.kind), wait))
    return found


def _arrival(member: Member, offsets: Mapping[int, int]) -> int:
    return member.collective.start_ns - offsets[member.rank]
