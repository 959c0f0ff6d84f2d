"""The report of one or several runs, as a page and as Markdown."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.errors import UsageError
from bench.record import RunRecord, write_atomic
from reports.blocks import Block, Cell, Part, Report, Section, Text
from reports.load import Run, read_steps
from reports.markdown import render_markdown
from reports.numbers import moment, number
from reports.page import render_page
from reports.run_parts import RUN_PARTS, RunPart, run_parts
from reports.run_traces import run_traces
from reports.settings import emulated_kernels
from reports.tables import TONES, overview_table

RENDERERS = {".html": render_page, ".md": render_markdown}

CONVENTIONS_TEXT = (
    "TFLOPS are those of the model: forward and backward of every matrix product and of "
    "attention, no recomputation. In the convention full, attention counts over the whole window, "
    "as TorchTitan and PaLM do; in causal it counts half of that, as Megatron and MaxText do. The "
    "same run has a higher figure in full: compare only figures of one convention, or tokens per "
    "second."
)
MFU_TEXT = (
    "MFU is those TFLOPS over the dense peak of the device, without structured sparsity. mfu "
    "divides by the peak of the dtype that does the matrix products, mfu_bf16 by the BF16 peak; "
    "each figure names its denominator. The peak of a CPU is measured, since no data sheet has it."
)
TIME_TEXT = (
    "Step time is the median over the measured steps, each as long as on its slowest rank. "
    "Warm-up steps and the steps under counters and profiler are not in it. Padding does not "
    "count as tokens."
)


def write_report(
    records: Sequence[RunRecord],
    published: Mapping[str, Sequence[RunRecord]],
    run_folders: Mapping[str, Path],
    output: Path,
    *,
    parts: Sequence[RunPart] = RUN_PARTS,
) -> list[Path]:
    """Write the report and return what was written.

    ``output`` ending in ``.html`` or ``.md`` asks for that format alone; a folder gets both as
    ``report.html`` and ``report.md``; any other path is their common stem.

    Args:
        published: published results by the name of the workload they belong to.
        run_folders: folders by run id; the steps are read from there.
        parts: what each run's section consists of.

    Raises:
        UsageError: if there is no record, steps cannot be read, or the output not be written.
    """
    if not records:
        raise UsageError("no run to report on", hint="give a run folder")
    runs = [assemble(record, published, run_folders) for record in records]
    return write_rendered(build_report(runs, parts), output)


def write_rendered(report: Report, output: Path) -> list[Path]:
    """Write a report in the formats that ``output`` asks for and return the files.

    Raises:
        UsageError: if one cannot be written.
    """
    written = []
    for path in output_paths(output):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, RENDERERS[path.suffix](report).encode(errors="replace"))
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from error
        written.append(path)
    return written


def output_paths(output: Path) -> list[Path]:
    """Return the files that ``output`` asks for."""
    if output.suffix in RENDERERS:
        return [output]
    stem = output / "report" if output.is_dir() else output
    return [stem.with_name(stem.name + suffix) for suffix in RENDERERS]


def assemble(
    record: RunRecord,
    published: Mapping[str, Sequence[RunRecord]],
    run_folders: Mapping[str, Path],
) -> Run:
    """Return a record together with its steps, its traces and its references."""
    folder = run_folders.get(record.run_id)
    traces, missing = None, ""
    if folder is not None and record.status == "ok":
        try:
            traces = run_traces(folder)
        except UsageError as error:
            missing = error.what
    return Run(
        record=record,
        folder=folder,
        steps=read_steps(folder) if folder else [],
        references=list(published.get(record.workload.name, [])),
        traces=traces,
        traces_missing=missing,
    )


def build_report(runs: Sequence[Run], parts: Sequence[RunPart]) -> Report:
    """Return the report's contents: an overview of several runs, then one section each."""
    anchors = [f"run-{number}" for number in range(1, len(runs) + 1)]
    records = [run.record for run in runs]
    overview: list[Block] = [overview_table(runs, anchors)] if len(runs) > 1 else []
    return Report(
        title="TitanBench report",
        subtitle=verdict(records),
        overview=overview,
        sections=[
            run_section(run, anchor, parts) for run, anchor in zip(runs, anchors, strict=True)
        ],
        closing=Part(
            title="How the numbers are counted",
            blocks=[Text(text=text) for text in (CONVENTIONS_TEXT, MFU_TEXT, TIME_TEXT)],
        ),
    )


def verdict(records: Sequence[RunRecord]) -> str:
    """Return in a sentence what came out."""
    if len(records) == 1:
        return outcome(records[0])
    others = [record.workload.name for record in records if record.status != "ok"]
    if not others:
        return (
            "Both runs succeeded." if len(records) == 2 else f"All {len(records)} runs succeeded."
        )
    num_ok = len(records) - len(others)
    return f"{num_ok} of {len(records)} runs succeeded, not {', '.join(others)}."


def outcome(record: RunRecord) -> str:
    """Return a run's result in a sentence."""
    name = record.workload.name
    if record.status != "ok":
        return f"{name} did not succeed: {record.status}."
    speed = record.metrics.get("tokens_per_second_per_device")
    if speed is None or speed.value is None:
        return f"{name} succeeded."
    devices = f"{record.hardware.num_devices:,} x {record.hardware.device}"
    return f"{name} trains at {number(speed.value)} tokens/s per device on {devices}."


def badges(record: RunRecord) -> list[Cell]:
    """Return status and kind, and that something was only emulated."""
    emulated = [Cell(text="emulated kernels", tone="warning")] if emulated_kernels(record) else []
    return [Cell(text=record.status, tone=TONES[record.status]), Cell(text=record.kind), *emulated]


def run_section(run: Run, anchor: str, parts: Sequence[RunPart]) -> Section:
    """Return everything about one run."""
    record = run.record
    return Section(
        title=record.workload.name,
        subtitle=f"{record.run_id}, {moment(record.created)}",
        anchor=anchor,
        badges=badges(record),
        parts=run_parts(run, anchor, parts),
    )
