"""What traces answer: one structure that the page, the Markdown and the JSON all say."""

from collections import defaultdict
from collections.abc import Mapping

from msgspec import Struct

from reports.account import COMPUTE, LATE, Account, account, by_cause
from reports.numbers import number, quantity
from reports.trace_tables import (
    Key,
    RankDevice,
    class_ms,
    kernel_ms,
    memory_by_source,
    module_ms,
    operator_ms,
)
from reports.traces.breakdown import StepBreakdown
from reports.traces.collectives import CollectiveTime, Straggler
from reports.traces.launches import LaunchTime
from reports.traces.point_to_point import PeerTime
from reports.traces.problems import Warning
from reports.traces.summary import Coverage, Failure, TraceSummary, overall
from reports.waterfall import Waterfall, trace_waterfall

NO_RECORD = "traces alone say neither the model's FLOPs nor the device's peak"
MOST_WAITS = 3


class Row(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time in ms per step, mean over ranks, and its share of the step in percent.

    ``count`` is per step and rank; ``lowest`` and ``highest`` are (rank, ms) where ranks differ.
    """

    group: str
    name: str
    ms: float
    percent: float
    count: float | None = None
    lowest: tuple[int, float] | None = None
    highest: tuple[int, float] | None = None
    why: dict[str, float] = {}


class TraceAnswer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that is said about traces. Tables are None where the traces do not have the data.

    ``rows`` add up to the step, ``classes``, ``operators`` to the time spent computing; breakdowns
    and stragglers are in ns over all profiled steps of a rank.
    """

    verdict: str
    job: dict[str, str]
    step_ms: float
    waterfall: Waterfall
    rows: list[Row]
    classes: list[Row]
    operators: list[Row]
    kernels: list[Row] | None
    modules: list[Row] | None
    ranks: list[StepBreakdown]
    collectives: list[CollectiveTime]
    peers: list[PeerTime]
    stragglers: list[Straggler]
    clock_offsets_ns: dict[int, int]
    launches: list[LaunchTime] | None
    memory: list[RankDevice]
    coverage: Coverage
    warnings: list[Warning]
    failures: list[Failure]


def trace_answer(traces: TraceSummary, waterfall: Waterfall | None = None) -> TraceAnswer:
    """Return what the traces answer; ``waterfall`` is the run's, if there is a record."""
    books = account(traces)
    step_ms = books.per_step_ms(books.total_ns)
    kernels = kernel_ms(traces)
    modules = module_ms(traces)
    first = traces.ranks[0]
    return TraceAnswer(
        verdict=trace_verdict(books),
        job=job_facts(traces),
        step_ms=step_ms,
        waterfall=waterfall or trace_waterfall(traces, NO_RECORD),
        rows=account_rows(books, traces),
        classes=_rows(class_ms(traces), {}, step_ms),
        operators=_rows(*operator_ms(traces), step_ms),
        kernels=_rows(*kernels, step_ms) if kernels[0] else None,
        modules=_rows(*modules, step_ms) if modules[0] else None,
        ranks=[overall(summary) for summary in traces.ranks],
        collectives=traces.cross.table,
        peers=traces.peers,
        stragglers=traces.cross.stragglers,
        clock_offsets_ns=traces.cross.clock_offsets_ns,
        launches=first.launches or None,
        memory=memory_by_source(traces),
        coverage=first.coverage,
        warnings=_warnings(traces),
        failures=traces.failures,
    )


def _rows(sums: Mapping[Key, float], counts: Mapping[Key, float], step_ms: float) -> list[Row]:
    rows = [
        Row(
            group=group,
            name=name,
            ms=ms,
            percent=_share(ms, step_ms),
            count=counts.get((group, name)),
        )
        for (group, name), ms in sums.items()
    ]
    return sorted(rows, key=lambda row: -abs(row.ms))


def _share(part: float, whole: float) -> float:
    return 100 * part / whole if whole else 0.0


def account_rows(books: Account, traces: TraceSummary) -> list[Row]:
    """Return the account's lines with the ranks that have least and most of each."""
    steps = {summary.rank: max(summary.num_steps, 1) for summary in traces.ranks}
    rows = []
    for line in books.lines:
        own = {rank: line.by_rank.get(rank, 0) / steps[rank] / 1e6 for rank in steps}
        low, high = min(own, key=lambda r: own[r]), max(own, key=lambda r: own[r])
        several = len(own) > 1
        ms = books.per_step_ms(line.ns)
        late = line.cause == LATE
        per_step = books.num_rank_steps / books.num_ranks * 1e6
        rows.append(
            Row(
                group=line.cause,
                name=line.item,
                ms=ms,
                percent=_share(line.ns, books.total_ns),
                lowest=(low, own[low]) if several else None,
                highest=(high, own[high]) if several else None,
                why={name: ns / per_step for name, ns in line.why.items()} if late else {},
            )
        )
    return rows


def trace_verdict(books: Account) -> str:
    """Return in a sentence where the time of a step goes."""
    sums = by_cause(books.lines)
    ordered = sorted(sums.items(), key=lambda pair: -pair[1])[:MOST_WAITS]
    step = quantity(books.per_step_ms(books.total_ns) / 1e3, "s")
    shares = [_part(books, cause, ns) for cause, ns in ordered if ns * 200 >= books.total_ns]
    return f"Of {step} per profiled step, {', '.join(shares)}."


def _part(books: Account, cause: str, ns: int) -> str:
    """Return the share of a cause, with the largest item in it."""
    text = f"{number(_share(ns, books.total_ns), 3)} % is {cause}"
    lines = [line for line in books.lines if line.cause == cause and line.item]
    if not lines:
        return text
    top = max(lines, key=lambda line: line.ns)
    share = number(_share(top.ns, ns), 3)
    what = f"class {top.item}" if cause == COMPUTE else top.item
    why = next(iter(top.why), "")
    reason = f", which spends longer than the others on {why}" if why else ""
    return f"{text} ({share} % of it {what}{reason})"


def job_facts(traces: TraceSummary) -> dict[str, str]:
    """Return what ran, as far as traces say it."""
    first = traces.ranks[0]
    ranks = [summary.rank for summary in traces.ranks]
    world = "(world size not in the trace)"
    if first.world_size is not None:
        world = f"of a world of {first.world_size}"
    shown = (
        ", ".join(map(str, ranks))
        if len(ranks) <= 8
        else f"{len(ranks)}, from {ranks[0]} to {ranks[-1]},"
    )
    devices = sorted({device for summary in traces.ranks for device in summary.devices})
    steps = sum(summary.num_steps for summary in traces.ranks) // len(ranks)
    lane = "kernels of the device" if first.lane == "device" else "operators of the CPU, self time"
    facts = {
        "Ranks": f"{shown} {world}",
        "Devices": ", ".join(devices) or "no accelerator in the trace",
        "Steps": str(steps) if steps else "no step is marked: the whole window counts as one",
        "What is timed": lane,
        "Backend": first.backend or "not in the trace",
        "Events": f"{sum(summary.num_events for summary in traces.ranks):,}",
    }
    if first.versions:
        facts["Versions"] = ", ".join(f"{k} {v}" for k, v in sorted(first.versions.items()))
    return facts


def _warnings(traces: TraceSummary) -> list[Warning]:
    """Return one warning a kind, over all files; the file of a kind that several have is empty."""
    sums: dict[str, list[Warning]] = defaultdict(list)
    for summary in traces.ranks:
        for warning in summary.warnings:
            sums[warning.kind].append(warning)
    return [
        Warning(
            file=found[0].file if len(found) == 1 else f"{len(found)} files",
            kind=kind,
            count=sum(one.count for one in found),
            message=found[0].message,
        )
        for kind, found in sums.items()
    ]
