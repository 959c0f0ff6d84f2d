"""A rank's work summed by class, name, operator and module: small tables out of many pieces."""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from reports.traces.attribution import Attribution
from reports.traces.classify import CLASSES
from reports.traces.columns import NONE, Ints, mask_of
from reports.traces.loader import Trace
from reports.traces.names import normalise
from reports.traces.nesting import Nesting, self_times
from reports.traces.phases import PHASES
from reports.traces.steps import Step
from reports.traces.work import COMPUTE, COPIES, WAIT, Work


class ClassTime(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Work of one class and phase in one step; times in ns.

    name: a class of `classify`, or `communication` with axis and kind given.
    time_ns: sum of durations. exclusive_ns: without the time at which an earlier piece of the same
    lane still ran, so that the rows of a lane add up to the time the lane is busy.
    exposed_ns: of a collective, its part of the exposed communication; 0 for others.
    """

    step: str
    name: str
    phase: str
    axis: str
    kind: str
    count: int
    time_ns: int
    exclusive_ns: int
    exposed_ns: int


class NameTime(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Kernels (or, on a CPU, operators) of one normalised name over all steps; times in ns."""

    name: str
    class_name: str
    phase: str
    count: int
    time_ns: int
    exclusive_ns: int


class OperatorTime(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Host operators of one name: their own time on the host and the device work they launch."""

    name: str
    phase: str
    count: int
    host_self_ns: int
    device_ns: int


class ModuleTime(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Compute work inside calls of one kind of module; ns, exclusive."""

    module: str
    phase: str
    count: int
    exclusive_ns: int


def group(keys: Sequence[Ints], values: Sequence[Ints]) -> tuple[Ints, Ints]:
    """Sum values over equal keys: distinct keys (groups, keys) and sums (groups, values).

    Keys are numbers from 0 on, few enough that their combinations fit in 63 bits.
    """
    sizes = [int(key.max(initial=0)) + 1 for key in keys]
    if not len(keys[0]):
        return np.empty((0, len(keys)), np.int64), np.empty((0, len(values)), np.int64)
    combined = np.ravel_multi_index(tuple(keys), sizes)
    combined = combined.astype(np.min_scalar_type(combined.max()))  # two bytes sort fastest
    order = np.argsort(combined, kind="stable")
    combined = combined[order]
    first = np.flatnonzero(np.concatenate([[True], combined[1:] != combined[:-1]]))
    sums = [np.add.reduceat(value[order], first, dtype=np.int64) for value in values]
    distinct = combined[first].astype(np.int64)
    return np.stack(np.unravel_index(distinct, sizes), axis=1), np.stack(sums, axis=1)


class Names(Struct, frozen=True, kw_only=True):
    """Normalised names, and for each name of the trace the number of its own among them."""

    texts: list[str]
    number: Ints


def normalised(names: tuple[str, ...]) -> Names:
    """Normalise a trace's table of names, once for all tables."""
    numbering: dict[str, int] = {}
    numbers = [numbering.setdefault(normalise(name), len(numbering)) for name in names]
    return Names(texts=list(numbering), number=np.array(numbers or [0], dtype=np.int64))


def first_of_row(work: Work) -> Ints:
    """1 for the first piece of each event, 0 for its others: a count of events."""
    pieces = np.arange(len(work.row))
    first = np.empty(int(work.row.max(initial=NONE)) + 1, dtype=np.int64)
    first[work.row[::-1]] = pieces[::-1]  # of several values for one place the last one stays
    return (first[work.row] == pieces).astype(np.int64)


def class_times(
    work: Work, attribution: Attribution, steps: list[Step], place: Ints, exposed: Ints
) -> list[ClassTime]:
    """Rows by step, class, phase, axis and kind, the longest first within a step."""
    kept = (work.lane != WAIT) & (place != NONE)
    keys = [
        place,
        attribution.class_number,
        attribution.phase,
        attribution.axis,
        attribution.kind,
    ]
    values = [
        first_of_row(work),
        work.stop - work.start,
        work.stop - work.exclusive_start,
        exposed,
    ]
    distinct, sums = group([key[kept] for key in keys], [value[kept] for value in values])
    rows = []
    for (step, number, phase, axis, kind), (count, time, exclusive, out) in zip(
        distinct.tolist(), sums.tolist(), strict=True
    ):
        rows.append(
            ClassTime(
                step=steps[step].name,
                name=CLASSES[number],
                phase=PHASES[phase],
                axis=attribution.axes[axis],
                kind=attribution.kinds[kind],
                count=count,
                time_ns=time,
                exclusive_ns=exclusive,
                exposed_ns=out,
            )
        )
    return sorted(rows, key=lambda row: -row.exclusive_ns)


def name_times(trace: Trace, names: Names, work: Work, attribution: Attribution) -> list[NameTime]:
    """Rows by normalised name, class and phase, the longest first."""
    kept = work.lane != WAIT
    keys = [names.number[trace.events.name[work.row]], attribution.class_number, attribution.phase]
    values = [first_of_row(work), work.stop - work.start, work.stop - work.exclusive_start]
    distinct, sums = group([key[kept] for key in keys], [value[kept] for value in values])
    rows = [
        NameTime(
            name=names.texts[name],
            class_name=CLASSES[number],
            phase=PHASES[phase],
            count=count,
            time_ns=time,
            exclusive_ns=exclusive,
        )
        for (name, number, phase), (count, time, exclusive) in zip(
            distinct.tolist(), sums.tolist(), strict=True
        )
    ]
    return sorted(rows, key=lambda row: -row.exclusive_ns)


def operator_times(
    trace: Trace, names: Names, nesting: Nesting, work: Work, attribution: Attribution
) -> list[OperatorTime]:
    """Rows by operator and phase, the one with the most device and host time first."""
    events = trace.events
    rows = np.flatnonzero(mask_of(events, "cpu_op"))
    device = np.zeros(len(events), dtype=np.int64)
    if work.on_device:
        known = (attribution.operator != NONE) & np.isin(work.lane, (COMPUTE, COPIES))
        np.add.at(device, attribution.operator[known], (work.stop - work.start)[known])
    keys = [names.number[events.name[rows]], attribution.host_phase[rows]]
    values = [np.ones(len(rows), dtype=np.int64), self_times(events, nesting, rows), device[rows]]
    distinct, sums = group(keys, values)
    found = [
        OperatorTime(
            name=names.texts[name],
            phase=PHASES[phase],
            count=count,
            host_self_ns=host,
            device_ns=own,
        )
        for (name, phase), (count, host, own) in zip(distinct.tolist(), sums.tolist(), strict=True)
    ]
    return sorted(found, key=lambda row: -(row.device_ns or row.host_self_ns))


def module_times(
    trace: Trace, names: Names, work: Work, attribution: Attribution
) -> list[ModuleTime]:
    """Rows by kind of module and phase; empty when the trace has no module calls."""
    kept = (attribution.module != NONE) & (work.lane == COMPUTE)
    if not kept.any():
        return []
    keys = [names.number[trace.events.name[attribution.module]], attribution.phase]
    values = [first_of_row(work), work.stop - work.exclusive_start]
    distinct, sums = group([key[kept] for key in keys], [value[kept] for value in values])
    rows = [
        ModuleTime(
            module=names.texts[module].removeprefix("nn.Module: "),
            phase=PHASES[phase],
            count=count,
            exclusive_ns=time,
        )
        for (module, phase), (count, time) in zip(distinct.tolist(), sums.tolist(), strict=True)
    ]
    return sorted(rows, key=lambda row: -row.exclusive_ns)


def cut_at(work: Work, edges: Ints) -> tuple[Work, Ints]:
    """Pieces cut at the borders of the steps, and the step of each (-1 outside of all)."""
    crossing = np.searchsorted(edges, work.start, "right") < np.searchsorted(
        edges, work.stop, "left"
    )
    parts = [np.flatnonzero(~crossing)]
    starts, stops = [work.start[~crossing]], [work.stop[~crossing]]
    for piece in np.flatnonzero(crossing).tolist():
        first, last = int(work.start[piece]), int(work.stop[piece])
        inner = edges[(edges > first) & (edges < last)]
        parts.append(np.full(len(inner) + 1, piece))
        starts.append(np.concatenate([[first], inner]))
        stops.append(np.concatenate([inner, [last]]))
    source, start, stop = (np.concatenate(one) for one in (parts, starts, stops))
    order = np.argsort(start, kind="stable")
    source, start, stop = source[order], start[order], stop[order]
    place = np.searchsorted(edges, start, side="right") - 1
    exclusive = np.clip(work.exclusive_start[source], start, stop)
    cut = Work(
        row=work.row[source],
        start=start,
        stop=stop,
        lane=work.lane[source],
        exclusive_start=exclusive,
        on_device=work.on_device,
    )
    return cut, np.where((place >= 0) & (place < len(edges) - 1), place, NONE)
