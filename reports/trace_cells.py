"""Cells and columns that all parts about traces share."""

from reports.blocks import Cell, Column, Tone
from reports.numbers import number

MOST_RANKS = 64
ABSENT = Cell(text="not in the trace", tone="muted")
MS = Column(title="Time", unit="ms per step", is_numeric=True)
SHARE = Column(title="Share", unit="% of the step", is_numeric=True)
COUNT = Column(title="Count", unit="per step and rank", is_numeric=True)


def number_cell(value: float | None, digits: int = 4, note: str = "", tone: Tone = "plain") -> Cell:
    """Return a number; None is what the trace does not have, which is not zero."""
    if value is None:
        return ABSENT
    return Cell(text=number(value, digits), value=value, note=note, tone=tone)
