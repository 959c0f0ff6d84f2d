"""Cells and columns that all parts about traces share."""

from reports.blocks import Cell, Column, Tone
from reports.numbers import short, whole
from reports.traces.allocations import KINDS
from reports.traces.classify import CLASSES

MOST_RANKS = 64
ABSENT = Cell(text="not in the trace", tone="muted")
MS = Column(title="Time", unit="ms per step", is_numeric=True)
SHARE = Column(title="Share", unit="% of the step", is_numeric=True)
COUNT = Column(title="Count", unit="per step and rank", is_numeric=True)

_OWN_NAMES = frozenset((*CLASSES, *KINDS))


def readable(name: str) -> str:
    """Return one of our own names for people; names from a trace stay as they are."""
    return name.replace("_", " ") if name in _OWN_NAMES else name


def number_cell(value: float | None, digits: int = 4, note: str = "", tone: Tone = "plain") -> Cell:
    """Return a number; None is what the trace does not have, which is not zero."""
    if value is None:
        return ABSENT
    return Cell(text=short(value, digits), value=value, note=note, tone=tone)


def count_cell(count: float | None) -> Cell:
    """Return a count, whole if it is; nothing for what is no event."""
    return Cell(text="") if count is None else Cell(text=whole(count), value=count)
