"""The critical path of one step of a rank, from HTA's graph: what must get shorter for the step to.

HTA's graph has an edge for each piece of host time, each kernel, each launch, each gap between
kernels of one stream and each wait of the host for the device; the path is the longest through
it. What HTA cannot do becomes the reason why there is no path.
"""

import contextlib
import io
import logging
import warnings
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from hta.trace_analysis import TraceAnalysis
from msgspec import Struct

from reports.traces.classify import is_communication
from reports.traces.columns import CATEGORY, mask_of
from reports.traces.links import DEVICE
from reports.traces.loader import Trace
from reports.traces.steps import windows

SOURCE = "critical path analysis of HolisticTraceAnalysis on our columns"
NO_DEVICE = (
    "HTA's critical path runs from launches over kernels to synchronisations, and no kernel of a "
    "device is in this trace"
)
NO_SYNC = (
    "The trace has no synchronisation events: HTA cannot see where the host waits for the device, "
    "so the path may leave the device too early."
)
NO_EVENT_WAITS = "Waits of one stream for an event of another are not edges here."
_BOUND_BY = {
    "critical_path_kernel_kernel_delay": "gap between kernels",
    "critical_path_kernel_launch_delay": "launch",
    "critical_path_dependency": "order of operators",
    "critical_path_sync_dependency": "synchronisation",
}
HOST, KERNEL, COMMUNICATION = "host", "kernel", "communication"
_DEVICE_NUMBERS = frozenset(CATEGORY[name] for name in DEVICE)
_MAX_PARTS = 30


class PathEdge(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One edge of the path in order; name: of the event that it belongs to, if it is one's."""

    bound_by: str
    name: str
    start_ns: int
    duration_ns: int


class PathPart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All edges of the path of one kind and name."""

    bound_by: str
    name: str
    count: int
    duration_ns: int


class CriticalPath(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The path of one window of one rank, or the reason why there is none.

    length_ns: sum of the edges, at most the window's; by_bound adds up to it, in ns. parts: the
    longest; notes: what HTA could not see.
    """

    rank: int
    window: str
    source: str = SOURCE
    length_ns: int = 0
    window_ns: int = 0
    num_edges: int = 0
    by_bound: dict[str, int] = {}
    parts: list[PathPart] = []
    notes: list[str] = []
    reason: str | None = None


def critical_path(analysis: TraceAnalysis, trace: Trace) -> CriticalPath:
    """The path of the rank's last profiler step, or of the whole trace without steps."""
    steps, has_steps = windows(trace.events, trace.names)
    marked = [step for step in steps if step.number is not None]
    window = marked[-1] if has_steps and marked else None
    name = window.name if window else "the whole trace"
    if not mask_of(trace.events, *DEVICE).any():
        return CriticalPath(rank=trace.rank, window=name, reason=f"{NO_DEVICE}.")
    try:
        graph = graph_of(analysis, trace.rank, len(marked) - 1 if window else None)
    except Exception as error:  # HTA raises nearly any type; each becomes the reason
        reason = f"HTA: {type(error).__name__}: {error}".rstrip(": ")
        return CriticalPath(rank=trace.rank, window=name, reason=reason)
    if graph is None:
        return CriticalPath(rank=trace.rank, window=name, reason="HTA found no path.")
    edges = list(path_edges(graph, trace))
    whole = int(trace.events.end.max() - trace.events.start.min())
    return _summary(edges, trace, name, window.stop - window.start if window else whole)


def graph_of(analysis: TraceAnalysis, rank: int, instance: int | None) -> Any:
    """HTA's graph with its longest path; None without one."""
    annotation = ("", 0) if instance is None else ("ProfilerStep", instance)
    logger = logging.getLogger("hta")
    level = logger.level
    try:
        logger.setLevel(logging.CRITICAL)
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = analysis.critical_path_analysis(rank, *annotation)
    finally:
        logger.setLevel(level)
    return result[0] if result is not None and result[1] else None


def path_edges(graph: Any, trace: Trace) -> Iterator[PathEdge]:
    """The edges of the path in order; starts are relative to the first event loaded, in ns."""
    nodes = graph.critical_path_nodes
    for first, second in pairwise(nodes):
        edge = graph.edges[first, second]["object"]
        bound_by, name = _bound(edge, graph.get_event_attribution_for_edge(edge), trace)
        yield PathEdge(
            bound_by=bound_by,
            name=name,
            start_ns=int(graph.node_list[first].ts),
            duration_ns=int(graph.edges[first, second]["weight"]),
        )


def _bound(edge: Any, row: int | None, trace: Trace) -> tuple[str, str]:
    """What an edge is bound by, and the name of its event where it belongs to one."""
    kind = _BOUND_BY.get(str(edge.type.value))
    if kind is not None:
        return kind, ""
    if row is None or row < 0:
        return HOST, "outside operators"
    name = trace.names[trace.events.name[row]]
    if trace.events.category[row] not in _DEVICE_NUMBERS:
        return HOST, name
    return (COMMUNICATION, name) if is_communication(name) else (KERNEL, name)


def _summary(edges: list[PathEdge], trace: Trace, window: str, window_ns: int) -> CriticalPath:
    by_bound: dict[str, int] = defaultdict(int)
    parts: dict[tuple[str, str], list[int]] = defaultdict(list)
    for edge in edges:
        by_bound[edge.bound_by] += edge.duration_ns
        parts[edge.bound_by, edge.name].append(edge.duration_ns)
    rows = [
        PathPart(bound_by=bound_by, name=name, count=len(times), duration_ns=sum(times))
        for (bound_by, name), times in parts.items()
        if any(times)
    ]
    synced = bool(mask_of(trace.events, "sync").any())
    return CriticalPath(
        rank=trace.rank,
        window=window,
        length_ns=sum(by_bound.values()),
        window_ns=window_ns,
        num_edges=len(edges),
        by_bound={key: ns for key, ns in sorted(by_bound.items(), key=lambda pair: -pair[1]) if ns},
        parts=sorted(rows, key=lambda part: -part.duration_ns)[:_MAX_PARTS],
        notes=[NO_EVENT_WAITS] if synced else [NO_SYNC],
    )
