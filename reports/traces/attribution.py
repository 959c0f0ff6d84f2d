"""For each piece of work its class, phase, operator and module; of collectives axis and kind."""

from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct

from reports.traces import work as lanes
from reports.traces.classify import (
    CLASSES,
    COMMUNICATION,
    COPY,
    OPTIMIZER,
    OTHER,
    context_class,
    kernel_class,
    operator_class,
    resolve,
)
from reports.traces.columns import CATEGORY, NONE, Ints, Numbering
from reports.traces.communication import Facts
from reports.traces.links import Links
from reports.traces.loader import Trace
from reports.traces.nesting import Nesting, inherit, nearest_or_self
from reports.traces.phases import PHASES, modules, phases

_OPTIMIZER_PHASE = PHASES.index("optimizer")


class Attribution(Struct, frozen=True, kw_only=True):
    """One entry per piece, except host_phase (per event). -1: unknown.

    axis, kind: numbers into axes and kinds, 0 (empty) for what is no collective.
    """

    class_number: Ints
    phase: Ints
    operator: Ints
    module: Ints
    axis: Ints
    kind: Ints
    axes: tuple[str, ...]
    kinds: tuple[str, ...]
    host_phase: Ints


def attribute(
    trace: Trace, work: lanes.Work, nesting: Nesting, links: Links, facts: dict[int, Facts]
) -> Attribution:
    """Attribute every piece; device work through the host call that launched it."""
    events = trace.events
    host_phase = phases(events, nesting, trace.names)
    caller = _callers(trace, work, links)
    known = caller != NONE
    operator = np.where(known, _operators(trace, nesting)[caller], NONE)
    module = np.where(known, modules(events, nesting, trace.names)[caller], NONE)
    phase = np.where(known, host_phase[caller], PHASES.index("other"))
    axis, kind, axes, kinds = _collective_columns(len(events), work, facts)
    return Attribution(
        class_number=_classes(trace, work, nesting, caller, operator, phase),
        phase=phase,
        operator=operator,
        module=module,
        axis=axis,
        kind=kind,
        axes=axes,
        kinds=kinds,
        host_phase=host_phase,
    )


def _callers(trace: Trace, work: lanes.Work, links: Links) -> Ints:
    """Host row of each piece: the launch of a device event, or the operator itself."""
    if not work.on_device:
        return work.row
    launch = np.full(len(trace.events), NONE, dtype=np.int32)
    launch[links.device] = links.launch
    return launch[work.row]


def _operators(trace: Trace, nesting: Nesting) -> Ints:
    rows = np.flatnonzero(trace.events.category == CATEGORY["cpu_op"])
    return nearest_or_self(nesting, rows, len(trace.events))


def _classes(
    trace: Trace, work: lanes.Work, nesting: Nesting, caller: Ints, operator: Ints, phase: Ints
) -> Ints:
    names = trace.names or ("",)
    number = {name: place for place, name in enumerate(CLASSES)}
    name = trace.events.name[work.row]
    own = _class_numbers(names, name, kernel_class if work.on_device else operator_class)[name]
    launching = trace.events.name[operator[operator != NONE]]
    by_operator = _class_numbers(names, launching, operator_class)
    contexts = [context_class(name) for name in names]
    by_context = np.array([NONE if one is None else number[one] for one in contexts], dtype=np.int8)
    context = inherit(nesting, by_context[trace.events.name])
    own = np.where(work.lane == lanes.COMMUNICATION, number[COMMUNICATION], own)
    own = np.where(work.lane == lanes.COPIES, number[COPY], own)
    around = np.where(caller != NONE, context[caller], NONE)
    around = np.where(phase == _OPTIMIZER_PHASE, number[OPTIMIZER], around)
    around = np.where(work.lane == lanes.COMPUTE, around, NONE)
    launched = np.where(operator != NONE, by_operator[trace.events.name[operator]], number[OTHER])
    return _resolved(own, around, launched)


def _class_numbers(names: Sequence[str], wanted: Ints, class_of: Callable[[str], str]) -> Ints:
    """Number of the class of each wanted name of a table; the others are not looked at."""
    numbers = np.zeros(len(names), dtype=np.int64)
    for place in np.flatnonzero(np.bincount(wanted, minlength=len(names))).tolist():
        numbers[place] = CLASSES.index(class_of(names[place]))
    return numbers


def _resolved(own: Ints, context: Ints, operator: Ints) -> Ints:
    """`classify.resolve` for every piece, once per distinct combination."""
    sizes = (len(CLASSES), len(CLASSES) + 1, len(CLASSES))
    combined = np.ravel_multi_index((own, context + 1, operator), sizes)
    results = np.zeros(sizes, dtype=np.int64)
    for a, b, c in np.argwhere(np.bincount(combined, minlength=results.size).reshape(sizes)):
        known = resolve(CLASSES[a], CLASSES[b - 1] if b else None, CLASSES[c])
        results[a, b, c] = CLASSES.index(known)
    return results.ravel()[combined]


def _collective_columns(
    num_events: int, work: lanes.Work, facts: dict[int, Facts]
) -> tuple[Ints, Ints, tuple[str, ...], tuple[str, ...]]:
    axes: Numbering[str] = Numbering({"": 0})
    kinds: Numbering[str] = Numbering({"": 0})
    axis = np.zeros(num_events, dtype=np.int16)
    kind = np.zeros(num_events, dtype=np.int16)
    for row, known in facts.items():
        axis[row] = axes[known.axis]
        kind[row] = kinds[known.kind]
    texts = tuple(axes), tuple(kinds)
    return axis[work.row], kind[work.row], *texts
