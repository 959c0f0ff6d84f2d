"""The report of traces: a page, Markdown or JSON, all from one answer."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from reports.blocks import Block, Cell, Column, Part, Report, Section, Table, Text
from reports.memory_report import memory_json, memory_report
from reports.numbers import number
from reports.trace_answer import TraceAnswer, trace_answer
from reports.trace_cells import number_cell
from reports.trace_parts import picture, tiles, trace_parts
from reports.traces.summary import TraceSummary

if TYPE_CHECKING:  # HTA is slow to import, and few ask for it
    from reports.traces.critical_path import CriticalPath
    from reports.traces.hta_run import HtaResult, HtaTable

EXACT_TEXT = (
    "Times are whole nanoseconds of the trace and add up exactly. Every instant of a step belongs "
    "to one part: computation, alone or beside communication; communication alone, which is called "
    "exposed; copies alone; or idle. On a CPU, computation is the operators' own time."
)
LATE_TEXT = (
    "A collective's transfer is what the last rank to arrive takes. What the others take longer is "
    "waiting for that rank: it counts under the late rank, together with what that rank does "
    "longer than the others. A rank's clock is corrected where the ends of collectives show that "
    "it is off."
)
ZERO_TEXT = (
    "0 is measured; 'not in the trace' means that the trace does not record it. A profiled step is "
    "slower than one without profiler."
)


def analysis_report(
    traces: TraceSummary, sources: Sequence[str], hta: "HtaResult | None" = None
) -> Report:
    """Return the report of an analysis, also of one that has memory alone."""
    if not traces.ranks:
        return memory_report(traces, sources)
    return trace_report(trace_answer(traces), sources, hta)


def analysis_json(traces: TraceSummary, hta: "HtaResult | None" = None) -> bytes:
    """Return an analysis as one JSON document."""
    return answer_json(trace_answer(traces), hta) if traces.ranks else memory_json(traces)


def trace_report(
    answer: TraceAnswer, sources: Sequence[str], hta: "HtaResult | None" = None
) -> Report:
    """Return the report's contents: what ran, the verdict, the waterfall, then the tables."""
    job = answer.job
    what = f"{', '.join(sources)}. Ranks: {job['Ranks']}. {job['Devices']}; {job['What is timed']}."
    noted = f"{job['Events']} events, {len(answer.warnings)} kinds of warning"
    failed = f", {len(answer.failures)} files not analysed" if answer.failures else ""
    parts = list(trace_parts(answer, "trace"))
    if hta is not None:
        parts += [*critical_path_parts(hta.paths), *hta_parts(hta.tables)]
    overview: list[Block] = [
        Text(text=what, tone="muted"),
        *picture(answer, "trace"),
        tiles(answer),
    ]
    return Report(
        title="TitanBench trace analysis",
        subtitle=answer.verdict,
        overview=overview,
        sections=[
            Section(
                title="The traces",
                subtitle=noted + failed,
                anchor="traces",
                badges=[],
                parts=parts,
            )
        ],
        closing=Part(
            title="How the times are counted",
            blocks=[Text(text=text) for text in (EXACT_TEXT, LATE_TEXT, ZERO_TEXT)],
        ),
    )


def critical_path_parts(paths: "Sequence[CriticalPath]") -> list[Part]:
    """Return the critical path of each rank that was looked at, or why there is none."""
    blocks = [block for path in paths for block in _path_blocks(path)]
    return [Part(title="Critical path", blocks=blocks)] if blocks else []


def _path_blocks(path: "CriticalPath") -> list[Block]:
    whose = f"{path.window} of rank {path.rank}"
    if path.reason is not None:
        return [Text(text=f"No critical path of {whose}: {path.reason}", tone="muted")]
    bounds = ", ".join(
        f"{number(ns / 1e6, 3)} ms {bound_by}" for bound_by, ns in path.by_bound.items()
    )
    text = (
        f"The critical path of {whose} is {number(path.length_ns / 1e6, 4)} ms long, in a window "
        f"of {number(path.window_ns / 1e6, 4)} ms: {bounds}. Source: {path.source}."
    )
    columns = [
        Column(title="Bound by"),
        Column(title="What"),
        Column(title="Number", is_numeric=True),
        Column(title="Time", unit="ms", is_numeric=True),
        Column(title="Share", unit="% of the path", is_numeric=True),
    ]
    rows = [
        [
            Cell(text=part.bound_by),
            Cell(text=part.name),
            Cell(text=f"{part.count:,}", value=part.count),
            number_cell(part.duration_ns / 1e6),
            number_cell(100 * part.duration_ns / max(path.length_ns, 1), 3),
        ]
        for part in path.parts
    ]
    caption = f"The longest parts of the critical path of {whose}; what is on it sets the step time"
    return [
        Text(text=text),
        *(Text(text=note, tone="muted") for note in path.notes),
        Table(columns=columns, rows=rows, caption=caption, folded=True),
    ]


def hta_parts(tables: "Sequence[HtaTable]") -> list[Part]:
    """Return HTA's tables as it makes them, and its reasons where it makes none."""
    blocks: list[Block] = []
    for table in tables:
        if table.reason is not None:
            blocks.append(Text(text=f"{table.name}: {table.reason}", tone="muted"))
            continue
        columns = [Column(title=name) for name in table.columns]
        rows = [[_hta_cell(value) for value in row] for row in table.rows[:50]]
        caption = f"{table.name}: {len(table.rows)} rows"
        blocks.append(Table(columns=columns, rows=rows, caption=caption, folded=True))
    return [Part(title="HolisticTraceAnalysis, times in ns", blocks=blocks)] if blocks else []


def _hta_cell(value: str | int | float | None) -> Cell:
    if isinstance(value, int | float):
        return Cell(text=f"{value:,.6g}", value=float(value))
    return Cell(text="" if value is None else value)


def answer_json(answer: TraceAnswer, hta: "HtaResult | None" = None) -> bytes:
    """Return the answer as one JSON document."""
    document = {"schema": 1, **msgspec.to_builtins(answer)}
    if hta is not None:
        document["hta"] = msgspec.to_builtins(hta.tables)
        document["critical_paths"] = msgspec.to_builtins(hta.paths)
    return msgspec.json.format(msgspec.json.encode(document), indent=2)
