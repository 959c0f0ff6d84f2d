"""Parts of a run's section: each is a function from a run to blocks, empty if it has nothing.

To add one, write such a function and put it into ``RUN_PARTS``.
"""

from collections.abc import Callable, Sequence
from typing import Any

from bench.metrics import METRICS
from reports.blocks import (
    Block,
    Cell,
    Column,
    Figures,
    Part,
    Preformatted,
    Table,
    Text,
    Tile,
    Tiles,
)
from reports.load import Run
from reports.numbers import fitting_unit, number, scalar, short_bytes
from reports.plots import figures
from reports.settings import environment_table, what_ran
from reports.tables import MEMORY_METRICS, loss_cell, metrics_table, references_table

RunPart = tuple[str, Callable[[Run, str], Sequence[Block]]]

HEADLINE = (
    "tokens_per_second_per_device",
    "step_time",
    "model_tflops_per_device.full",
    "model_tflops_per_device.causal",
    "mfu.full",
    "mfu.causal",
)


def run_parts(run: Run, anchor: str, parts: Sequence[RunPart]) -> list[Part]:
    """Return the parts that have something to say about the run."""
    made = (Part(title=title, blocks=list(make(run, anchor))) for title, make in parts)
    return [part for part in made if part.blocks]


def summary(run: Run, anchor: str) -> list[Block]:
    """Return what happened, and the numbers to read first."""
    blocks = failure(run)
    tiles = [tile for name in HEADLINE if (tile := headline(run, name))]
    memory = [tile for name in MEMORY_METRICS if (tile := headline(run, name))]
    valid = [tile for tile in memory if tile.cell.value is not None]
    tiles += (valid or memory)[:1]
    loss = loss_cell(run)
    if loss.value is not None:
        tiles.append(Tile(label="Loss, first to last step", cell=loss, unit="nats/token"))
    if tiles:
        blocks.append(Tiles(tiles=tiles))
    return blocks


def failure(run: Run) -> list[Block]:
    """Return how a run failed, and what it had done by then."""
    record = run.record
    if record.status == "ok":
        return []
    if record.failure is None:
        return [Text(text=f"This run ended as: {record.status}.", tone="bad")]
    who = "" if record.failure.rank is None else f" on rank {record.failure.rank}"
    done = f", after {len(run.steps)} completed steps" if run.steps else ""
    hint = [Text(text=record.failure.hint, tone="warning")] if record.failure.hint else []
    return [
        Text(text=f"This run ended as: {record.status}{who}{done}.", tone="bad"),
        Preformatted(text=record.failure.error, tone="bad"),
        *hint,
    ]


def headline(run: Run, name: str) -> Tile | None:
    """Return a metric as a tile, or None if the record does not have it."""
    metric = run.record.metrics.get(name)
    if metric is None:
        return None
    label = METRICS[name].title
    if metric.value is None:
        reason = metric.invalid or ""
        return Tile(label=label, unit="", cell=Cell(text="invalid", note=reason, tone="warning"))
    size, unit = fitting_unit([metric.value], metric.unit)
    note = ""
    if name == "step_time" and len(metric.samples) > 1:
        low, high = (number(f(metric.samples) / size) for f in (min, max))
        note = f"{low} to {high} over {len(metric.samples)} steps"
    elif "peak_tflops" in metric.details:
        peak, peak_unit = fitting_unit([float(metric.details["peak_tflops"] or 0)], "TFLOPS")
        value = number(float(metric.details["peak_tflops"] or 0) / peak)
        note = f"of {value} {peak_unit} ({metric.details.get('peak_dtype')})"
    text = number(metric.value / size)
    return Tile(label=label, unit=unit, cell=Cell(text=text, note=note, value=metric.value))


def settings(run: Run, anchor: str) -> list[Block]:
    """Return what ran: workload, plan, precision, routing, devices."""
    return [what_ran(run.record), *(Text(text=note) for note in run.record.notes)]


def metrics(run: Run, anchor: str) -> list[Block]:
    """Return the table of all metrics."""
    return [metrics_table(run.record)] if run.record.metrics else []


