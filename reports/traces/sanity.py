"""Device events that cannot be true: found, counted, and kept out of the analyses."""

import msgspec
import numpy as np

from reports.traces.columns import CATEGORY, Events, Ints, mask_of
from reports.traces.links import DEVICE
from reports.traces.problems import Problems

TOLERANCE_NS = 1000  # older versions round both ends to whole microseconds


def repaired(events: Events, base_ns: int, problems: Problems) -> Events:
    """Events without device work at time 0, and with impossible kernels cut.

    A kernel at time 0 becomes category `other`. A kernel that outlasts a later one of its stream
    (streams run in order; graph nodes, which share one correlation, are exempt) ends where the
    later one starts.
    """
    events = _without_zero_times(events, base_ns, problems)
    rows, ends = _impossible(events)
    problems.add("impossible_kernels", len(rows))
    duration = events.duration.copy()
    duration[rows] = ends - events.start[rows]
    return msgspec.structs.replace(events, duration=duration)


def _without_zero_times(events: Events, base_ns: int, problems: Problems) -> Events:
    bad = mask_of(events, *DEVICE) & (events.start <= base_ns)
    problems.add("zero_kernels", int(bad.sum()))
    category = np.where(bad, CATEGORY["other"], events.category).astype(np.int8)
    return msgspec.structs.replace(events, category=category)


def _impossible(events: Events) -> tuple[Ints, Ints]:
    """Rows of kernels that outlast the next of their stream, and where that one starts."""
    rows = np.flatnonzero(mask_of(events, "kernel") & (events.stream >= 0) & ~events.in_graph)
    rows = rows[~_shares_correlation(events, rows)]
    order = np.lexsort((events.start[rows], events.stream[rows], events.process[rows]))
    rows = rows[order]
    here, after = rows[:-1], rows[1:]
    same = (events.stream[here] == events.stream[after]) & (
        events.process[here] == events.process[after]
    )
    outlasts = same & (events.end[here] > events.end[after] + TOLERANCE_NS)
    outlasts &= events.start[after] > events.start[here]
    return here[outlasts], events.start[after[outlasts]]


def _shares_correlation(events: Events, rows: Ints) -> np.ndarray:
    ids = events.correlation[rows]
    _, inverse, counts = np.unique(ids, return_inverse=True, return_counts=True)
    return (counts[inverse] > 1) & (ids >= 0)
