"""Parts of a report about traces: each turns an answer into blocks, empty if it has nothing."""

from collections.abc import Callable, Sequence

from reports.blocks import Block, Cell, Column, Facts, Figures, Part, Table, Text, Tile, Tiles
from reports.collective_parts import collectives
from reports.numbers import number, quantity
from reports.operator_parts import launches, operators
from reports.trace_answer import Row, TraceAnswer
from reports.trace_cells import ABSENT, MOST_RANKS, MS, SHARE, number_cell, readable
from reports.trace_memory import memory_blocks, peak_tile
from reports.traces.breakdown import StepBreakdown
from reports.waterfall_plot import waterfall_figure

TracePart = tuple[str, Callable[[TraceAnswer, str], Sequence[Block]]]


def picture(answer: TraceAnswer, key: str) -> list[Block]:
    """Return the waterfall."""
    return [Figures(figures=[waterfall_figure(answer.waterfall, f"{key}-waterfall")])]


def tiles(answer: TraceAnswer) -> Tiles:
    """Return the numbers to read first."""
    total = sum(row.duration_ns for row in answer.ranks)

    def tile(label: str, ns: int, note: str) -> Tile:
        share = 100 * ns / total if total else 0.0
        return Tile(label=label, unit="% of the step", cell=number_cell(share, 3, note))

    communication = sum(row.exposed_communication_ns for row in answer.ranks)
    hidden = sum(row.overlapped_communication_ns for row in answer.ranks)
    idle = sum(row.idle_ns for row in answer.ranks)
    compute = sum(row.compute_ns + row.overlapped_communication_ns for row in answer.ranks)
    step = Cell(text=quantity(answer.step_ms / 1e3, "s"), note="mean over ranks", value=None)
    all_of_it = communication + hidden
    overlap = (
        f"{number(100 * hidden / all_of_it, 3)} % of it hidden" if all_of_it else "none at all"
    )
    found = [
        Tile(label="Step under the profiler", unit="", cell=step),
        tile("Computation", compute, "alone or beside communication"),
        tile("Exposed communication", communication, overlap),
        tile("Idle", idle, "nothing runs"),
    ]
    found += [peak_tile(one) for one in answer.memory[:1]]
    return Tiles(tiles=found)


def waterfall_table(answer: TraceAnswer, key: str) -> list[Block]:
    """Return the waterfall's bars with their sources."""
    total = answer.waterfall.total_ms
    rows = [
        [
            Cell(text=bar.label),
            number_cell(bar.ms),
            number_cell(100 * bar.ms / total, 3),
            Cell(text=bar.source),
        ]
        for bar in answer.waterfall.bars
    ]
    last = [Cell(text=answer.waterfall.total_label), number_cell(total), number_cell(100.0, 3)]
    columns = [Column(title="From top to bottom"), MS, SHARE, Column(title="Where it comes from")]
    caption = "The waterfall in figures: the bars add up to the last row exactly."
    footer = [*last, Cell(text="")]
    return [Table(columns=columns, rows=rows, footer=footer, caption=caption, folded=True)]


def causes(answer: TraceAnswer, key: str) -> list[Block]:
    """Return the account: cause by cause, with the ranks that have least and most."""
    several = len(answer.ranks) > 1
    columns = [Column(title="Cause"), Column(title="Of which"), MS, SHARE]
    columns += [Column(title="Least", unit="ms, rank", is_numeric=True)] if several else []
    columns += [Column(title="Most", unit="ms, rank", is_numeric=True)] if several else []
    rows = [_cause_row(row) for row in answer.rows]
    footer = [Cell(text="step"), Cell(text=""), number_cell(answer.step_ms), number_cell(100.0, 3)]
    footer += [Cell(text=""), Cell(text="")] if several else []
    caption = (
        "The profiled step by cause, mean over ranks; the rows add up to it. Late rank: what the "
        "others wait for in collectives, with what that rank does longer than they."
    )
    return [Table(columns=columns, rows=rows, footer=footer, caption=caption)]


