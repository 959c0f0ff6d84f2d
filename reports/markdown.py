"""Markdown: a report as text for a pull request; words stand where the page has pictures."""

import html
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from reports.blocks import (
    Block,
    Cell,
    Facts,
    Figures,
    Part,
    Preformatted,
    Report,
    Section,
    Table,
    Text,
    Tiles,
)

# An underscore inside a word is plain text in GitHub's Markdown.
_SPECIAL = re.compile(r"([\\`*\[\]<>|~#]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")


def render_markdown(report: Report) -> str:
    """Return the report in GitHub's Markdown; markup in names is escaped."""
    paragraphs = [f"# {escape(report.title)}", escape(report.subtitle)]
    paragraphs += blocks(report.overview)
    for section in report.sections:
        paragraphs += section_paragraphs(section)
    paragraphs += part_paragraphs(report.closing, level=2)
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph) + "\n"


def section_paragraphs(section: Section) -> Iterator[str]:
    """Yield a run's paragraphs."""
    badges = " ".join(f"({escape(badge.text)})" for badge in section.badges)
    yield f"## {escape(section.title)} {badges}".rstrip()
    yield escape(section.subtitle)
    for part in section.parts:
        yield from part_paragraphs(part, level=3)


def part_paragraphs(part: Part, *, level: int) -> Iterator[str]:
    """Yield a part's heading and blocks."""
    if part.title:
        yield f"{'#' * level} {escape(part.title)}"
    yield from blocks(part.blocks)


def blocks(items: Sequence[Block]) -> Iterator[str]:
    """Yield one paragraph a block."""
    for block in items:
        yield _WRITERS[type(block)](block)


def text(block: Text) -> str:
    """Return a paragraph; a warning or an error is a quotation."""
    quoted = block.tone in ("warning", "bad")
    return f"> {escape(block.text)}" if quoted else escape(block.text)


def preformatted(block: Preformatted) -> str:
    """Return a code block, fenced longer than any fence in it."""
    longest = max((len(run) for run in re.findall(r"`+", block.text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{block.text}\n{fence}"


def tiles(block: Tiles) -> str:
    """Return the numbers as a list."""
    return "\n".join(
        f"* {escape(tile.label)}: **{escape(tile.cell.text)}** {escape(tile.unit)}".rstrip()
        + (f" ({escape(tile.cell.note)})" if tile.cell.note else "")
        for tile in block.tiles
    )


def facts(block: Facts) -> str:
    """Return names and values as a list."""
    return "\n".join(f"* **{escape(name)}**: {cell_text(cell)}" for name, cell in block.items)


def table(block: Table) -> str:
    """Return a table with its caption above."""
    titles = [
        escape(f"{column.title} ({column.unit})" if column.unit else column.title)
        for column in block.columns
    ]
    rules = ["---:" if column.is_numeric else "---" for column in block.columns]
    rows = [
        [cell_text(cell) for cell in row]
        for row in [*block.rows, *([block.footer] if block.footer else [])]
    ]
    lines = "\n".join(f"| {' | '.join(row)} |" for row in [titles, rules, *rows])
    if block.folded:
        summary = html.escape(block.caption)
        return f"<details><summary>{summary}</summary>\n\n{lines}\n\n</details>"
    return f"{escape(block.caption)}\n\n{lines}" if block.caption else lines


def figures(block: Figures) -> str:
    """Return what the pictures show, in words."""
    return "\n".join(
        f"* **{escape(figure.title)}**: {escape(figure.words)}. {escape(figure.caption)}"
        for figure in block.figures
    )


def cell_text(cell: Cell) -> str:
    """Return a cell in one line, its note in parentheses."""
    label = escape(cell.text)
    if cell.link.startswith(("https://", "http://")):
        label = f"[{label}]({link_target(cell.link)})"
    return f"{label} ({escape(cell.note)})" if cell.note else label


def link_target(address: str) -> str:
    """Return an address that cannot end the link or the table cell around it."""
    return re.sub(r"[^\w:/?&=%.#@+,;~-]", lambda match: quote(match[0]), address)


def quote(character: str) -> str:
    """Return a character percent-encoded."""
    return "".join(f"%{byte:02X}" for byte in character.encode(errors="replace"))


def escape(string: str) -> str:
    """Return text in one line, without any meaning to Markdown or HTML."""
    return _SPECIAL.sub(r"\\\1", " ".join(string.split()).replace("&", "&amp;"))


_WRITERS: dict[type[Block], Callable[[Any], str]] = {
    Text: text,
    Preformatted: preformatted,
    Tiles: tiles,
    Facts: facts,
    Table: table,
    Figures: figures,
}
