"""The collectives of one rank: what, over which group, how many bytes, when, how much exposed.

Metadata come from the event itself, else from the host call that launched it, else from the name.
"""

import re
from bisect import bisect_right

import msgspec
import numpy as np
from msgspec import Struct

from reports.traces.columns import CATEGORY, NONE, CollectiveArgs, Ints
from reports.traces.intervals import covered_within, subtract
from reports.traces.issued import Issued, attributed
from reports.traces.links import Links
from reports.traces.loader import Trace
from reports.traces.metadata import parse_ranks
from reports.traces.nesting import Nesting, inherit
from reports.traces.sizes import item_bytes, tensor_bytes
from reports.traces.steps import Step, step_edges
from reports.traces.work import COMMUNICATION, COMPUTE, Work, communication_names, lane_set

POINT_TO_POINT = ("send", "recv", "point_to_point")
_KINDS = (
    ("all_reduce", re.compile(r"allreduce|crossdevicereduce|twoshot|oneshot|multimem", re.I)),
    ("reduce_scatter", re.compile(r"reducescatter", re.I)),
    ("all_gather", re.compile(r"allgather", re.I)),
    ("all_to_all", re.compile(r"alltoall|a2a|deepep|dispatch|combine", re.I)),
    ("broadcast", re.compile(r"broadcast|bcast", re.I)),
    ("barrier", re.compile(r"barrier", re.I)),
    ("point_to_point", re.compile(r"sendrecv|batchisend|coalesced$", re.I)),
    ("send", re.compile(r"send", re.I)),
    ("recv", re.compile(r"recv", re.I)),
    ("gather", re.compile(r"gather", re.I)),
    ("scatter", re.compile(r"scatter", re.I)),
    ("reduce", re.compile(r"reduce", re.I)),
)
_AXES = (
    ("dp_replicate", re.compile(r"dp_?replicate|hsdp_replicate", re.I)),
    ("dp_shard", re.compile(r"dp_?shard|fsdp", re.I)),
    ("tp", re.compile(r"(?<![a-z])tp(?![a-z])|tensor", re.I)),
    ("cp", re.compile(r"(?<![a-z])cp(?![a-z])|context", re.I)),
    ("ep", re.compile(r"(?<![a-z])ep(?![a-z])|expert", re.I)),
    ("pp", re.compile(r"(?<![a-z])pp(?![a-z])|pipeline", re.I)),
    ("dp", re.compile(r"(?<![a-z])dp(?![a-z])|data", re.I)),
    ("world", re.compile(r"default_pg|world", re.I)),
)
_OWN_PREFIX = "mesh_"


class Collective(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True):
    """One collective as one rank saw it.

    bytes: size in the convention of nccl-tests (what the whole operation moves: the gathered
    output, the input that is scattered, else the input), None if the trace does not say.
    group: text that identifies the group; sequence: the profiler's number within it.
    peer: global rank of the other side of a send or receive, None if the trace does not say.
    exposed_ns: its part of the rank's exposed communication.
    source: `metadata`, `host` or `name`: where kind and size come from.
    """

    kind: str
    axis: str
    group: str
    group_size: int | None
    bytes: int | None
    sequence: int | None
    start_ns: int
    duration_ns: int
    exposed_ns: int
    step: str
    source: str
    peer: int | None = None


class Facts(Struct, frozen=True, kw_only=True):
    """What is known about one collective, wherever it is written."""

    kind: str
    group: str = ""
    axis: str
    group_size: int | None = None
    bytes: int | None = None
    sequence: int | None = None
    peer: int | None = None
    source: str


def collectives(
    trace: Trace, work: Work, facts: dict[int, Facts], steps: list[Step]
) -> list[Collective]:
    """Every collective of a rank, in the order in which it was issued where that is known."""
    chosen = np.flatnonzero(work.lane == COMMUNICATION)
    exposed = subtract(lane_set(work, COMMUNICATION), lane_set(work, COMPUTE))
    exposed_ns = covered_within(exposed, work.exclusive_start[chosen], work.stop[chosen])
    rows, place = np.unique(work.row[chosen], return_inverse=True)
    per_row = np.zeros(len(rows), dtype=np.int64)
    np.add.at(per_row, place, exposed_ns)
    edges = step_edges(steps).tolist()
    found = []
    for row, own_exposed in zip(rows.tolist(), per_row.tolist(), strict=True):
        start = int(trace.events.start[row])
        number = min(max(bisect_right(edges, start) - 1, 0), len(steps) - 1)
        found.append(_collective(trace, facts[row], row, own_exposed, steps[number].name))
    return sorted(found, key=lambda one: one.start_ns)


def _collective(trace: Trace, facts: Facts, row: int, exposed: int, step: str) -> Collective:
    return Collective(
        kind=facts.kind,
        axis=facts.axis,
        group=facts.group,
        group_size=facts.group_size,
        bytes=facts.bytes,
        sequence=facts.sequence,
        start_ns=int(trace.events.start[row]),
        duration_ns=int(trace.events.duration[row]),
        exposed_ns=exposed,
        step=step,
        source=facts.source,
        peer=facts.peer,
    )


