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
    host = np.flatnonzero(mask_of(events, *HOST)).astype(np.int32)
    thread = events.thread[host].astype(np.int64) * (int(events.process.max(initial=0)) + 1)
    thread += events.process[host]
    order = np.lexsort((-events.duration[host], events.start[host], thread))
    rows, thread = host[order], thread[order]
    place = _enclosing(thread, events.start[rows], events.end[rows])
    parent = np.full(len(events), NONE, dtype=np.int32)
    parent[rows] = np.where(place == NONE, NONE, rows[place])
    return Nesting(rows=rows, parent=parent, levels=_levels(rows, _depths(place)))


def _enclosing(thread: Ints, start: Ints, end: Ints) -> Ints:
    """Place of the innermost event around each event of a sorted list, -1 without one.

    It is the nearest earlier event of the thread that has not ended at the event's start. Where
    the nearest known so far has ended, so has everything between it and its own candidate, which
    is therefore the next candidate: each round doubles the reach.
    """
    place = np.arange(-1, len(thread) - 1, dtype=np.int32)
    place[np.flatnonzero(thread[1:] != thread[:-1]) + 1] = NONE
    unsettled = np.flatnonzero(place != NONE)
    while len(unsettled):
        candidate = place[unsettled]
        ended = end[candidate] <= start[unsettled]
        unsettled = unsettled[ended]
        place[unsettled] = place[candidate[ended]]
        unsettled = unsettled[place[unsettled] != NONE]
    return place


def _depths(place: Ints) -> Ints:
    """Number of events around each, from the place of its innermost one."""
    depth = (place != NONE).astype(np.int32)
    above = place.copy()
    inner = np.flatnonzero(place != NONE)
    while len(inner):
        depth[inner] += depth[above[inner]]
        above[inner] = above[above[inner]]
        inner = inner[above[inner] != NONE]
    return depth


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
    member = np.full(num_events, NONE, dtype=np.int32)
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
    own = cut_ends(events, nesting, rows, enclosing)
    own -= events.start
    np.maximum(own, 0, out=own)
    inside = np.zeros(len(events), dtype=np.int64)
    inner = rows[enclosing[rows] != NONE]
    np.add.at(inside, enclosing[inner], own[inner])
    return own[rows] - inside[rows]
