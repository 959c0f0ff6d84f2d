"""Memory over time by kind, and what is alive at the peak, from the profiler's `[memory]` events.

Parameters are made before the trace begins and are part of `before`.
"""

import numpy as np

from reports.traces.allocations import DeviceMemory, Recorded, device_memory
from reports.traces.columns import NONE, Ints, Numbering, mask_of
from reports.traces.loader import Trace
from reports.traces.nesting import Nesting, nearest_or_self
from reports.traces.phases import PHASES, modules

SOURCE = "memory events of the trace"
SINCE_START = (
    "The profiler counts the host's memory from its own start: what was there before, such as "
    "parameters, is not in the trace."
)
EVENT_KINDS = (
    "before",
    "activation",
    "gradient",
    "optimizer_state",
    "temporary",
    "kept",
    "other",
)
_OTHER_PHASE = PHASES.index("other")
_MODULE_PREFIX = "nn.Module: "


def memory_of(trace: Trace, nesting: Nesting, host_phase: Ints) -> list[DeviceMemory]:
    """One entry per device with `[memory]` events; empty without any."""
    memory = trace.memory
    if not len(memory):
        return []
    around = _around(trace, nesting)
    operators = nearest_or_self(
        nesting, np.flatnonzero(mask_of(trace.events, "cpu_op")), len(trace.events)
    )
    inside = modules(trace.events, nesting, trace.names)
    phase = np.where(around == NONE, _OTHER_PHASE, host_phase[around])
    operator = np.where(around == NONE, NONE, operators[around])
    module = np.where(around == NONE, NONE, inside[around])
    key = memory.device_type * 1024 + memory.device_id
    found = []
    for value in np.unique(key).tolist():
        rows = np.flatnonzero(key == value)
        rows = rows[np.argsort(memory.time[rows], kind="stable")]
        columns = (column[rows] for column in (around, phase, operator, module))
        on_host = int(memory.device_type[rows[0]]) == 0
        device = "cpu" if on_host else f"device {int(memory.device_id[rows[0]])}"
        recorded = _recorded(trace, rows, *columns)
        found.append(_device(recorded, device, on_host=on_host))
    return sorted(found, key=lambda one: -one.peak_bytes)


def _device(recorded: Recorded, device: str, *, on_host: bool) -> DeviceMemory:
    """Memory of one device. On the host the profiler counts from its own start.

    What was there before is then not known rather than zero, unless something of it is freed.
    """
    whole = device_memory(recorded, device=device, source=SOURCE, kinds=EVENT_KINDS)
    if not on_host or whole.num_unmatched_frees or whole.peak_by_kind["before"]:
        return whole
    kinds = [kind for kind in EVENT_KINDS if kind != "before"]
    return device_memory(recorded, device=device, source=SOURCE, kinds=kinds, notes=[SINCE_START])


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


def _recorded(
    trace: Trace, rows: Ints, around: Ints, phase: Ints, operator: Ints, module: Ints
) -> Recorded:
    """Rows of one device; totals are the allocator's own where the trace has them."""
    memory = trace.memory
    sizes, totals = memory.bytes[rows], memory.total_allocated[rows]
    has_totals = bool(totals[0] >= 0)
    labels: Numbering[str] = Numbering()
    return Recorded(
        time=memory.time[rows],
        address=memory.address[rows],
        bytes=sizes,
        phase=phase,
        place=around,
        operator=_labelled(trace, operator, labels, "outside operators"),
        module=_labelled(trace, module, labels, ""),
        kind=np.full(len(rows), NONE, dtype=np.int64),
        labels=tuple(labels),
        total=totals if has_totals else None,
        reserved=memory.total_reserved[rows] if has_totals else None,
        before=int(totals[0] - sizes[0]) if has_totals else 0,
    )


def _labelled(trace: Trace, events: Ints, labels: Numbering[str], absent: str) -> Ints:
    """Number into `labels` of the name of each event, `absent` for -1."""
    number = np.where(events == NONE, NONE, trace.events.name[events])
    names = {value: "" if value == NONE else trace.names[value] for value in np.unique(number)}
    known = {v: labels[name.removeprefix(_MODULE_PREFIX) or absent] for v, name in names.items()}
    return np.array([known[value] for value in number.tolist()], dtype=np.int64)
