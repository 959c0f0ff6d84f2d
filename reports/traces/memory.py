"""Memory over time by kind, and what is alive at the peak, from the profiler's `[memory]` events.

A kind follows from where an allocation is made and freed: what the forward pass makes (or its
recomputation) and another phase frees is an activation; likewise a gradient in the backward pass
and optimizer state in the optimizer. What is freed in the phase or operator that made it is a
temporary. Parameters are made before the trace begins and are part of `before`.
"""

import numpy as np
from msgspec import Struct

from reports.traces.columns import NONE, Ints, mask_of
from reports.traces.loader import Trace
from reports.traces.nesting import Nesting, nearest_or_self
from reports.traces.phases import PHASES

KINDS = ("before", "activation", "gradient", "optimizer_state", "temporary", "kept", "other")
_KIND_OF_PHASE = (
    ("forward", "activation"),
    ("recompute", "activation"),
    ("backward", "gradient"),
    ("optimizer", "optimizer_state"),
)
_OTHER_PHASE = PHASES.index("other")
_MAX_POINTS = 512
_MAX_ALIVE = 50


class MemoryPoint(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True):
    """Bytes alive at one time: in total as the allocator says, and by kind (as in KINDS)."""

    time_ns: int
    total_bytes: int
    reserved_bytes: int
    by_kind: tuple[int, ...]


