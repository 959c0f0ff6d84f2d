"""Sets of integer intervals [start, stop) in ns, and their arithmetic, exact to the nanosecond."""

import numpy as np
from msgspec import Struct

from reports.traces.columns import Bools, Ints


class Intervals(Struct, frozen=True, kw_only=True):
    """Disjoint, non-touching, non-empty intervals in ascending order."""

    start: Ints
    stop: Ints

    def __len__(self) -> int:
        return len(self.start)


def union(start: Ints, stop: Ints) -> Intervals:
    """The set that the given intervals cover; empty ones (stop <= start) cover nothing."""
    kept = stop > start
    start, stop = start[kept], stop[kept]
    if not len(start):
        return empty()
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(stop[order])
    opens = np.concatenate([[True], start[1:] > reach[:-1]])
    closes = np.concatenate([opens[1:], [True]])
    return Intervals(start=start[opens], stop=reach[closes])


def empty() -> Intervals:
    """The set that covers nothing."""
    nothing = np.empty(0, dtype=np.int64)
    return Intervals(start=nothing, stop=nothing)


def total(intervals: Intervals) -> int:
    """Nanoseconds that the set covers."""
    return int((intervals.stop - intervals.start).sum())


def clip(intervals: Intervals, start: int, stop: int) -> Intervals:
    """The part of the set inside [start, stop)."""
    return union(np.maximum(intervals.start, start), np.minimum(intervals.stop, stop))


def covers(intervals: Intervals, points: Ints) -> Bools:
    """Whether each point lies in the set."""
    if not len(intervals):
        return np.zeros(len(points), dtype=np.bool_)
    place = np.searchsorted(intervals.start, points, side="right") - 1
    return (place >= 0) & (points < intervals.stop[np.maximum(place, 0)])


def edges_of(*sets: Intervals) -> Ints:
    """Every border of the sets, ascending and without repetition."""
    return ascending(*(side for one in sets for side in (one.start, one.stop)))


def ascending(*times: Ints) -> Ints:
    """All times in ascending order without repetition; quick where each is in order already."""
    values = np.sort(np.concatenate(times), kind="stable")
    return values[np.concatenate([[True], values[1:] != values[:-1]])] if len(values) else values


def combine(first: Intervals, second: Intervals, keep: str) -> Intervals:
    """`first` and `second` ("both"), or `first` without `second` ("first")."""
    if not len(first):
        return empty()
    edges = edges_of(first, second)
    left, right = edges[:-1], edges[1:]
    inside = covers(second, left)
    chosen = covers(first, left) & (inside if keep == "both" else ~inside)
    return union(left[chosen], right[chosen])


def intersect(first: Intervals, second: Intervals) -> Intervals:
    """What both sets cover."""
    return combine(first, second, "both")


def subtract(first: Intervals, second: Intervals) -> Intervals:
    """What the first set covers and the second does not."""
    return combine(first, second, "first")


def covered_within(intervals: Intervals, start: Ints, stop: Ints) -> Ints:
    """For each [start, stop), the nanoseconds of it that the set covers."""
    if not len(intervals):
        return np.zeros(len(start), dtype=np.int64)
    lengths = intervals.stop - intervals.start
    before = np.concatenate([[0], np.cumsum(lengths)])
    return _covered_until(intervals, before, stop) - _covered_until(intervals, before, start)


def _covered_until(intervals: Intervals, before: Ints, points: Ints) -> Ints:
    place = np.searchsorted(intervals.start, points, side="right") - 1
    first = np.maximum(place, 0)
    inside = np.clip(
        points - intervals.start[first], 0, intervals.stop[first] - intervals.start[first]
    )
    return np.where(place < 0, 0, before[first] + inside)