def collective_facts(trace: Trace, work: Work, links: Links, nesting: Nesting) -> dict[int, Facts]:
    """What is known about each communication event, by its row."""
    rows = np.unique(work.row[work.lane == COMMUNICATION])
    given = {args.row: args for args in trace.collectives}
    calls = _calls(trace, rows, links, nesting, given)
    issued = attributed(trace.events, trace.names, rows, trace.metadata.issued)
    result = {}
    for row, call in zip(rows.tolist(), calls.tolist(), strict=True):
        name = trace.names[trace.events.name[row]]
        if row in given:
            result[row] = _from_args(trace, given[row])
        elif call in given:
            result[row] = msgspec.structs.replace(_from_args(trace, given[call]), source="host")
        elif row in issued:
            result[row] = _from_issued(trace, row, call, name, issued[row])
        else:
            result[row] = _from_names(trace, row, call, name)
    return result


def _calls(
    trace: Trace, rows: Ints, links: Links, nesting: Nesting, given: dict[int, CollectiveArgs]
) -> Ints:
    """Host event that names the collective: around the launch, or the event itself on a CPU."""
    events = trace.events
    informative = communication_names(trace.names)[events.name]
    informative &= np.isin(events.category, [CATEGORY["cpu_op"], CATEGORY["user_annotation"]])
    own = np.full(len(events), NONE, dtype=np.int32)
    candidates = np.flatnonzero(informative)
    own[candidates] = candidates
    around = inherit(nesting, own)
    detailed = np.full(len(events), NONE, dtype=np.int32)
    with_args = np.array([row for row in given if own[row] != NONE], dtype=np.int64)
    detailed[with_args] = with_args
    detailed = inherit(nesting, detailed)
    around = np.where(detailed != NONE, detailed, around)
    launch = np.full(len(events), NONE, dtype=np.int32)
    launch[links.device] = links.launch
    caller = launch[rows]
    return np.where(caller == NONE, around[rows], around[caller])


def _from_args(trace: Trace, args: CollectiveArgs) -> Facts:
    kind = kind_of(args.kind)
    description, _ = trace.metadata.groups.get(args.group_name or "", ("", ()))
    item = item_bytes(args.dtype)
    elements = args.output_elements if kind == "all_gather" else args.input_elements
    ranks = args.group_ranks or ""
    return Facts(
        kind=kind,
        group=ranks if parse_ranks(ranks) else f"{args.group_name or ''} {ranks}".strip(),
        axis=axis_of(args.group_description or description, args.group_size),
        group_size=args.group_size,
        bytes=None if item is None or elements is None else item * elements,
        sequence=args.sequence,
        peer=args.destination if kind == "send" else args.source if kind == "recv" else None,
        source="metadata",
    )


def issued_facts(trace: Trace, rows: Ints) -> dict[int, Facts]:
    """What is known about gloo's sends and receives, which are no work of a lane of their own."""
    issued = attributed(trace.events, trace.names, rows, trace.metadata.issued)
    result = {}
    for row in rows.tolist():
        name = trace.names[trace.events.name[row]]
        if row in issued:
            result[row] = _from_issued(trace, row, row, name, issued[row])
        else:
            result[row] = _from_names(trace, row, row, name)
    return result


def _from_issued(trace: Trace, row: int, call: int, name: str, issued: Issued) -> Facts:
    """Facts of a transfer whose group our own collector wrote down."""
    group = trace.metadata.groups.get(issued.group, ("", ()))
    facts = _from_names(trace, row, call, name, group)
    return msgspec.structs.replace(
        facts,
        group=facts.group or issued.group,
        sequence=issued.sequence,
        peer=issued.peer,
        source="metadata",
    )


def _from_names(
    trace: Trace,
    row: int,
    call: int,
    name: str,
    known: tuple[str, tuple[int, ...]] | None = None,
) -> Facts:
    """Facts from names and shapes, over a known group or the only one that there is."""
    groups = trace.metadata.groups
    only = next(iter(groups.values())) if len(groups) == 1 else ("", ())
    description, ranks = known or only
    size = len(ranks) or (trace.metadata.world_size if len(groups) <= 1 else None)
    host = trace.names[trace.events.name[call]] if call != NONE else ""
    kind = kind_of(host or name)
    if host and kind == "other":
        kind = kind_of(name)
    place = int(trace.events.dims[call]) if call != NONE else NONE
    size_bytes = tensor_bytes(trace.dims[place]) if place != NONE else None
    if kind == "all_gather" and size_bytes is not None:
        size_bytes = size_bytes * size if size else None
    return Facts(
        kind=kind,
        group=str(list(ranks)) if ranks else "",
        axis=axis_of(description, size),
        group_size=size,
        bytes=size_bytes,
        source="host" if host else "name",
    )


def kind_of(name: str) -> str:
    """Kind of collective from any spelling: `allreduce`, `nccl:_all_gather_base`, a kernel."""
    squeezed = re.sub(r"[_\s]", "", name.split("(")[0])
    for kind, pattern in _KINDS:
        if pattern.search(squeezed):
            return kind
    return "other"


def axis_of(description: str, group_size: int | None) -> str:
    """Axis of parallelism from a group's description; else its size; `unknown` without either.

    A mesh describes its groups with the very names of its axes.
    """
    if description.startswith(_OWN_PREFIX):
        return description.removeprefix(_OWN_PREFIX)
    for axis, pattern in _AXES:
        if pattern.search(description):
            return axis
    return f"group of {group_size}" if group_size else "unknown"
