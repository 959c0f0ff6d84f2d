"""Collectives of several ranks put side by side: same group, same operation, same occurrence."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from reports.traces.columns import Ints
from reports.traces.communication import POINT_TO_POINT, Collective

MAX_SHIFT = 16
MAD_TOLERANCE_NS = 5000
SYNCHRONISING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")


class Member(Struct, frozen=True, kw_only=True):
    """One rank's part in a matched collective."""

    rank: int
    collective: Collective


class Group(Struct, frozen=True, kw_only=True):
    """Collectives of one group and kind; matches: one list of members per occurrence."""

    key: str
    by_sequence: bool
    matches: tuple[tuple[Member, ...], ...]
    unmatched: dict[int, int]
    shifts: dict[int, int]


def match(ranks: dict[int, Sequence[Collective]]) -> list[Group]:
    """Match every collective that at least two ranks share.

    By the profiler's sequence numbers where all have them. Otherwise by order: each rank's series
    is shifted against that of the first until operation and size agree and the ends differ by a
    constant, so a rank whose window misses the first collective does not appear late.
    """
    series: dict[str, dict[int, list[Collective]]] = defaultdict(lambda: defaultdict(list))
    for rank in sorted(ranks):
        for one in ranks[rank]:
            if one.kind not in POINT_TO_POINT:
                series[_key(one)][rank].append(one)
    return [_match_group(key, by_rank) for key, by_rank in series.items() if len(by_rank) > 1]


def _key(one: Collective) -> str:
    return f"{one.group}|{one.axis}" if one.sequence is not None else f"{one.group}|{one.kind}"


def _match_group(key: str, by_rank: dict[int, list[Collective]]) -> Group:
    if all(one.sequence is not None for series in by_rank.values() for one in series):
        places = {rank: [one.sequence for one in series] for rank, series in by_rank.items()}
        shifts: dict[int, int] = {}
    else:
        shifts = _shifts(by_rank)
        places = {
            rank: list(range(shifts[rank], shifts[rank] + len(series)))
            for rank, series in by_rank.items()
        }
    return _collected(key, by_rank, places, shifts)


def _collected(
    key: str,
    by_rank: dict[int, list[Collective]],
    places: dict[int, list[int | None]] | dict[int, list[int]],
    shifts: dict[int, int],
) -> Group:
    rows: dict[int, list[Member]] = defaultdict(list)
    for rank, series in by_rank.items():
        for place, one in zip(places[rank], series, strict=True):
            rows[place or 0].append(Member(rank=rank, collective=one))
    whole = [tuple(row) for _, row in sorted(rows.items()) if _agrees(row, len(by_rank))]
    used = {rank: sum(any(m.rank == rank for m in row) for row in whole) for rank in by_rank}
    unmatched = {rank: len(by_rank[rank]) - used[rank] for rank in by_rank}
    return Group(
        key=key,
        by_sequence=not shifts,
        matches=tuple(whole),
        unmatched={rank: count for rank, count in unmatched.items() if count},
        shifts={rank: shift for rank, shift in shifts.items() if shift},
    )


def _agrees(row: list[Member], num_ranks: int) -> bool:
    return len(row) == num_ranks and len({_signature(member.collective) for member in row}) == 1


def _signature(one: Collective) -> tuple[str, int | None]:
    """What all ranks must share; the sizes of all-to-alls and gathers may differ by rank."""
    return (one.kind, one.bytes if one.kind in ("all_reduce", "broadcast") else None)


def _shifts(by_rank: dict[int, list[Collective]]) -> dict[int, int]:
    """Place of each rank's first collective in the series of the first rank."""
    ranks = list(by_rank)
    reference = by_rank[ranks[0]]
    shifts = {rank: _best_shift(reference, by_rank[rank]) for rank in ranks}
    if len(reference) < max(len(series) for series in by_rank.values()):
        longest = max(ranks, key=lambda rank: len(by_rank[rank]))
        shifts = {rank: _best_shift(by_rank[longest], by_rank[rank]) for rank in ranks}
    return shifts


