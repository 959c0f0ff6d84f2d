"""Changes: two tables of the same quantity side by side, row by row, adding up to the whole."""

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

State = Literal["both", "new", "vanished"]
OTHERS = "others"


class Change(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row. ``before`` and ``after`` in the table's unit; None where it is not there at all.

    ``percent``: of ``before``; None if that is zero or absent. ``share_percent``: of the table's
    whole change; None if that is zero. ``count_before`` and ``count_after``: occurrences per step.
    """

    group: str
    name: str
    before: float | None
    after: float | None
    change: float
    percent: float | None
    share_percent: float | None
    state: State
    count_before: float | None = None
    count_after: float | None = None


class Changes(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rows, the largest change first, that add up to ``change``; ``source`` says of what."""

    unit: str
    before: float
    after: float
    change: float
    rows: list[Change]
    source: str = ""


Key = tuple[str, str]
Counts = Mapping[Key, float]


def changes(
    before: Mapping[Key, float],
    after: Mapping[Key, float],
    *,
    unit: str = "ms",
    source: str = "",
    counts: tuple[Counts, Counts] = ({}, {}),
    most: int | None = None,
) -> Changes:
    """Return the changes of all keys (group, name); beyond ``most`` they are one row."""
    whole = sum(after.values()) - sum(before.values())
    keys = list(dict.fromkeys([*before, *after]))
    rows = [_change(key, before.get(key), after.get(key), whole, counts) for key in keys]
    rows.sort(key=lambda row: -abs(row.change))
    if most is not None and len(rows) > most + 1:
        rows = [*rows[:most], _others(rows[most:], whole)]
    return Changes(
        unit=unit,
        before=sum(before.values()),
        after=sum(after.values()),
        change=whole,
        rows=rows,
        source=source,
    )


def _change(
    key: Key,
    before: float | None,
    after: float | None,
    whole: float,
    counts: tuple[Counts, Counts],
) -> Change:
    change = (after or 0.0) - (before or 0.0)
    return Change(
        group=key[0],
        name=key[1],
        before=before,
        after=after,
        change=change,
        percent=percent(before, after),
        share_percent=100 * change / whole if whole else None,
        state="new" if before is None else "vanished" if after is None else "both",
        count_before=counts[0].get(key),
        count_after=counts[1].get(key),
    )


def _others(rows: list[Change], whole: float) -> Change:
    before, after = sum(row.before or 0 for row in rows), sum(row.after or 0 for row in rows)
    name = f"{len(rows)} {OTHERS}"
    return _change(("", name), before, after, whole, ({}, {}))


def percent(before: float | None, after: float | None) -> float | None:
    """Return the change in percent of ``before``; None without both or from zero."""
    return 100 * (after - before) / before if before and after is not None else None