class Alive(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Allocations of one operator, kind and phase that are alive at the peak."""

    operator: str
    phase: str
    kind: str
    count: int
    bytes: int


class DeviceMemory(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory of one device. device: `cpu` or `device N`.

    `before` is what was allocated before the trace began: the first total less its own bytes.
    points: the course, thinned, always with the peak. alive: at the peak, the largest first.
    num_unmatched_frees: frees of memory from before the trace.
    """

    device: str
    peak_bytes: int
    peak_time_ns: int
    peak_reserved_bytes: int
    peak_by_kind: dict[str, int]
    num_allocations: int
    num_unmatched_frees: int
    points: list[MemoryPoint]
    alive: list[Alive]


class _Blocks(Struct, frozen=True, kw_only=True):
    """Allocations as rows: index of the event that made and of the one that freed each (or -1)."""

    made: Ints
    freed: Ints


def memory_of(trace: Trace, nesting: Nesting, host_phase: Ints) -> list[DeviceMemory]:
    """One entry per device with `[memory]` events; empty without any."""
    memory = trace.memory
    if not len(memory):
        return []
    around = _around(trace, nesting)
    operators = nearest_or_self(
        nesting, np.flatnonzero(mask_of(trace.events, "cpu_op")), len(trace.events)
    )
    key = memory.device_type * 1024 + memory.device_id
    found = []
    for value in np.unique(key).tolist():
        rows = np.flatnonzero(key == value)
        rows = rows[np.argsort(memory.time[rows], kind="stable")]
        found.append(_device(trace, rows, around[rows], operators, host_phase))
    return sorted(found, key=lambda one: -one.peak_bytes)


def _around(trace: Trace, nesting: Nesting) -> Ints:
    """Row of the innermost host event of the same thread around each memory event, or -1."""
    events, memory = trace.events, trace.memory
    result = np.full(len(memory), NONE, dtype=np.int64)
    for thread in np.unique(memory.thread).tolist():
        own = nesting.rows[events.thread[nesting.rows] == thread]
        own = own[np.argsort(events.start[own], kind="stable")]
        wanted = np.flatnonzero(memory.thread == thread)
        if not len(own):
            continue
        place = np.searchsorted(events.start[own], memory.time[wanted], side="right") - 1
        row = np.where(place < 0, NONE, own[np.maximum(place, 0)])
        late = (row != NONE) & (events.end[row] < memory.time[wanted])
        while late.any():
            row[late] = nesting.parent[row[late]]
            late = (row != NONE) & (events.end[row] < memory.time[wanted])
        result[wanted] = row
    return result


def _device(
    trace: Trace, rows: Ints, around: Ints, operators: Ints, host_phase: Ints
) -> DeviceMemory:
    memory = trace.memory
    sizes, totals = memory.bytes[rows], memory.total_allocated[rows]
    blocks, num_unmatched = _blocks(memory.address[rows], sizes)
    before = int(totals[0] - sizes[0]) if totals[0] >= 0 else 0
    if totals[0] < 0:
        totals = np.cumsum(sizes)
    phase = np.where(around == NONE, _OTHER_PHASE, host_phase[around])
    kinds = _kinds(blocks, around, phase)
    by_kind = _courses(blocks, kinds, sizes, before, num_events=len(rows))
    peak = int(np.argmax(totals))
    device_type, device_id = int(memory.device_type[rows[0]]), int(memory.device_id[rows[0]])
    operator = np.where(around == NONE, NONE, operators[around])
    return DeviceMemory(
        device="cpu" if device_type == 0 else f"device {device_id}",
        peak_bytes=int(totals[peak]),
        peak_time_ns=int(memory.time[rows[peak]]),
        peak_reserved_bytes=int(memory.total_reserved[rows].max()),
        peak_by_kind={name: int(by_kind[k, peak]) for k, name in enumerate(KINDS)},
        num_allocations=len(blocks.made),
        num_unmatched_frees=num_unmatched,
        points=_points(trace, rows, totals, by_kind, peak),
        alive=_alive(trace, sizes, blocks, kinds, peak, operator, phase),
    )


def _blocks(addresses: Ints, sizes: Ints) -> tuple[_Blocks, int]:
    """Pair each allocation with the next free of its address."""
    made: list[int] = []
    freed: list[int] = []
    live: dict[int, int] = {}
    num_unmatched = 0
    for index, (address, size) in enumerate(zip(addresses.tolist(), sizes.tolist(), strict=True)):
        if size > 0:
            live[address] = len(made)
            made.append(index)
            freed.append(NONE)
        elif size < 0 and address in live:
            freed[live.pop(address)] = index
        elif size < 0:
            num_unmatched += 1
    return _Blocks(made=np.array(made, np.int64), freed=np.array(freed, np.int64)), num_unmatched


def _kinds(blocks: _Blocks, around: Ints, phase: Ints) -> Ints:
    """Number into KINDS of each block."""
    stays = blocks.freed == NONE
    freed = np.maximum(blocks.freed, 0)
    made_in, made_at = phase[blocks.made], around[blocks.made]
    leaves = stays | (phase[freed] != made_in)
    kinds = np.where(stays, KINDS.index("kept"), KINDS.index("other"))
    for name, kind in _KIND_OF_PHASE:
        inside = made_in == PHASES.index(name)
        kinds[inside] = np.where(leaves[inside], KINDS.index(kind), KINDS.index("temporary"))
    same_operator = ~stays & (made_at != NONE) & (made_at == around[freed])
    kinds[same_operator] = KINDS.index("temporary")
    return kinds


def _courses(blocks: _Blocks, kinds: Ints, sizes: Ints, before: int, *, num_events: int) -> Ints:
    """Bytes alive by kind after each event: (number of kinds, number of events)."""
    change = np.zeros((len(KINDS), num_events), dtype=np.int64)
    size = sizes[blocks.made]
    np.add.at(change, (kinds, blocks.made), size)
    ends = blocks.freed != NONE
    np.add.at(change, (kinds[ends], blocks.freed[ends]), -size[ends])
    paired = np.zeros(num_events, dtype=np.bool_)
    paired[blocks.freed[ends]] = True
    change[0] += np.where((sizes < 0) & ~paired, sizes, 0)
    change[0, 0] += before
    return np.cumsum(change, axis=1)


def _points(trace: Trace, rows: Ints, totals: Ints, by_kind: Ints, peak: int) -> list[MemoryPoint]:
    chosen = np.unique(np.append(np.linspace(0, len(rows) - 1, _MAX_POINTS).astype(np.int64), peak))
    return [
        MemoryPoint(
            time_ns=int(trace.memory.time[rows[index]]),
            total_bytes=int(totals[index]),
            reserved_bytes=int(trace.memory.total_reserved[rows[index]]),
            by_kind=tuple(by_kind[:, index].tolist()),
        )
        for index in chosen.tolist()
    ]


def _alive(
    trace: Trace, sizes: Ints, blocks: _Blocks, kinds: Ints, peak: int, operator: Ints, phase: Ints
) -> list[Alive]:
    living = (blocks.made <= peak) & ((blocks.freed == NONE) | (blocks.freed > peak))
    sums: dict[tuple[str, str, str], list[int]] = {}
    for block in np.flatnonzero(living).tolist():
        made = int(blocks.made[block])
        row = int(operator[made])
        name = trace.names[trace.events.name[row]] if row != NONE else "outside operators"
        entry = sums.setdefault((name, PHASES[phase[made]], KINDS[kinds[block]]), [0, 0])
        entry[0] += 1
        entry[1] += int(sizes[made])
    found = [
        Alive(operator=name, phase=phase_name, kind=kind, count=count, bytes=size)
        for (name, phase_name, kind), (count, size) in sums.items()
    ]
    return sorted(found, key=lambda one: -one.bytes)[:_MAX_ALIVE]
