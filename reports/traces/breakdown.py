"""Where a rank's time goes, step by step, in whole nanoseconds that add up exactly."""

import re

import numpy as np
from msgspec import Struct

from reports.traces.columns import NONE, Bools, Events, Ints, mask_of
from reports.traces.intervals import Intervals, ascending, covers, edges_of, empty, union
from reports.traces.links import Links
from reports.traces.steps import Step, step_edges
from reports.traces.work import (
    COMMUNICATION,
    COMPUTE,
    COPIES,
    WAIT,
    Work,
    host_communication,
    lane_set,
    point_to_point_names,
)

# Calls on the host in which it only waits for other ranks.
_BLOCKING = re.compile(r"wait_tensor|barrier|^gloo:|^mpi:|^ucc:|monitored", re.I)
_PIPELINE_WAIT = re.compile(
    r"bubble|wait.*(p2p|recv|send|stage)|(p2p|recv|send).*wait|_batch_p2p", re.I
)


class StepBreakdown(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One window of one rank, in ns. The eight parts after `duration_ns` add up to it.

    compute_ns: compute alone. overlapped_communication_ns: compute and communication together.
    exposed_communication_ns: communication without compute, of which point_to_point_ns between two
    ranks (not a part of its own). copies_ns: memory copies with neither beside them.
    Idle: host-bound (nothing was queued), collective (the host waits inside a collective),
    bubble (it waits for a pipeline neighbour), other (work was queued, or its launch is unknown).
    """

    rank: int
    step: str
    number: int | None
    start_ns: int
    duration_ns: int
    compute_ns: int = 0
    overlapped_communication_ns: int = 0
    exposed_communication_ns: int = 0
    copies_ns: int = 0
    idle_host_ns: int = 0
    idle_collective_ns: int = 0
    idle_bubble_ns: int = 0
    idle_other_ns: int = 0
    point_to_point_ns: int = 0

    @property
    def idle_ns(self) -> int:
        """All idle time."""
        return (
            self.idle_host_ns + self.idle_collective_ns + self.idle_bubble_ns + self.idle_other_ns
        )


PARTS = (
    "compute_ns",
    "overlapped_communication_ns",
    "exposed_communication_ns",
    "copies_ns",
    "idle_host_ns",
    "idle_collective_ns",
    "idle_bubble_ns",
    "idle_other_ns",
)


class Lanes(Struct, frozen=True, kw_only=True):
    """When each kind of thing goes on; `queued`: idle although the next work was launched."""

    compute: Intervals
    communication: Intervals
    point_to_point: Intervals
    copies: Intervals
    collective_wait: Intervals
    pipeline_wait: Intervals
    queued: Intervals


def lanes_of(
    events: Events, names: tuple[str, ...], work: Work, links: Links, to_peer: Bools
) -> Lanes:
    """The lanes of one rank; `to_peer`: which pieces are sends and receives between two ranks."""
    collective, pipeline = _host_waits(events, names, work)
    return Lanes(
        compute=lane_set(work, COMPUTE),
        communication=lane_set(work, COMMUNICATION),
        point_to_point=union(work.start[to_peer], work.stop[to_peer]),
        copies=lane_set(work, COPIES),
        collective_wait=collective,
        pipeline_wait=pipeline,
        queued=_queued_gaps(events, work, links) if work.on_device else empty(),
    )


def _host_waits(events: Events, names: tuple[str, ...], work: Work) -> tuple[Intervals, Intervals]:
    """When the host waits inside a collective, and when for a neighbour in the pipeline."""
    blocking = np.array([_BLOCKING.search(name) is not None for name in names] or [False])
    waiting = np.array([_PIPELINE_WAIT.search(name) is not None for name in names] or [False])
    transfers, calls = host_communication(events, names)
    to_peer = point_to_point_names(names)[events.name]
    in_collective = (transfers | calls) & blocking[events.name] & ~to_peer
    if not work.on_device:
        in_collective = np.zeros(len(events), dtype=np.bool_)
        in_collective[work.row[work.lane == WAIT]] = True
        in_collective |= calls & ~to_peer
    marks = mask_of(events, "user_annotation", "cpu_op", "python_function")
    in_pipeline = (marks & waiting[events.name]) | ((transfers | calls) & to_peer)
    collective = union(events.start[in_collective], events.end[in_collective])
    return collective, union(events.start[in_pipeline], events.end[in_pipeline])


def _queued_gaps(events: Events, work: Work, links: Links) -> Intervals:
    """Gaps of the device before work that had been launched already, or by an unknown call."""
    reach = np.maximum.accumulate(work.stop)
    follows = np.flatnonzero(work.start[1:] > reach[:-1]) + 1
    launch = np.full(len(events), NONE, dtype=np.int32)
    launch[links.device] = links.launch
    call = launch[work.row[follows]]
    early = (call == NONE) | (events.start[call] < reach[follows - 1])
    return union(reach[follows - 1][early], work.start[follows][early])


def breakdown(lanes: Lanes, steps: list[Step], rank: int) -> list[StepBreakdown]:
    """One row per window and, last, `all` over all of them."""
    bounds = step_edges(steps)
    sets = [getattr(lanes, name) for name in Lanes.__struct_fields__]
    edges = ascending(edges_of(*sets), bounds)
    edges = edges[(edges >= bounds[0]) & (edges <= bounds[-1])]
    left, length = edges[:-1], np.diff(edges)
    place = np.searchsorted(bounds, left, side="right") - 1
    masks = _parts(lanes, left)
    rows = []
    for number, step in enumerate(steps):
        chosen = place == number
        values = {name: int(length[chosen & mask].sum()) for name, mask in masks.items()}
        rows.append(_row(step, rank, values))
    if len(rows) > 1 or rows[0].step != "all":
        rows.append(_sum(rows, rank))
    return rows


def _parts(lanes: Lanes, left: Ints) -> dict[str, np.ndarray]:
    """Which elementary pieces belong to each part; every piece belongs to exactly one of PARTS."""
    compute, communication = covers(lanes.compute, left), covers(lanes.communication, left)
    copies = covers(lanes.copies, left) & ~compute & ~communication
    idle = ~compute & ~communication & ~copies
    bubble = idle & covers(lanes.pipeline_wait, left)
    collective = idle & ~bubble & covers(lanes.collective_wait, left)
    rest = idle & ~bubble & ~collective
    queued = rest & covers(lanes.queued, left)
    exposed = communication & ~compute
    return {
        "compute_ns": compute & ~communication,
        "overlapped_communication_ns": compute & communication,
        "exposed_communication_ns": exposed,
        "copies_ns": copies,
        "idle_host_ns": rest & ~queued,
        "idle_collective_ns": collective,
        "idle_bubble_ns": bubble,
        "idle_other_ns": queued,
        "point_to_point_ns": exposed & covers(lanes.point_to_point, left),
    }


def _row(step: Step, rank: int, values: dict[str, int]) -> StepBreakdown:
    duration = step.stop - step.start
    assert sum(values[name] for name in PARTS) == duration, (step, values)
    return StepBreakdown(
        rank=rank,
        step=step.name,
        number=step.number,
        start_ns=step.start,
        duration_ns=duration,
        **values,
    )


def _sum(rows: list[StepBreakdown], rank: int) -> StepBreakdown:
    names = ("duration_ns", *PARTS, "point_to_point_ns")
    sums = {name: sum(getattr(row, name) for row in rows) for name in names}
    return StepBreakdown(rank=rank, step="all", number=None, start_ns=rows[0].start_ns, **sums)
