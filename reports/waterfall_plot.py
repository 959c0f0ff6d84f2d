"""Pictures of waterfalls: where a step's time goes, and what changed between two."""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from reports.account import item_title
from reports.blocks import Figure
from reports.changes import Changes
from reports.numbers import number
from reports.svg import INK, SERIES, WIDTH, Canvas
from reports.waterfall import Bar, Kind, Waterfall

WIDE = 7.8  # inches: for a screen that is not a phone
ROW_HEIGHT = 0.235
SMALL = 0.01  # of the total: smaller bars of one kind are drawn as one
MOST_CHANGES = 10
MILLISECONDS_BELOW = 10_000.0  # ms: longer steps are in s
GOOD, BAD, TOTAL = SERIES[2], SERIES[1], SERIES[0]
_COLORS: Mapping[Kind, str] = {
    "useful": SERIES[2],
    "compute": SERIES[0],
    "communication": SERIES[1],
    "idle": SERIES[3],
    "correction": SERIES[4],
}
_SMALL_LABELS: Mapping[Kind, str] = {
    "compute": "other computation",
    "communication": "other communication",
    "idle": "other idle time",
    "correction": "rest",
}


class _Row(Struct, frozen=True, kw_only=True):
    """One horizontal bar from ``start`` to ``stop``, in ms."""

    label: str
    start: float
    stop: float
    color: str
    text: str


def waterfall_figure(waterfall: Waterfall, key: str) -> Figure:
    """Return the picture of a waterfall, in a version for phones and one for wide screens."""
    unit, scale = _unit(waterfall.total_ms)
    rows, level = [], 0.0
    for bar in _merged(waterfall):
        share = 100 * bar.ms / waterfall.total_ms
        text = f"{number(bar.ms * scale, 3)} {unit}, {share:.1f} %"
        rows.append(_row(bar.label, level, bar.ms, _COLORS[bar.kind], text, scale))
        level += bar.ms
    total = f"{number(waterfall.total_ms * scale, 4)} {unit}"
    rows.append(_row(waterfall.total_label, 0.0, waterfall.total_ms, INK, total, scale))
    start = "From the device's peak to the step that was measured"
    title = start if waterfall.mfu_percent is not None else "Where the time of a step goes"
    return Figure(
        title=title,
        svg=_draw(rows, unit, WIDTH).svg(f"{key}-narrow"),
        wide_svg=_draw(rows, unit, WIDE).svg(f"{key}-wide"),
        caption=f"{unit} per step, mean over ranks, and share of the step. {_basis(waterfall)}",
        words=", ".join(f"{row.label} {row.text}" for row in rows),
    )


def _unit(longest_ms: float) -> tuple[str, float]:
    """Return the unit of a picture and what a value in ms is multiplied with."""
    return ("s", 1e-3) if longest_ms >= MILLISECONDS_BELOW else ("ms", 1.0)


def _basis(waterfall: Waterfall) -> str:
    if waterfall.mfu_percent is None:
        return f"No MFU: {waterfall.basis}. Source: traces."
    return (
        f"MFU {number(waterfall.mfu_percent)} %: {waterfall.basis}. "
        "Sources: FLOPs, peak and step time of the record; the rest from the traces."
    )


def _merged(waterfall: Waterfall) -> list[Bar]:
    """Return the bars in order, those of a kind that are too small to see as one."""
    limit = SMALL * waterfall.total_ms
    shown: list[Bar] = []
    small: dict[Kind, list[Bar]] = {}
    for bar in waterfall.bars:
        if bar.kind == "useful" or abs(bar.ms) >= limit:
            shown.append(bar)
        elif bar.ms:
            small.setdefault(bar.kind, []).append(bar)
    for kind, bars in small.items():
        one = bars[0].label if len(bars) == 1 else _SMALL_LABELS[kind]
        merged = Bar(label=one, ms=sum(bar.ms for bar in bars), kind=kind, source="")
        places = [number for number, bar in enumerate(shown) if bar.kind == kind]
        shown.insert(places[-1] + 1 if places else len(shown), merged)
    return sorted(shown, key=lambda bar: list(_COLORS).index(bar.kind))


def _row(label: str, level: float, ms: float, color: str, text: str, scale: float) -> _Row:
    return _Row(label=label, start=level * scale, stop=(level + ms) * scale, color=color, text=text)


def change_figure(changes: Changes, before: str, after: str, key: str) -> Figure:
    """Return the picture of a step time's change: from one total over its causes to the other."""
    unit, scale = _unit(max(changes.before, changes.after))
    rows = [_total(before, changes.before, unit, scale)]
    level = changes.before
    visible = SMALL * max((abs(row.change) for row in changes.rows), default=0.0) * 3
    shown = [row for row in changes.rows if abs(row.change) > visible][:MOST_CHANGES]
    named = [(item_title(row.group, row.name), row.change) for row in shown]
    named.sort(key=lambda pair: -pair[1])
    if len(shown) < len(changes.rows):
        named.append(("all others", changes.change - sum(change for _, change in named)))
    for label, change in named:
        sign = "+" if change > 0 else "\u2212"
        text = f"{sign}{number(abs(change) * scale, 3)} {unit}"
        rows.append(_row(label, level, change, BAD if change > 0 else GOOD, text, scale))
        level += change
    rows.append(_total(after, changes.after, unit, scale))
    return Figure(
        title="What changed the step time",
        svg=_draw(rows, unit, WIDTH).svg(f"{key}-narrow"),
        wide_svg=_draw(rows, unit, WIDE).svg(f"{key}-wide"),
        caption=f"{unit} per step. Source: {changes.source}.",
        words=", ".join(f"{row.label} {row.text}" for row in rows),
    )


def _total(label: str, ms: float, unit: str, scale: float) -> _Row:
    return _row(label, 0.0, ms, TOTAL, f"{number(ms * scale, 4)} {unit}", scale)


def _draw(rows: Sequence[_Row], unit: str, width: float) -> Canvas:
    """Return the bars under one another, each with its label above (narrow) or at its left."""
    canvas = Canvas(
        xlabel=f"{unit} per step", ylabel="", height=0.55 + ROW_HEIGHT * len(rows), width=width
    )
    axes = canvas.axes
    axes.grid(visible=False)
    places = range(len(rows))
    furthest = max(max(row.start, row.stop) for row in rows)
    for place, row in zip(places, rows, strict=True):
        left, right = sorted((row.start, row.stop))
        axes.barh(place, right - left, left=left, height=0.7, color=row.color)
        inside = right > 0.62 * furthest and left > 0.3 * furthest
        axes.annotate(
            row.text,
            (left if inside else right, place),
            xytext=(-4 if inside else 4, 0),
            textcoords="offset points",
            ha="right" if inside else "left",
            va="center",
            color=INK,
            fontsize=8,
        )
    for place, row in zip(places, rows[:-1], strict=False):
        axes.plot([row.stop, row.stop], [place, place + 1], color=INK, linewidth=0.6, alpha=0.5)
    axes.set_yticks(list(places), [_short(row.label, 24 if width == WIDTH else 60) for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(
        min(0.0, *(min(row.start, row.stop) for row in rows)),
        (1.32 if width == WIDTH else 1.14) * furthest,
    )
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.tick_params(axis="x", labelsize=8)
    return canvas


def _short(label: str, length: int) -> str:
    return label if len(label) <= length else label[: length - 1] + "\u2026"
