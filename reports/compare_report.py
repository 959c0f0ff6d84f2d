"""The report of comparisons: a page, Markdown or JSON, all from the same comparisons."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import msgspec

from reports.blocks import Block, Cell, Column, Part, Report, Section, Table, Text
from reports.change_tables import percent_cell
from reports.changes import percent
from reports.compare_parts import compare_parts, picture, tiles
from reports.comparison import Comparison
from reports.numbers import number
from reports.run_report import write_rendered
from reports.sides import Entry, Side
from reports.tables import NOTHING, loss_cell, memory_cell, metric_cell, mfu_cell

ADDS_UP_TEXT = (
    "The step time is the median over runs of each run's median step. Its change is split with the "
    "accounts of both sides' traces: each account divides the profiled step into causes that add "
    "up to it, in self time per step, mean over ranks. 'New' and 'vanished' are names that only "
    "one side has: names are taken without template values, tile sizes and libraries, so that the "
    "same work has one name on different hardware and versions."
)
TEST_TEXT = (
    "The test asks how often runs divided at random into groups of these sizes would differ as "
    "much in this direction: exact, one-sided, over run medians. Steps of one run are not "
    "independent and are never pooled."
)


def write_compare_report(
    sides: Sequence[Side],
    comparisons: Sequence[Comparison],
    reasons: Mapping[str, str],
    output: Path,
) -> list[Path]:
    """Write the report as ``output`` asks and return what was written.

    Raises:
        UsageError: if the output cannot be written.
    """
    return write_rendered(compare_report(sides, comparisons, reasons), output)


def compare_report(
    sides: Sequence[Side], comparisons: Sequence[Comparison], reasons: Mapping[str, str]
) -> Report:
    """Return the report's contents: all sides at a glance, then one section a comparison."""
    first = comparisons[0]
    overview: list[Block] = []
    if len(comparisons) == 1:
        overview += [*picture(first, "compare-1"), *tiles(first, "compare-1")]
    overview.append(sides_table(sides))
    for label, reason in reasons.items():
        overview.append(Text(text=f"{label} is not compared: {reason}", tone="warning"))
    sections = [
        _section(comparison, number, alone=len(comparisons) == 1)
        for number, comparison in enumerate(comparisons, 1)
    ]
    verdict = first.verdict
    if len(comparisons) > 1:
        verdict = f"{len(comparisons)} comparisons. The first: {verdict}"
    return Report(
        title="TitanBench comparison",
        subtitle=verdict,
        overview=overview,
        sections=sections,
        closing=Part(
            title="How it is compared",
            blocks=[Text(text=ADDS_UP_TEXT), Text(text=TEST_TEXT)],
        ),
    )


def _section(comparison: Comparison, number: int, *, alone: bool) -> Section:
    key = f"compare-{number}"
    parts = compare_parts(comparison, key)
    if not alone:
        parts.insert(0, Part(title="", blocks=[*picture(comparison, key), *tiles(comparison, key)]))
    name = f", {comparison.workload}" if comparison.workload else ""
    return Section(
        title=f"{comparison.before} against {comparison.after}{name}",
        subtitle="" if alone else comparison.verdict,
        anchor=key,
        badges=[],
        parts=parts,
    )


def sides_table(sides: Sequence[Side]) -> Table:
    """Return every side and workload at a glance."""
    columns = [
        Column(title="Side"),
        Column(title="Workload"),
        Column(title="Step time", unit="s", is_numeric=True),
        Column(title="Step time", unit="% more than A", is_numeric=True),
        Column(title="Speed", unit="tokens/s per device", is_numeric=True),
        Column(title="TFLOPS", unit="full, per device", is_numeric=True),
        Column(title="MFU", unit="full, % of peak of", is_numeric=True),
        Column(title="Peak memory", unit="GiB", is_numeric=True),
        Column(title="Loss", is_numeric=True),
        Column(title="Runs and ranks"),
    ]
    rows = [
        _side_row(side, entry, _reference(sides[0], entry))
        for side in sides
        for entry in side.entries.values()
    ]
    return Table(columns=columns, rows=rows, caption="What is compared.")


def _reference(first: Side, entry: Entry) -> Entry | None:
    """Return what of the first side an entry is compared with."""
    if len(first.entries) == 1:
        return next(iter(first.entries.values()))
    return first.entries.get(entry.workload)


def _side_row(side: Side, entry: Entry, reference: Entry | None) -> list[Cell]:
    name = Cell(text=f"{side.letter}: {side.label}")
    num_traced = len(entry.traces.ranks) if entry.traces else 0
    traced = f"traces of {num_traced} ranks" if num_traced else "no traces"
    record = entry.record
    if record is None:
        empty = [NOTHING] * 7
        return [name, Cell(text="traces without a record"), *empty, Cell(text=traced)]
    run = next(run for run in entry.runs if run.record is record)
    failed = f", {len(entry.failed)} failed" if entry.failed else ""
    runs = "run" if len(entry.runs) == 1 else "runs"
    devices = f"{record.hardware.num_devices:,} x {record.hardware.device}"
    return [
        name,
        Cell(text=entry.workload, note=record.kind),
        step_cell(entry),
        _more(entry, reference),
        metric_cell(record, "tokens_per_second_per_device"),
        metric_cell(record, "model_tflops_per_device.full"),
        mfu_cell(record, "full"),
        memory_cell(record),
        loss_cell(run),
        Cell(text=f"{len(entry.runs)} {runs}{failed}, {traced}", note=devices),
    ]


def step_cell(entry: Entry) -> Cell:
    """Return the median over runs, with their spread."""
    times = entry.step_times
    if not times:
        return NOTHING
    spread = f"{number(min(times))} to {number(max(times))}" if len(times) > 1 else ""
    return Cell(text=number(median(times)), value=median(times), note=spread)


def _more(entry: Entry, reference: Entry | None) -> Cell:
    if reference is None or reference is entry or not (reference.step_times and entry.step_times):
        return NOTHING
    return percent_cell(percent(median(reference.step_times), median(entry.step_times)))


def comparison_json(
    sides: Sequence[Side], comparisons: Sequence[Comparison], reasons: Mapping[str, str]
) -> bytes:
    """Return the comparisons as one JSON document."""
    document = {
        "schema": 1,
        "verdict": comparisons[0].verdict,
        "sides": [{"letter": side.letter, "label": side.label} for side in sides],
        "comparisons": msgspec.to_builtins(list(comparisons)),
        "not_compared": dict(reasons),
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2)