def _best_shift(reference: list[Collective], series: list[Collective]) -> int:
    if reference is series:
        return 0
    candidates = [
        _judged(reference, series, shift)
        for shift in range(-min(MAX_SHIFT, len(series) - 1), min(MAX_SHIFT, len(reference)))
    ]
    sound = [one for one in candidates if one[1] > 0]
    if not sound:
        return 0
    enough = max(count for _, count, _, _ in sound) / 2
    sound = [one for one in sound if one[1] >= enough]
    limit = 1.5 * min(spread for _, _, spread, _ in sound) + MAD_TOLERANCE_NS
    close = [one for one in sound if one[2] <= limit]
    return min(close, key=lambda one: (-one[1], one[3]))[0]


def _judged(
    reference: list[Collective], series: list[Collective], shift: int
) -> tuple[int, int, float, float]:
    """Shift, how many agree, spread of the differences of ends, and their median (ns)."""
    own = series[max(0, -shift) : len(reference) - shift]
    other = reference[max(0, shift) :]
    pairs = [(a, b) for a, b in zip(other, own, strict=False) if _signature(a) == _signature(b)]
    if not pairs or 2 * len(pairs) < min(len(own), len(other)):
        return shift, 0, 0.0, 0.0
    ends = np.array([_end(b) - _end(a) for a, b in pairs], dtype=np.int64)
    middle = float(np.median(ends))
    return shift, len(pairs), float(np.median(np.abs(ends - middle))), abs(middle)


def _end(one: Collective) -> int:
    return one.start_ns + one.duration_ns


def clock_offsets(groups: list[Group], ranks: Sequence[int]) -> dict[int, int]:
    """How far each rank's clock is ahead of the common one, in ns; 0 where that is not certain.

    A synchronising collective ends everywhere at once, so a constant difference of ends is a
    difference of clocks. It is taken as one when it exceeds three times its own spread.
    """
    place = {rank: number for number, rank in enumerate(ranks)}
    matches = [row for group in groups for row in group.matches if _synchronises(row)]
    offsets = np.zeros(len(ranks), dtype=np.int64)
    if not matches:
        return dict.fromkeys(ranks, 0)
    members = [np.array([place[member.rank] for member in row]) for row in matches]
    ends = [np.array([_end(member.collective) for member in row]) for row in matches]
    for _ in range(8):
        offsets += _step_of_offsets(members, ends, offsets)
    spread = _spread(members, ends, offsets)
    certain = np.abs(offsets) > 3 * spread + 10_000
    return {rank: int(offsets[place[rank]]) if certain[place[rank]] else 0 for rank in ranks}


def _synchronises(row: tuple[Member, ...]) -> bool:
    return row[0].collective.kind in SYNCHRONISING


def _residuals(members: list[Ints], ends: list[Ints], offsets: Ints) -> list[Ints]:
    """Per rank, by how much it ended after the middle of each collective."""
    late: list[list[int]] = [[] for _ in offsets]
    for places, stop in zip(members, ends, strict=True):
        corrected = stop - offsets[places]
        middle = int(np.sort(corrected)[(len(corrected) - 1) // 2])
        for place, value in zip(places.tolist(), (corrected - middle).tolist(), strict=True):
            late[place].append(value)
    return [np.array(values, dtype=np.int64) for values in late]


def _step_of_offsets(members: list[Ints], ends: list[Ints], offsets: Ints) -> Ints:
    late = _residuals(members, ends, offsets)
    return np.array([int(np.median(one)) if len(one) else 0 for one in late], dtype=np.int64)


def _spread(members: list[Ints], ends: list[Ints], offsets: Ints) -> Ints:
    late = _residuals(members, ends, offsets)
    return np.array([int(np.median(np.abs(one))) if len(one) else 0 for one in late])
