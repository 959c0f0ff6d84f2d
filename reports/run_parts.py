"""Parts of a run's section: each is a function from a run to blocks, empty if it has nothing.

To add one, write such a function and put it into ``RUN_PARTS``.
"""

from collections.abc import Callable, Sequence
from typing import Any

from bench.metrics import METRICS
from bench.record import RunRecord
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
from reports.numbers import fitting_unit, number, quantity, short_bytes
from reports.plots import figures
from reports.routing_part import routing
from reports.run_trace_parts import (
    trace_causes,
    trace_collectives,
    trace_memory,
    trace_operators,
    where_time_goes,
)
from reports.settings import environment_table, what_ran
from reports.tables import (
    MEMORY_METRICS,
    metrics_table,
    mfu_name,
    references_table,
)

RunPart = tuple[str, Callable[[Run, str], Sequence[Block]]]

ENDS = {"failed": "Failed", "timeout": "Timed out", "interrupted": "Interrupted"}


def run_parts(run: Run, anchor: str, parts: Sequence[RunPart]) -> list[Part]:
    """Return the parts that have something to say about the run."""
    made = (Part(title=title, blocks=list(make(run, anchor))) for title, make in parts)
    return [part for part in made if part.blocks]


def summary(run: Run, anchor: str) -> list[Block]:
    """Return what happened, and the numbers to read first."""
    blocks = failure(run)
    tiles = headline(run)
    if tiles:
        blocks.append(Tiles(tiles=tiles))
    return blocks


def failure(run: Run) -> list[Block]:
    """Return how a run failed, and what it had done by then."""
    record = run.record
    if record.status == "ok":
        return []
    done = f", after {len(run.steps)} completed steps" if run.steps else ""
    if record.failure is None:
        return [Text(text=f"{ENDS[record.status]}{done}.", tone="bad")]
    who = "" if record.failure.rank is None else f" on rank {record.failure.rank}"
    hint = [Text(text=record.failure.hint, tone="warning")] if record.failure.hint else []
    return [
        Text(text=f"{ENDS[record.status]}{who}{done}.", tone="bad"),
        Preformatted(text=record.failure.error, tone="bad"),
        *hint,
    ]


def headline(run: Run) -> list[Tile]:
    """Return the numbers to read first, those that the record has."""
    record = run.record
    memory = [name for name in MEMORY_METRICS if name in record.metrics]
    valid = [name for name in memory if record.metrics[name].value is not None]
    tiles = [
        tile(record, "Speed per device", "tokens_per_second_per_device"),
        tile(record, "Step time", "step_time", note=step_time_note(run)),
        tile(
            record,
            "Model FLOPS per device, full",
            "model_tflops_per_device.full",
            note=in_causal(record, "model_tflops_per_device.causal"),
        ),
        tile(record, *mfu_tile(record)),
        *(tile(record, METRICS[name].title, name) for name in (valid or memory)[:1]),
    ]
    steps = run.training_steps()
    started = f"from {number(steps[0].loss)} at the first step" if steps else ""
    tiles.append(tile(record, "Loss", "loss", note=started))
    return [tile for tile in tiles if tile is not None]


def tile(record: RunRecord, label: str, name: str, note: str = "") -> Tile | None:
    """Return a metric as a tile, or None if the record does not have it."""
    metric = record.metrics.get(name)
    if metric is None:
        return None
    if metric.value is None:
        reason = metric.invalid or ""
        return Tile(label=label, unit="", cell=Cell(text="invalid", note=reason, tone="warning"))
    size, unit = fitting_unit([metric.value], metric.unit)
    cell = Cell(text=number(metric.value / size), note=note, value=metric.value)
    return Tile(label=label, unit=unit, cell=cell)


def mfu_tile(record: RunRecord) -> tuple[str, str, str]:
    """Return label, metric and note of the MFU: its denominator is named."""
    name = mfu_name(record, "full")
    causal = in_causal(record, name.replace(".full", ".causal"))
    dtype = record.metrics[name].details.get("peak_dtype") if name in record.metrics else None
    label = f"MFU of the {dtype} peak, full" if dtype else "MFU, full"
    return label, name, causal


def in_causal(record: RunRecord, name: str) -> str:
    """Return a metric in the causal convention as a note."""
    metric = record.metrics.get(name)
    if metric is None or metric.value is None:
        return ""
    return f"causal: {quantity(metric.value, metric.unit)}"


def step_time_note(run: Run) -> str:
    """Return the range of the step times."""
    metric = run.record.metrics.get("step_time")
    if metric is None or metric.value is None or len(metric.samples) < 2:
        return ""
    size, _ = fitting_unit([metric.value], metric.unit)
    low, high = number(min(metric.samples) / size), number(max(metric.samples) / size)
    return f"{low} to {high} over {len(metric.samples)} steps"


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
    if not run.references or run.record.status != "ok":
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
    blocks += peak_by_kind(counters.get("peak_tensor_by_kind"))
    operators = operator_rows(counters.get("by_operator"))
    if operators:
        columns = [Column(title="Operator"), Column(title="Calls", is_numeric=True)]
        caption = f"The {len(operators)} operators that one step called"
        blocks.append(Table(columns=columns, rows=operators, caption=caption, folded=True))
    return blocks


def peak_by_kind(kinds: Any) -> list[Block]:
    """Return what the peak of live tensors is made of, from ``{kind: bytes}``."""
    rows = [
        [Cell(text=kind.replace("_", " ")), Cell(text=short_bytes(size), value=size)]
        for kind, size in (kinds or {}).items()
    ]
    columns = [Column(title="Kind"), Column(title="At the peak", is_numeric=True)]
    caption = "Live tensors at the peak of the counted step, on the rank with the highest."
    return [Table(columns=columns, rows=rows, caption=caption)] if rows else []


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
    return short_bytes(value) if name.endswith("bytes") else f"{value:,}"


def surroundings(run: Run, anchor: str) -> list[Block]:
    """Return versions, machine and commit, and where the run's files are."""
    table = environment_table(run.record)
    files = [Text(text=f"Files of this run: {run.folder}", tone="muted")] if run.folder else []
    return [*([table] if table else []), *files]


RUN_PARTS: tuple[RunPart, ...] = (
    ("", where_time_goes),
    ("", summary),
    ("What ran", settings),
    ("Step by step", pictures),
    ("Metrics", metrics),
    ("Where the time goes", trace_causes),
    ("Collectives in the traces", trace_collectives),
    ("Operators in the traces", trace_operators),
    ("Memory in the traces", trace_memory),
    ("Published results", published),
    ("Routing of the experts", routing),
    ("Exact counters", communication),
    ("Environment", surroundings),
)
