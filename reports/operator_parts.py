"""Parts about computation in traces: classes, operators, kernels, modules, launches."""

from collections.abc import Sequence

from reports.blocks import Block, Cell, Column, Table
from reports.numbers import number
from reports.trace_answer import Row, TraceAnswer
from reports.trace_cells import COUNT, MS, SHARE, count_cell, number_cell, readable

MOST_ROWS = 25


def operators(answer: TraceAnswer, key: str) -> list[Block]:
    """Return classes, operators, kernels and modules."""
    computing = "The time spent computing, alone or beside communication"
    blocks: list[Block] = [
        rows_table(answer.classes, "Class", "Phase", f"{computing}, by class and phase."),
        rows_table(
            answer.operators, "Operator", "Part of", f"{computing}, by operator.", with_count=True
        ),
    ]
    if answer.kernels is not None:
        caption = "Device time by kernel, names without template values and tile sizes"
        blocks.append(
            rows_table(answer.kernels, "Kernel", "Class", caption, with_count=True, folded=True)
        )
    if answer.modules is not None:
        caption = "Computation inside each kind of module"
        blocks.append(
            rows_table(answer.modules, "Module", "Phase", caption, with_count=True, folded=True)
        )
    return blocks


def rows_table(
    rows: Sequence[Row],
    name: str,
    group: str,
    caption: str,
    *,
    with_count: bool = False,
    folded: bool = False,
) -> Table:
    """Return rows as a table; those beyond MOST_ROWS are one, so that the sum stays whole."""
    by_class = name == "Class"
    shown, rest = list(rows[:MOST_ROWS]), rows[MOST_ROWS:]
    cells = []
    for row in shown:
        label, part = (row.group, row.name) if by_class else (row.name, row.group)
        line = [
            Cell(text=readable(label)),
            Cell(text=readable(part)),
            number_cell(row.ms),
            number_cell(row.percent, 3),
        ]
        cells.append([*line, count_cell(row.count)] if with_count else line)
    if rest:
        line = [
            Cell(text=f"{len(rest)} others"),
            Cell(text=""),
            number_cell(sum(row.ms for row in rest)),
            number_cell(sum(row.percent for row in rest), 3),
        ]
        cells.append([*line, Cell(text="")] if with_count else line)
    footer = [
        Cell(text="together"),
        Cell(text=""),
        number_cell(sum(row.ms for row in rows)),
        number_cell(sum(row.percent for row in rows), 3),
        *([Cell(text="")] if with_count else []),
    ]
    columns = [Column(title=name), Column(title=group), MS, SHARE, *([COUNT] if with_count else [])]
    return Table(columns=columns, rows=cells, footer=footer, caption=caption, folded=folded)


def launches(answer: TraceAnswer, key: str) -> list[Block]:
    """Return what launching costs the host on the first rank."""
    if answer.launches is None:
        return []
    columns = [
        Column(title="Call"),
        Column(title="Calls", is_numeric=True),
        Column(title="Host time", unit="ms", is_numeric=True),
        Column(title="Device time", unit="ms", is_numeric=True),
        Column(title="Delay", unit="\u00b5s, median", is_numeric=True),
        Column(title="Shorter than the call", unit="calls", is_numeric=True),
    ]
    rows = [
        [
            Cell(text=one.name),
            Cell(text=f"{one.count:,}", value=one.count),
            number_cell(one.host_ns / 1e6),
            number_cell(one.device_ns / 1e6),
            number_cell(one.delay_median_ns / 1e3, note=f"90 %: {number(one.delay_p90_ns / 1e3)}"),
            Cell(text=f"{one.num_shorter:,}", value=one.num_shorter),
        ]
        for one in answer.launches
    ]
    caption = (
        f"Launches of rank {answer.ranks[0].rank}: delay is from the call to the device's start"
    )
    return [Table(columns=columns, rows=rows, caption=caption, folded=True)]
