"""The work of a rank as pieces of time: kernels and copies, or operators where there is no device.

On a CPU the device lane is the operators' self time: each operator without the operators inside.
"""

import re

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from reports.traces.classify import is_communication
from reports.traces.columns import CATEGORY, NONE, Bools, Events, Ints, mask_of
from reports.traces.intervals import Intervals, covered_within, union
from reports.traces.links import Links
from reports.traces.nesting import Nesting, cut_ends, nearest

COMPUTE, COMMUNICATION, COPIES, WAIT = range(4)

_POINT_TO_POINT = ("send", "recv")
_FRAME = re.compile(r"^autograd::engine::evaluate_function|PostBackward\w*Backward$")


class Work(Struct, frozen=True, kw_only=True):
    """Pieces [start, stop) in ns, each with the row of its event and its lane.

    on_device: whether the pieces are kernels (else operator self times).
    exclusive_start: the piece without the time at which an earlier one of its lane still runs, so
    that the pieces of a lane add up to the time that the lane is busy.
    """

    row: Ints
    start: Ints
    stop: Ints
    lane: NDArray[np.int8]
    exclusive_start: Ints
    on_device: bool


def work_of(events: Events, names: tuple[str, ...], nesting: Nesting, links: Links) -> Work:
    """Pieces of the device, or of the host's operators when no device event is in the trace."""
    if len(links.device):
        return _device_work(events, names, links.device)
    return _host_work(events, names, nesting)


def lane_set(work: Work, lane: int) -> Intervals:
    """When the lane is busy."""
    chosen = work.lane == lane
    return union(work.start[chosen], work.stop[chosen])


def _device_work(events: Events, names: tuple[str, ...], rows: Ints) -> Work:
    communicates = communication_names(names)[events.name[rows]]
    is_kernel = events.category[rows] == CATEGORY["kernel"]
    lane = np.where(is_kernel, np.where(communicates, COMMUNICATION, COMPUTE), COPIES)
    return _work(rows, events.start[rows], events.end[rows], lane, on_device=True)


def _host_work(events: Events, names: tuple[str, ...], nesting: Nesting) -> Work:
    transfers, calls = host_communication(events, names)
    chosen = mask_of(events, "cpu_op") | transfers | calls
    row, start, stop = _self_pieces(events, nesting, np.flatnonzero(chosen))
    top = _outermost(nesting, np.where(transfers | calls, np.arange(len(events)), NONE))[row]
    row = np.where(top == NONE, row, top)
    lane = np.where(top == NONE, COMPUTE, np.where(transfers[top], COMMUNICATION, WAIT))
    lane[_waiting_frames(events, names, transfers, row, start, stop) & (lane == COMPUTE)] = WAIT
    return _work(row, start, stop, lane, on_device=False)


def _waiting_frames(
    events: Events, names: tuple[str, ...], transfers: Bools, row: Ints, start: Ints, stop: Ints
) -> Bools:
    """Which pieces are frames of the autograd engine that wait in a hook.

    A frame computes nothing outside of its operators; while a transfer runs, its own time is a
    hook of sharded data parallelism that waits for it, which no event of its own shows.
    """
    is_frame = np.array([_FRAME.search(name) is not None for name in names] or [False])
    running = union(events.start[transfers], events.end[transfers])
    return is_frame[events.name[row]] & (2 * covered_within(running, start, stop) > stop - start)


def host_communication(events: Events, names: tuple[str, ...]) -> tuple[Bools, Bools]:
    """Which host events are transfers of a CPU backend, and which are calls into collectives."""
    prefix = ("gloo:", "mpi:", "ucc:")
    is_transfer = np.array([name.startswith(prefix) for name in names] or [False])
    transfers = is_transfer[events.name] & mask_of(events, "cpu_op", "user_annotation")
    calls = communication_names(names)[events.name] & mask_of(events, "cpu_op") & ~transfers
    return transfers, calls


def communication_names(names: tuple[str, ...]) -> Bools:
    """Which names of the table belong to communication."""
    return np.array([is_communication(name) for name in names] or [False])


def point_to_point_names(names: tuple[str, ...]) -> Bools:
    """Which names are sends or receives between two ranks."""
    lowered = [name.lower() for name in names]
    return np.array([any(part in name for part in _POINT_TO_POINT) for name in lowered] or [False])


def _outermost(nesting: Nesting, own: Ints) -> Ints:
    """Value of the outermost event at or above each event that has one."""
    result = own.copy()
    for rows in nesting.levels[1:]:
        above = result[nesting.parent[rows]]
        result[rows] = np.where(above == NONE, own[rows], above)
    return result


def _self_pieces(events: Events, nesting: Nesting, rows: Ints) -> tuple[Ints, Ints, Ints]:
    """Each row's time outside of the rows inside it: row, start and stop of every piece."""
    enclosing = nearest(nesting, rows, len(events))
    end = cut_ends(events, nesting, rows, enclosing)
    rows = nesting.rows[np.isin(nesting.rows, rows)]
    inner = rows[enclosing[rows] != NONE]
    order = np.lexsort((events.start[inner], enclosing[inner]))
    inner, owner = inner[order], enclosing[inner][order]
    first = np.concatenate([[True], owner[1:] != owner[:-1]]) if len(owner) else owner == owner
    previous = np.concatenate([[0], end[inner][:-1]]) if len(owner) else end[inner]
    before = np.where(first, events.start[owner], previous)
    last_end = events.start.copy()
    np.maximum.at(last_end, owner, end[inner])
    row = np.concatenate([owner, rows])
    start = np.concatenate([before, last_end[rows]])
    stop = np.concatenate([events.start[inner], end[rows]])
    return row, start, stop


def _work(row: Ints, start: Ints, stop: Ints, lane: Ints, *, on_device: bool) -> Work:
    kept = stop > start
    row, start, stop, lane = row[kept], start[kept], stop[kept], lane[kept]
    order = np.argsort(start, kind="stable")
    row, start, stop, lane = row[order], start[order], stop[order], lane[order]
    exclusive = start.copy()
    for one in (COMPUTE, COMMUNICATION, COPIES, WAIT):
        chosen = np.flatnonzero(lane == one)
        reach = np.maximum.accumulate(stop[chosen])
        earlier = np.concatenate([start[chosen][:1], reach[:-1]])
        exclusive[chosen] = np.minimum(np.maximum(start[chosen], earlier), stop[chosen])
    return Work(
        row=row,
        start=start,
        stop=stop,
        lane=lane.astype(np.int8),
        exclusive_start=exclusive,
        on_device=on_device,
    )
