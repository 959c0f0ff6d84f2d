"""Tables of results: the metrics of a run, several runs at a glance, published results."""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from bench.metrics import CONVENTIONS, METRICS
from bench.record import MetricValue, RunRecord, Status
from reports.blocks import Cell, Column, Table, Tone
from reports.load import Run
from reports.numbers import ABSENT, as_published, fitting_unit, number, quantity
from reports.settings import pairs

MEMORY_METRICS = (
    "peak_memory_allocated",
    "peak_memory_reserved",
    "peak_tensor_memory",
    "peak_rss",
)
LOSSES = ("loss", "mtp_loss")
TONES: Mapping[Status, Tone] = {
    "ok": "good",
    "failed": "bad",
    "timeout": "bad",
    "interrupted": "warning",
}
SHOWN_DETAILS = ("minimum", "maximum")  # of the samples, which the spread shows
NOTHING = Cell(text=ABSENT, tone="muted")


def metrics_table(record: RunRecord) -> Table:
    """Return every metric with its unit, its spread, and how it is counted."""
    known = [name for name in METRICS if name in record.metrics]
    others = [name for name in record.metrics if name not in METRICS]
    return Table(
        columns=[
            Column(title="Metric"),
            Column(title="Value", is_numeric=True),
            Column(title="Unit"),
            Column(title="Spread"),
            Column(title="How it is counted"),
        ],
        rows=[metric_row(name, record.metrics[name]) for name in known + others],
    )


def metric_row(name: str, metric: MetricValue) -> list[Cell]:
    """Return one metric's row; an invalid one has its reason where others have their value."""
    known = METRICS.get(name)
    title = Cell(text=known.title if known else name, note=name if known else "")
    if metric.value is None:
        reason = metric.invalid or "no reason given"
        invalid = Cell(text="invalid", tone="warning")
        return [title, invalid, Cell(text=""), Cell(text=""), Cell(text=reason, tone="warning")]
    size, unit = fitting_unit([metric.value], metric.unit)
    value = Cell(text=number(metric.value / size), value=metric.value)
    return [
        title,
        value,
        Cell(text="" if unit == "1" else unit),
        spread(name, metric, size),
        Cell(text=known.formula if known else "", note=counting(metric)),
    ]


def spread(name: str, metric: MetricValue, size: float) -> Cell:
    """Return the range and the median of the samples, in units of ``size``."""
    samples = sorted(metric.samples)
    if len(samples) < 2:
        return Cell(text="")
    if name in LOSSES:
        first, last = number(metric.samples[0] / size), number(metric.samples[-1] / size)
        return Cell(text=f"{first} \u2192 {last}", note="first to last measured step")
    low, high = number(samples[0] / size), number(samples[-1] / size)
    over = "ranks" if name in MEMORY_METRICS else "steps"
    middle = number(median(samples) / size)
    return Cell(text=f"{low} to {high}", note=f"median {middle} of {len(samples)} {over}")


def median(ordered: Sequence[float]) -> float:
    """Return the median of values in order, at least one."""
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def counting(metric: MetricValue) -> str:
    """Return what a metric's details say: the denominator first."""
    details = dict(metric.details)
    notes = []
    if "peak_dtype" in details and "peak_tflops" in details:
        dtype, peak = details.pop("peak_dtype"), float(details.pop("peak_tflops") or 0)
        notes.append(f"denominator: {dtype} peak of {quantity(peak, 'TFLOPS')} per device")
    if "rank" in details:
        notes.append(f"largest on rank {details.pop('rank')}")
    others = {name: value for name, value in details.items() if name not in SHOWN_DETAILS}
    if others:
        notes.append(pairs(others))
    return "; ".join(notes)


def overview_table(runs: Sequence[Run], anchors: Sequence[str]) -> Table:
    """Return one row a run: status, speed in both conventions, memory, loss."""
    columns = [
        Column(title="Workload"),
        Column(title="Status"),
        Column(title="Speed", unit="tokens/s per device", is_numeric=True),
        *(Column(title="TFLOPS", unit=f"{c}, per device", is_numeric=True) for c in CONVENTIONS),
        *(Column(title="MFU", unit=f"{c}, % of peak of", is_numeric=True) for c in CONVENTIONS),
        Column(title="Peak memory", unit="GiB", is_numeric=True),
        Column(title="Loss", unit="first \u2192 last step", is_numeric=True),
        Column(title="Devices"),
    ]
    rows = [overview_row(run, anchor) for run, anchor in zip(runs, anchors, strict=True)]
    return Table(columns=columns, rows=rows)


def overview_row(run: Run, anchor: str) -> list[Cell]:
    """Return one run's row; its name leads to its section."""
    record = run.record
    kind = "" if record.kind == "measured" else record.kind
    failure = record.failure.error if record.failure else ""
    return [
        Cell(text=record.workload.name, note=record.run_id, link=f"#{anchor}"),
        Cell(text=record.status, note=kind or first_line(failure), tone=TONES[record.status]),
        metric_cell(record, "tokens_per_second_per_device"),
        *(metric_cell(record, f"model_tflops_per_device.{c}") for c in CONVENTIONS),
        *(mfu_cell(record, c) for c in CONVENTIONS),
        memory_cell(record),
        loss_cell(run),
        Cell(text=f"{record.hardware.num_devices:,} x {record.hardware.device}"),
    ]