def pictures(run: Run, anchor: str) -> list[Block]:
    """Return step time, memory and loss as pictures."""
    drawn = figures(run, anchor)
    return [Figures(figures=drawn)] if drawn else []


def published(run: Run, anchor: str) -> list[Block]:
    """Return the published results of the workload beside the run, marked as such."""
    if not run.references:
        return []
    return [
        Text(
            text="The results below the first row were published by others and not measured here. "
            "Figures stand in the convention of their source; a figure marked as derived follows "
            "from the published tokens per second and the FLOPs per token of the model."
        ),
        *not_comparable(run),
        references_table(run),
    ]


def not_comparable(run: Run) -> list[Block]:
    """Return the warning that a proxy's speed says nothing about the full-size model's."""
    record = run.record
    full_size = max(reference.model.parameters for reference in run.references)
    is_cpu = record.hardware.details.get("kind") == "cpu"
    if not is_cpu and record.model.parameters >= full_size:
        return []
    what = (
        "a small proxy of the workload" if record.model.parameters < full_size else "the workload"
    )
    where = " on a CPU" if is_cpu else ""
    text = (
        f"This run is {what}{where}: its speed is not comparable with the full-size references. "
        "They show what the full workload reaches on the hardware it is meant for."
    )
    return [Text(text=text, tone="warning")]


def communication(run: Run, anchor: str) -> list[Block]:
    """Return the exact counters: collectives by axis and kind, and every plain number."""
    counters = run.record.counters
    blocks: list[Block] = []
    rows = collective_rows(counters.get("collectives"))
    if rows:
        columns = [
            Column(title="Axis"),
            Column(title="Collective"),
            Column(title="Count", is_numeric=True),
            Column(title="Bytes", is_numeric=True),
        ]
        caption = "Collectives of one step on one rank, counted as they were issued."
        blocks.append(Table(columns=columns, rows=rows, caption=caption))
    plain = [
        [Cell(text=name), Cell(text=counter_value(name, value), value=float(value))]
        for name, value in counters.items()
        if isinstance(value, int | float)
    ]
    if plain:
        columns = [Column(title="Counter"), Column(title="Value", is_numeric=True)]
        blocks.append(Table(columns=columns, rows=plain, caption="Counters of one step."))
    operators = operator_rows(counters.get("by_operator"))
    if operators:
        columns = [Column(title="Operator"), Column(title="Calls", is_numeric=True)]
        caption = f"The {len(operators)} operators that one step called"
        blocks.append(Table(columns=columns, rows=operators, caption=caption, folded=True))
    return blocks


def collective_rows(collectives: Any) -> list[list[Cell]]:
    """Return one row for each axis and kind of ``{axis: {kind: {"count", "bytes"}}}``."""
    rows = []
    for axis, kinds in (collectives or {}).items():
        for kind, counted in kinds.items():
            num_bytes = counted["bytes"]
            count = Cell(text=f"{counted['count']:,}", value=counted["count"])
            size = Cell(text=short_bytes(num_bytes), value=num_bytes)
            rows.append([Cell(text=axis), Cell(text=kind), count, size])
    return rows


def operator_rows(calls: Any) -> list[list[Cell]]:
    """Return one row for each operator of ``{name: calls}``, the most frequent first."""
    ordered = sorted((calls or {}).items(), key=lambda item: (-item[1], item[0]))
    return [[Cell(text=name), Cell(text=f"{count:,}", value=count)] for name, count in ordered]


def counter_value(name: str, value: float) -> str:
    """Return a counter as text; bytes in a unit that fits."""
    return short_bytes(value) if name.endswith("bytes") else scalar(value)


def surroundings(run: Run, anchor: str) -> list[Block]:
    """Return versions, machine and commit, and where the run's files are."""
    table = environment_table(run.record)
    files = [Text(text=f"Files of this run: {run.folder}", tone="muted")] if run.folder else []
    return [*([table] if table else []), *files]


RUN_PARTS: tuple[RunPart, ...] = (
    ("", summary),
    ("What ran", settings),
    ("Step by step", pictures),
    ("Metrics", metrics),
    ("Published results", published),
    ("Exact counters", communication),
    ("Environment", surroundings),
)
