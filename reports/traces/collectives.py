"""Tables over ranks: transfer told from waiting, bus bandwidth, clocks, and who is late."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from reports.traces.communication import Collective
from reports.traces.matching import Group, Member, clock_offsets, match

MIN_SHARE = 0.01


class Matched(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One collective over its ranks; times in ns, on the common clock.

    The last rank to arrive waits for nobody, so its own duration is the transfer. skew_ns: last
    arrival less first. wait_ns: waiting of all ranks together. lateness_ns: last arrival less the
    one before it, the time that would be won if that rank alone were on time.
    whole: every rank of the group is in the trace; otherwise transfer is an upper bound and
    bandwidth a lower one. bus_bandwidth: bytes per second, as nccl-tests defines it.
    """

    group: str
    axis: str
    kind: str
    bytes: int | None
    num_ranks: int
    whole: bool
    step: str
    arrival_ns: int
    transfer_ns: int
    skew_ns: int
    wait_ns: int
    last_rank: int
    lateness_ns: int
    bus_bandwidth: float | None


class CollectiveTime(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Collectives of one axis and kind, over all ranks and steps (sums in ns).

    time_ns and exposed_ns: sums over ranks as recorded. transfer_ns, wait_ns: sums over ranks of
    matched collectives (None without a match). bus_bandwidth: median; link_fraction: of the link.
    """

    axis: str
    kind: str
    count: int
    bytes: int | None
    time_ns: int
    exposed_ns: int
    num_matched: int
    transfer_ns: int | None
    wait_ns: int | None
    bus_bandwidth: float | None
    link_fraction: float | None


class Straggler(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much others wait for one rank, and what in its own trace explains it.

    delay_ns: time that all would win if it were never the last. first_ns: the part of it in the
    first collective of the trace, where it may only be the start of the profiler's window.
    compute_excess_ns, host_excess_ns: its compute and its host-bound idle less the other ranks'
    median. cause: `compute` or `host`, whichever excess is larger; `window start`, when most of
    the delay is in the first collective; `unexplained`, when neither excess is a quarter of the
    delay; `none`, when it delays less than 1 % of the other ranks' window.
    """

    rank: int
    num_last: int
    num_matched: int
    delay_ns: int
    delay_share: float
    first_ns: int
    compute_excess_ns: int
    host_excess_ns: int
    cause: str


class CrossRank(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that needs several ranks. shifts: ranks whose windows were moved, by group."""

    matched: list[Matched]
    table: list[CollectiveTime]
    stragglers: list[Straggler]
    clock_offsets_ns: dict[int, int]
    num_unmatched: dict[int, int]
    shifts: dict[str, dict[int, int]]
    num_by_sequence: int
    num_by_order: int


def bus_factor(kind: str, num_ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth (nccl-tests, doc/PERFORMANCE.md)."""
    if kind == "all_reduce":
        return 2 * (num_ranks - 1) / num_ranks
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        return (num_ranks - 1) / num_ranks
    return 1.0


def across_ranks(
    ranks: dict[int, Sequence[Collective]],
    busy: dict[int, tuple[int, int, int]],
    *,
    link_bytes_per_second: float | None = None,
) -> CrossRank:
    """Match the collectives of all ranks.

    `busy` has each rank's (window, compute, host-bound idle) in ns, as evidence for stragglers.
    """
    groups = match(ranks)
    offsets = clock_offsets(groups, sorted(ranks))
    matched = [_matched(row, offsets) for group in groups for row in group.matches]
    matched.sort(key=lambda one: one.arrival_ns)
    unmatched: dict[int, int] = defaultdict(int)
    for group in groups:
        for rank, count in group.unmatched.items():
            unmatched[rank] += count
    return CrossRank(
        matched=matched,
        table=_table(ranks, matched, link_bytes_per_second),
        stragglers=_stragglers(matched, busy),
        clock_offsets_ns=offsets,
        num_unmatched=dict(unmatched),
        shifts={group.key: group.shifts for group in groups if group.shifts},
        num_by_sequence=_count(groups, by_sequence=True),
        num_by_order=_count(groups, by_sequence=False),
    )


def _count(groups: list[Group], *, by_sequence: bool) -> int:
    return sum(len(group.matches) for group in groups if group.by_sequence == by_sequence)


def _matched(row: tuple[Member, ...], offsets: dict[int, int]) -> Matched:
    start = np.array([m.collective.start_ns - offsets[m.rank] for m in row], dtype=np.int64)
    stop = start + np.array([m.collective.duration_ns for m in row], dtype=np.int64)
    last = int(np.argmax(start))
    arrivals = np.sort(start)
    one = row[last].collective
    transfer = int(stop[last] - start[last])
    waits = np.minimum(start[last], stop) - start
    sizes = [m.collective.bytes for m in row if m.collective.bytes is not None]
    size = max(sizes, default=None)
    num_ranks = one.group_size or len(row)
    rate = None
    if size is not None and transfer > 0 and num_ranks > 1:
        rate = size / (transfer * 1e-9) * bus_factor(one.kind, num_ranks)
    return Matched(
        group=one.group,
        axis=one.axis,
        kind=one.kind,
        bytes=size,
        num_ranks=len(row),
        whole=len(row) == num_ranks,
        step=one.step,
        arrival_ns=int(start[last]),
        transfer_ns=transfer,
        skew_ns=int(start[last] - arrivals[0]),
        wait_ns=int(waits.sum()),
        last_rank=row[last].rank,
        lateness_ns=int(arrivals[-1] - arrivals[-2]),
        bus_bandwidth=rate,
    )


def _table(
    ranks: dict[int, Sequence[Collective]], matched: list[Matched], link: float | None
) -> list[CollectiveTime]:
    own: dict[tuple[str, str], list[Collective]] = defaultdict(list)
    for series in ranks.values():
        for one in series:
            own[one.axis, one.kind].append(one)
    shared: dict[tuple[str, str], list[Matched]] = defaultdict(list)
    for match_ in matched:
        shared[match_.axis, match_.kind].append(match_)
    rows = [_time(key, own[key], shared[key], link) for key in own]
    return sorted(rows, key=lambda row: -row.time_ns)


def _time(
    key: tuple[str, str], own: list[Collective], shared: list[Matched], link: float | None
) -> CollectiveTime:
    sizes = [one.bytes for one in own if one.bytes is not None]
    rates = [one.bus_bandwidth for one in shared if one.bus_bandwidth is not None]
    rate = float(np.median(rates)) if rates else None
    return CollectiveTime(
        axis=key[0],
        kind=key[1],
        count=len(own),
        bytes=sum(sizes) if len(sizes) == len(own) else None,
        time_ns=sum(one.duration_ns for one in own),
        exposed_ns=sum(one.exposed_ns for one in own),
        num_matched=len(shared),
        transfer_ns=sum(one.transfer_ns * one.num_ranks for one in shared) if shared else None,
        wait_ns=sum(one.wait_ns for one in shared) if shared else None,
        bus_bandwidth=rate,
        link_fraction=None if rate is None or not link else rate / link,
    )


def _stragglers(matched: list[Matched], busy: dict[int, tuple[int, int, int]]) -> list[Straggler]:
    """One row per rank, the one that delays most first; empty without matched collectives."""
    if not matched:
        return []
    rows = [_straggler(rank, matched, busy) for rank in sorted(busy)]
    return sorted(rows, key=lambda row: -row.delay_ns)


def _straggler(
    rank: int, matched: list[Matched], busy: dict[int, tuple[int, int, int]]
) -> Straggler:
    last = [one for one in matched if one.last_rank == rank]
    delay = sum(one.lateness_ns for one in last)
    first = matched[0].lateness_ns if matched[0].last_rank == rank else 0
    window, compute, host = (
        busy[rank][k] - float(np.median([busy[other][k] for other in busy if other != rank] or [0]))
        for k in range(3)
    )
    share = delay / max(busy[rank][0] - window, 1.0)
    return Straggler(
        rank=rank,
        num_last=len(last),
        num_matched=len(matched),
        delay_ns=delay,
        delay_share=share,
        first_ns=first,
        compute_excess_ns=round(compute),
        host_excess_ns=round(host),
        cause=_cause(delay, share, first, compute, host),
    )


def _cause(delay: int, share: float, first: int, compute: float, host: float) -> str:
    if share < MIN_SHARE:
        return "none"
    if 2 * first > delay:
        return "window start"
    if 4 * max(compute, host) < delay:
        return "unexplained"
    return "compute" if compute > host else "host"
