"""Which host event contains which: parents, self times, and values passed down to children."""

import numpy as np
from msgspec import Struct

from reports.traces.columns import NONE, Events, Ints, mask_of

HOST = ("cpu_op", "user_annotation", "python_function", "runtime", "driver")


class Nesting(Struct, frozen=True, kw_only=True):
    """The containment tree of the host events.

    rows: host events in the order thread, start, longest first; a parent precedes its children.
    parent: row of the innermost event that contains each event of the trace, -1 without one.
    levels: rows by depth, outermost first.
    """

    rows: Ints
    parent: Ints
    levels: tuple[Ints, ...]


def nest(events: Events) -> Nesting:
    """Build the tree; an event that overhangs its parent's end is still its child."""
    host = np.flatnonzero(mask_of(events, *HOST))
    thread = events.thread[host].astype(np.int64) * (int(events.process.max(initial=0)) + 1)
    thread += events.process[host]
    order = np.lexsort((-events.duration[host], events.start[host], thread))
    rows, thread = host[order], thread[order]
    parent = np.full(len(events), NONE, dtype=np.int64)
    depth = _parents(rows, thread, events, parent)
    levels = _levels(rows, depth)
    return Nesting(rows=rows, parent=parent, levels=levels)


def _parents(rows: Ints, thread: Ints, events: Events, parent: Ints) -> Ints:
    """Fill `parent` and return the depth of each of `rows`."""
    starts, ends = events.start[rows].tolist(), events.end[rows].tolist()
    owners, depths = [], []
    stack_rows: list[int] = []
    stack_ends: list[int] = []
    current = None
    for row, own_thread, start, end in zip(
        rows.tolist(), thread.tolist(), starts, ends, strict=True
    ):
        if own_thread != current:
            current = own_thread
            stack_rows.clear()
            stack_ends.clear()
        while stack_ends and stack_ends[-1] <= start:
            stack_ends.pop()
            stack_rows.pop()
        owners.append(stack_rows[-1] if stack_rows else NONE)
        depths.append(len(stack_rows))
        stack_rows.append(row)
        stack_ends.append(end)
    parent[rows] = owners
    return np.array(depths, dtype=np.int64)


def _levels(rows: Ints, depth: Ints) -> tuple[Ints, ...]:
    order = np.argsort(depth, kind="stable")
    if not len(depth):
        return ()
    return tuple(np.split(rows[order], np.cumsum(np.bincount(depth))[:-1]))


def inherit(nesting: Nesting, own: Ints) -> Ints:
    """Each event's own value, or where it is -1 that of the nearest ancestor which has one."""
    values = own.copy()
    for rows in nesting.levels[1:]:
        inherited = values[nesting.parent[rows]]
        values[rows] = np.where(own[rows] == NONE, inherited, own[rows])
    return values


def nearest_or_self(nesting: Nesting, rows: Ints, num_events: int) -> Ints:
    """For each event itself if it is among `rows`, else its nearest ancestor there, else -1."""
    member = np.full(num_events, NONE, dtype=np.int64)
    member[rows] = rows
    return inherit(nesting, member)


def nearest(nesting: Nesting, rows: Ints, num_events: int) -> Ints:
    """For each event its nearest proper ancestor among `rows`, -1 without one."""
    including = nearest_or_self(nesting, rows, num_events)
    return np.where(nesting.parent == NONE, NONE, including[nesting.parent])


def cut_ends(events: Events, nesting: Nesting, rows: Ints, enclosing: Ints) -> Ints:
    """End of each event in ns, for `rows` not later than that of the enclosing row."""
    end = events.end.copy()
    chosen = np.zeros(len(events), dtype=np.bool_)
    chosen[rows] = True
    for level in nesting.levels:
        inner = level[chosen[level] & (enclosing[level] != NONE)]
        end[inner] = np.minimum(end[inner], end[enclosing[inner]])
    return end


def self_times(events: Events, nesting: Nesting, rows: Ints) -> Ints:
    """Duration of each row in ns less the time inside those of its descendants that are in `rows`.

    An event that overhangs its parent is cut at the parent's end, so that the values add up to the
    time that the outermost rows cover.
    """
    enclosing = nearest(nesting, rows, len(events))
    own = np.maximum(cut_ends(events, nesting, rows, enclosing) - events.start, 0)
    result = own.copy()
    inner = rows[enclosing[rows] != NONE]
    np.subtract.at(result, enclosing[inner], own[inner])
    return result[rows]
