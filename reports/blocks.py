"""Blocks: what a report is made of, before it is written as HTML or as Markdown."""

from typing import Literal

import msgspec

Tone = Literal["plain", "muted", "good", "warning", "bad"]


class Block(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the blocks; ``kind`` names the template that draws one."""

    @property
    def kind(self) -> str:
        """The block's type in lower case."""
        return type(self).__name__.lower()


class Cell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Text in a table: ``note`` is a second, smaller line; ``value`` the number in full."""

    text: str
    note: str = ""
    link: str = ""
    tone: Tone = "plain"
    value: float | None = None


class Column(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table's column; numbers are aligned at the right. ``unit`` stands under the title."""

    title: str
    unit: str = ""
    is_numeric: bool = False


class Text(Block, frozen=True, kw_only=True):
    """A paragraph; one that is not plain stands out."""

    text: str
    tone: Tone = "plain"


class Preformatted(Block, frozen=True, kw_only=True):
    """Text whose line breaks matter, as an error has."""

    text: str
    tone: Tone = "plain"


class Tile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A number that deserves to be read first."""

    label: str
    cell: Cell
    unit: str


class Tiles(Block, frozen=True, kw_only=True):
    """The few numbers that matter most, side by side."""

    tiles: list[Tile]


class Facts(Block, frozen=True, kw_only=True):
    """Names and what they are."""

    items: list[tuple[str, Cell]]


class Table(Block, frozen=True, kw_only=True):
    """A table; every row has one cell a column. A folded one opens on demand.

    ``footer`` is the row of sums, which stays last; empty without one.
    """

    columns: list[Column]
    rows: list[list[Cell]]
    footer: list[Cell] = []
    caption: str = ""
    folded: bool = False


class Figure(Block, frozen=True, kw_only=True):
    """A picture: ``caption`` has its unit and source, ``words`` say the same without it.

    ``wide_svg`` is drawn for wide screens, and ``svg`` then only stands on narrow ones.
    """

    title: str
    svg: str
    wide_svg: str = ""
    caption: str
    words: str


class Figures(Block, frozen=True, kw_only=True):
    """Pictures side by side."""

    figures: list[Figure]


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A titled part of a section."""

    title: str
    blocks: list[Block]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything about one run. ``anchor`` is its address in the page."""

    title: str
    subtitle: str
    anchor: str
    badges: list[Cell]
    parts: list[Part]


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole: an overview, the runs, and how the numbers are counted."""

    title: str
    subtitle: str
    overview: list[Block]
    sections: list[Section]
    closing: Part