def metric_cell(record: RunRecord, name: str) -> Cell:
    """Return a metric's value in its own unit, or that it is invalid or absent."""
    metric = record.metrics.get(name)
    if metric is None:
        return NOTHING
    if metric.value is None:
        return Cell(text="invalid", tone="warning")
    origin = metric.details.get("origin")
    if origin == "stated":
        return Cell(text=as_published(metric.value), value=metric.value)
    if origin == "derived":
        return Cell(text=number(metric.value), value=metric.value, note="derived", tone="muted")
    return Cell(text=number(metric.value), value=metric.value)


def mfu_cell(record: RunRecord, convention: str) -> Cell:
    """Return the MFU with the dtype of its denominator."""
    name = mfu_name(record, convention)
    cell = metric_cell(record, name)
    if cell.value is None:
        return cell
    dtype = str(record.metrics[name].details.get("peak_dtype", "bf16"))
    return replace(cell, note=f"{dtype}, {cell.note}" if cell.note else dtype)


def mfu_name(record: RunRecord, convention: str) -> str:
    """Return the MFU to show: the stated one, else that of the products' dtype if it is valid."""
    names = [f"{kind}.{convention}" for kind in ("mfu", "mfu_bf16")]
    found = [name for name in names if name in record.metrics]
    stated = [name for name in found if record.metrics[name].details.get("origin") == "stated"]
    valid = [name for name in found if record.metrics[name].value is not None]
    return (stated or valid or names)[0]


def memory_cell(record: RunRecord) -> Cell:
    """Return the first kind of peak memory that the record has, and which kind it is."""
    for name in MEMORY_METRICS:
        cell = metric_cell(record, name)
        if cell.value is not None:
            kind = METRICS[name].title.removeprefix("Peak ").removeprefix("memory ")
            return Cell(text=cell.text, value=cell.value, note=kind)
    return NOTHING


def loss_cell(run: Run) -> Cell:
    """Return the loss of the first and of the last measured step, or the last alone."""
    steps = run.training_steps()
    if len(steps) > 1:
        first, last = steps[0].loss, steps[-1].loss
        return Cell(text=f"{number(first)} \u2192 {number(last)}", value=last)
    return metric_cell(run.record, "loss")


def first_line(text: str, width: int = 80) -> str:
    """Return the first line of a text, cut at ``width``."""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= width else line[: width - 1] + "\u2026"


def references_table(run: Run) -> Table:
    """Return the run and beside it the published results of its workload."""
    columns = [
        Column(title="Result"),
        Column(title="Devices"),
        Column(title="Speed", unit="tokens/s per device", is_numeric=True),
        *(Column(title="TFLOPS", unit=f"{c}, per device", is_numeric=True) for c in CONVENTIONS),
        *(Column(title="MFU", unit=f"{c}, % of peak of", is_numeric=True) for c in CONVENTIONS),
        Column(title="Memory", unit="GiB", is_numeric=True),
        Column(title="Settings"),
        Column(title="Source"),
    ]
    this = Cell(text=run.record.workload.name, note=f"this run, {run.record.kind}", tone="good")
    rows = [result_row(this, run.record)]
    for reference in run.references:
        title = Cell(text=reference.workload.name, note="published, not measured here")
        rows.append(result_row(title, reference))
    return Table(columns=columns, rows=rows)


def result_row(title: Cell, record: RunRecord) -> list[Cell]:
    """Return one result's row."""
    return [
        title,
        Cell(
            text=f"{record.hardware.num_devices:,} x {record.hardware.device}",
            note=precision_in_short(record),
        ),
        metric_cell(record, "tokens_per_second_per_device"),
        *(metric_cell(record, f"model_tflops_per_device.{c}") for c in CONVENTIONS),
        *(mfu_cell(record, c) for c in CONVENTIONS),
        memory_cell(record),
        settings_cell(record),
        Cell(text=source_name(record), link=record.source, note=" ".join(record.notes)),
    ]


def settings_cell(record: RunRecord) -> Cell:
    """Return the plan without what stands elsewhere, with batch and routing."""
    plan = {k: v for k, v in record.plan.items() if v is not None and k != "world_size"}
    workload = record.workload
    batch = workload.global_batch_size
    sequences = "batch not stated" if batch is None else f"batch {batch:,}"
    return Cell(
        text=pairs(plan) or "plan not stated",
        note=f"{sequences} x {workload.sequence_length:,}, routing {workload.routing}",
    )


def precision_in_short(record: RunRecord) -> str:
    """Return the dtype of the matrix products."""
    quantization = record.precision.get("quantization") or "none"
    wide = record.precision.get("compute")
    return str(quantization if quantization != "none" else wide or "precision not stated")


def source_name(record: RunRecord) -> str:
    """Return where a result comes from, short enough for a table, with its date."""
    if record.kind == "measured":
        return f"measured here, {record.created[:10]}"
    if not record.source.startswith("https://"):
        return record.source
    host = record.source.split("/")[2]
    return f"{host}, {record.created}" if record.created else host