def _cause_row(row: Row) -> list[Cell]:
    why = ", ".join(f"{name} {number(ms, 3)} ms" for name, ms in list(row.why.items())[:3])
    item = Cell(text=readable(row.name), note=f"longer than others: {why}" if why else "")
    cells = [Cell(text=row.group), item, number_cell(row.ms), number_cell(row.percent, 3)]
    for end in (row.lowest, row.highest):
        if end is not None:
            cells.append(Cell(text=number(end[1], 3), note=f"rank {end[0]}", value=end[1]))
    return cells


def ranks(answer: TraceAnswer, key: str) -> list[Block]:
    """Return the breakdown of every rank, which adds up to its window."""
    if len(answer.ranks) < 2:
        return []
    shown = answer.ranks[:MOST_RANKS]
    titles = (
        "Compute",
        "Both",
        "Exposed comm.",
        "Copies",
        "Host-bound",
        "In calls",
        "Bubble",
        "Idle",
    )
    columns = [
        Column(title="Rank", is_numeric=True),
        Column(title="Window", unit="ms", is_numeric=True),
    ]
    columns += [Column(title=title, unit="ms", is_numeric=True) for title in titles]
    more = (
        f" The first {MOST_RANKS} of {len(answer.ranks)}." if len(answer.ranks) > MOST_RANKS else ""
    )
    caption = (
        "All profiled steps of each rank: compute alone, compute and communication at once, "
        f"communication alone, and so on; each row adds up to its window.{more}"
    )
    return [
        Table(columns=columns, rows=[_rank_row(row) for row in shown], caption=caption, folded=True)
    ]


def _rank_row(row: StepBreakdown) -> list[Cell]:
    values = (
        row.duration_ns,
        row.compute_ns,
        row.overlapped_communication_ns,
        row.exposed_communication_ns,
        row.copies_ns,
        row.idle_host_ns,
        row.idle_collective_ns,
        row.idle_bubble_ns,
        row.idle_other_ns,
    )
    rank = Cell(text=str(row.rank), value=row.rank)
    return [rank, *(number_cell(value / 1e6) for value in values)]


def memory(answer: TraceAnswer, key: str) -> list[Block]:
    """Return memory over time and at its peak, from each source that there is."""
    if not answer.memory:
        text = (
            "Memory is not in the trace: profile with profile_memory=True, or give a snapshot of "
            "torch.cuda.memory._dump_snapshot beside the traces."
        )
        return [Text(text=text, tone="muted")]
    return [
        block
        for number, one in enumerate(answer.memory, 1)
        for block in memory_blocks(one, f"{key}-memory-{number}")
    ]


def coverage(answer: TraceAnswer, key: str) -> list[Block]:
    """Return what the traces contain and what was wrong with them."""
    names = {
        "device_events": "Kernels of a device",
        "operators": "Operators",
        "launches": "Launches linked to kernels",
        "steps": "Marked steps",
        "modules": "Modules",
        "memory": "Memory events",
        "shapes": "Shapes",
        "collective_metadata": "Collectives with metadata",
    }
    there, absent = Cell(text="in the trace"), ABSENT
    items = [
        (title, there if getattr(answer.coverage, name) else absent)
        for name, title in names.items()
    ]
    blocks: list[Block] = [
        Facts(items=[*((k, Cell(text=v)) for k, v in answer.job.items()), *items])
    ]
    for warning in answer.warnings:
        text = f"{warning.file}: {warning.count:,} x {warning.message}"
        blocks.append(Text(text=text, tone="warning"))
    for failure in answer.failures:
        blocks.append(Text(text=f"Not analysed: {failure.path}: {failure.reason}", tone="bad"))
    return blocks


TRACE_PARTS: tuple[TracePart, ...] = (
    ("Where the time goes", causes),
    ("", waterfall_table),
    ("", ranks),
    ("Collectives", collectives),
    ("Operators", operators),
    ("", launches),
    ("Memory", memory),
    ("What the traces contain", coverage),
)


def trace_parts(
    answer: TraceAnswer, key: str, parts: Sequence[TracePart] = TRACE_PARTS
) -> list[Part]:
    """Return the parts that have something to say."""
    made = (Part(title=title, blocks=list(make(answer, key))) for title, make in parts)
    return [part for part in made if part.blocks]
