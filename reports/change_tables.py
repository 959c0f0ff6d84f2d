"""Tables of changes: both sides, the change, and its share of the whole, which is the last row."""

from reports.blocks import Cell, Column, Table, Tone
from reports.changes import Change, Changes
from reports.numbers import short, whole
from reports.trace_cells import readable

ABSENT = Cell(text="absent", tone="muted")
COUNT_UNIT = "before \u2192 after, per step and rank"


def signed(value: float, digits: int = 3) -> str:
    """Return a number with its sign; no sign for zero."""
    sign = "+" if value > 0 else "\u2212" if value < 0 else ""
    return f"{sign}{short(abs(value), digits)}"


def signed_percent(value: float) -> str:
    """Return a change in percent: one decimal is enough, and none beyond 100."""
    sign = "+" if value > 0 else "\u2212" if value < 0 else ""
    return f"{sign}{abs(value):,.{1 if abs(value) < 100 else 0}f}"


def percent_cell(value: float | None, tone: Tone = "plain") -> Cell:
    """Return a change in percent; empty where there is nothing to divide by."""
    if value is None:
        return Cell(text="")
    return Cell(text=signed_percent(value), value=value, tone=tone)


def changes_table(
    table: Changes,
    name: str,
    group: str,
    caption: str,
    sides: tuple[str, str],
    *,
    swapped: bool = False,
    folded: bool = False,
) -> Table:
    """Return changes as a table whose last row is the whole; ``swapped``: the group comes first."""
    with_count = any(
        row.count_before is not None or row.count_after is not None for row in table.rows
    )
    columns = [Column(title=name), *([Column(title=group)] if group else [])]
    columns += [Column(title=title, unit=table.unit, is_numeric=True) for title in sides]
    columns += [
        Column(title="Change", unit=table.unit, is_numeric=True),
        Column(title="Change", unit="%", is_numeric=True),
        Column(title="Share", unit="% of all", is_numeric=True),
    ]
    columns += (
        [Column(title="Count", unit="before \u2192 after, per step and rank")] if with_count else []
    )
    rows = [_change_row(row, bool(group), swapped, with_count) for row in table.rows]
    sums = [table.before, table.after, table.change]
    footer = [Cell(text="together"), *([Cell(text="")] if group else [])]
    footer += [Cell(text=short(value), value=value) for value in sums[:2]]
    footer += [Cell(text=signed(table.change), value=table.change)]
    footer += [percent_cell(_percent(table)), Cell(text="100" if table.change else "")]
    footer += [Cell(text="")] if with_count else []
    source = f" ({table.source})" if table.source else ""
    return Table(
        columns=columns, rows=rows, footer=footer, caption=f"{caption}{source}.", folded=folded
    )


def _percent(table: Changes) -> float | None:
    return 100 * table.change / table.before if table.before else None


def _change_row(row: Change, has_group: bool, swapped: bool, with_count: bool) -> list[Cell]:
    name, group = (row.group, row.name) if swapped or not row.name else (row.name, row.group)
    if has_group and not row.name:
        name, group = row.group, ""
    tone: Tone = "warning" if row.state != "both" else "plain"
    label = Cell(text=readable(name), note=row.state if row.state != "both" else "", tone=tone)
    cells = [label, *([Cell(text=readable(group))] if has_group else [])]
    for value in (row.before, row.after):
        cells.append(ABSENT if value is None else Cell(text=short(value), value=value))
    cells.append(Cell(text=signed(row.change), value=row.change))
    cells += [percent_cell(row.percent), percent_cell(row.share_percent)]
    if with_count:
        ends = (row.count_before, row.count_after)
        text = " \u2192 ".join("absent" if end is None else whole(end) for end in ends)
        cells.append(Cell(text=text if ends != (None, None) else ""))
    return cells
