"""One trace into its summary. A measured run calls this on every rank, inside the job."""

from pathlib import Path

import numpy as np

from reports.traces.attribution import Attribution, attribute
from reports.traces.breakdown import StepBreakdown, breakdown, lanes_of
from reports.traces.cache import load_cached
from reports.traces.columns import NONE, Ints, mask_of
from reports.traces.communication import (
    POINT_TO_POINT,
    Collective,
    collective_facts,
    collectives,
)
from reports.traces.intervals import covered_within, subtract
from reports.traces.launches import launch_times, num_missing_kernels
from reports.traces.links import Links, link
from reports.traces.loader import Trace, load
from reports.traces.memory import memory_of
from reports.traces.nesting import nest
from reports.traces.point_to_point import transfers
from reports.traces.problems import Problems, Warning
from reports.traces.steps import Step, step_edges, windows
from reports.traces.summary import Coverage, RankSummary
from reports.traces.tables import (
    class_times,
    cut_at,
    module_times,
    name_times,
    normalised,
    operator_times,
)
from reports.traces.work import COMMUNICATION, COMPUTE, Work, lane_set, work_of


def reduce_trace(path: Path | str, *, cache: bool = False) -> RankSummary:
    """Load a file (through the cache beside it, if asked) and reduce it.

    Raises TraceError when it is no trace or has no event with a duration.
    """
    return summarise(load_cached(Path(path)) if cache else load(path))


def summarise(trace: Trace) -> RankSummary:
    """Reduce a loaded trace to tables."""
    events = trace.events
    nesting, links = nest(events), link(events)
    steps, has_steps = windows(events, trace.names)
    edges = step_edges(steps)
    work, place = cut_at(work_of(events, trace.names, nesting, links), edges)
    facts = collective_facts(trace, work, links, nesting)
    attribution = attribute(trace, work, nesting, links, facts)
    names = normalised(trace.names)
    series = collectives(trace, work, facts, steps)
    rows = _breakdown(trace, work, links, attribution, steps)
    return RankSummary(
        path=trace.path,
        rank=trace.rank,
        rank_is_known=trace.rank_is_known,
        world_size=trace.metadata.world_size,
        backend=trace.metadata.backend,
        devices=trace.metadata.devices,
        versions=trace.metadata.versions,
        lane="device" if work.on_device else "operators",
        num_events=len(events),
        num_steps=sum(step.number is not None for step in steps),
        coverage=_coverage(trace, links, work, has_steps=has_steps),
        breakdown=rows,
        classes=class_times(work, attribution, steps, place, _exposed(work)),
        names=name_times(trace, names, work, attribution),
        operators=operator_times(trace, names, nesting, work, attribution),
        modules=module_times(trace, names, work, attribution),
        collectives=series,
        transfers=transfers(trace, facts),
        launches=launch_times(trace, links),
        memory=memory_of(trace, nesting, attribution.host_phase),
        warnings=[*trace.warnings, *_notes(trace, links, work, series, rows, has_steps=has_steps)],
    )


def _breakdown(
    trace: Trace, work: Work, links: Links, attribution: Attribution, steps: list[Step]
) -> list[StepBreakdown]:
    to_peer = np.isin(attribution.kind, [
        number for number, kind in enumerate(attribution.kinds) if kind in POINT_TO_POINT
    ]) & (work.lane == COMMUNICATION)  # fmt: skip
    lanes = lanes_of(trace.events, trace.names, work, links, to_peer)
    return breakdown(lanes, steps, trace.rank)


def _exposed(work: Work) -> Ints:
    """Exposed communication in each piece, ns; adds up to that of the rank."""
    exposed = subtract(lane_set(work, COMMUNICATION), lane_set(work, COMPUTE))
    values = covered_within(exposed, work.exclusive_start, work.stop)
    return np.where(work.lane == COMMUNICATION, values, 0)


def _coverage(trace: Trace, links: Links, work: Work, *, has_steps: bool) -> Coverage:
    return Coverage(
        device_events=work.on_device,
        operators=bool(mask_of(trace.events, "cpu_op").any()),
        launches=bool((links.launch != NONE).any()),
        steps=has_steps,
        modules=any(name.startswith("nn.Module: ") for name in trace.names),
        memory=len(trace.memory) > 0,
        shapes=len(trace.dims) > 0,
        collective_metadata=len(trace.collectives) + len(trace.metadata.issued) > 0,
    )


def _notes(
    trace: Trace,
    links: Links,
    work: Work,
    series: list[Collective],
    rows: list[StepBreakdown],
    *,
    has_steps: bool,
) -> tuple[Warning, ...]:
    """Warnings that only the analyses can give."""
    problems = Problems(trace.path)
    problems.add("no_steps", int(not has_steps))
    problems.add("missing_kernels", num_missing_kernels(trace, links))
    on_accelerator = bool(mask_of(trace.events, "runtime", "driver").any())
    on_accelerator |= bool(trace.metadata.devices)
    problems.add("no_kernels", int(on_accelerator and not work.on_device))
    problems.add("unlinked_collectives", sum(one.source == "name" for one in series))
    called = any(name.startswith("nccl:") for name in trace.names)
    problems.add("missing_communication", int(called and not series))
    longest = max((one.duration_ns for one in series), default=0)
    problems.add("dominant_collective", int(2 * longest > rows[-1].duration_ns > 0))
    return problems.warnings()
