"""Memory: its course by kind as a picture, and what is alive at the peak, from any source."""

from collections.abc import Sequence

from reports.blocks import Block, Cell, Column, Figure, Figures, Table, Text, Tile
from reports.numbers import number, quantity, short_bytes
from reports.svg import INK, SERIES, WIDTH, Canvas
from reports.trace_tables import RankDevice
from reports.traces.allocations import Alive, DeviceMemory

WIDE, HEIGHT = 7.8, 2.6
MOST_KINDS = 5
STANDING = ("before", "parameter", "optimizer_state")
LEAST_SHARE = 0.01  # %: smaller ones are not told in digits
MOST_ALIVE = 15
MOST_LARGEST = 10


def memory_blocks(one: RankDevice, key: str) -> list[Block]:
    """Return the course of memory, its kinds at the peak, and the allocations alive then."""
    memory = one.memory
    blocks: list[Block] = [Text(text=note, tone="muted") for note in memory.notes]
    if len(memory.points) > 1:
        blocks.append(Figures(figures=[course_figure(one, key)]))
    blocks.append(kinds_table(one))
    if memory.alive:
        blocks += [alive(memory), largest(memory)]
    else:
        text = f"Who allocated what is not in the source ({memory.source})."
        blocks.append(Text(text=text, tone="muted"))
    return blocks


def peak_tile(one: RankDevice) -> Tile:
    """Return the peak as a number to read first."""
    cell = Cell(text=quantity(one.memory.peak_bytes / 2**30, "GiB"), note=whose(one))
    return Tile(label="Peak memory", unit="", cell=cell)


def whose(one: RankDevice) -> str:
    """Return the device and the rank."""
    rank = "a rank that the file does not name" if one.rank is None else f"rank {one.rank}"
    return f"{one.memory.device} of {rank}"


def course_figure(one: RankDevice, key: str) -> Figure:
    """Return memory over time, stacked by kind, with the total as a line."""
    memory = one.memory
    peak = quantity(memory.peak_bytes / 2**30, "GiB")
    kinds = sorted(memory.peak_by_kind.items(), key=lambda pair: -pair[1])
    words = ", ".join(
        f"{kind.replace('_', ' ')} {short_bytes(size)}" for kind, size in kinds if size
    )
    axis = "ms" if memory.has_clock else "number of the allocation or free, the source has no times"
    return Figure(
        title=f"Memory over time: {memory.source}",
        svg=_draw(memory, WIDTH).svg(f"{key}-narrow"),
        wide_svg=_draw(memory, WIDE).svg(f"{key}-wide"),
        caption=f"MiB alive on {whose(one)}, the highest peak of all; over {axis}. "
        f"Source: {memory.source}.",
        words=f"peak {peak}: {words}",
    )


def _draw(memory: DeviceMemory, width: float) -> Canvas:
    canvas = Canvas(
        xlabel="ms" if memory.has_clock else "event", ylabel="MiB", height=HEIGHT, width=width
    )
    start = memory.points[0].time_ns
    scale = 1e6 if memory.has_clock else 1
    times = [(point.time_ns - start) / scale for point in memory.points]
    labels, stacks = _stacks(memory)
    canvas.axes.stackplot(times, stacks, labels=labels, colors=SERIES[: len(stacks)], step="post")
    total = [point.total_bytes / 2**20 for point in memory.points]
    canvas.axes.plot(times, total, color=INK, linewidth=0.8, drawstyle="steps-post", label="total")
    reserved = [(point.reserved_bytes or 0) / 2**20 for point in memory.points]
    if max(reserved) > 0:
        canvas.axes.plot(
            times, reserved, color=INK, linewidth=0.8, ls=":", drawstyle="steps-post",
            label="reserved",
        )  # fmt: skip
    canvas.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderpad=0, fontsize=8)
    canvas.axes.set_xlim(times[0], times[-1] or 1.0)
    canvas.axes.set_ylim(0, None)
    return canvas


def _stacks(memory: DeviceMemory) -> tuple[list[str], list[list[float]]]:
    """Return the kinds that are ever alive, what stands at the bottom, the smallest as one."""
    courses = {
        kind: [max(point.by_kind[place], 0) / 2**20 for point in memory.points]
        for place, kind in enumerate(memory.kinds)
    }
    shown = [kind for kind, course in courses.items() if any(course)]
    shown.sort(key=lambda kind: (kind not in STANDING, -memory.peak_by_kind[kind]))
    labels = [kind.replace("_", " ") for kind in shown]
    if len(shown) <= MOST_KINDS:
        return labels, [courses[kind] for kind in shown]
    first, rest = shown[: MOST_KINDS - 1], shown[MOST_KINDS - 1 :]
    together = [sum(values) for values in zip(*(courses[kind] for kind in rest), strict=True)]
    return [*labels[: MOST_KINDS - 1], "all others"], [*(courses[k] for k in first), together]


def kinds_table(one: RankDevice) -> Table:
    """Return what is alive at the peak by kind: those that the source can tell."""
    memory = one.memory
    rows = [_kind_row(kind, size, memory.peak_bytes) for kind, size in memory.peak_by_kind.items()]
    columns = [
        Column(title="Kind"),
        Column(title="At the peak", is_numeric=True),
        Column(title="Share", unit="%", is_numeric=True),
    ]
    total = Cell(text=short_bytes(memory.peak_bytes), value=memory.peak_bytes)
    caption = (
        f"Alive at the peak, {whose(one)}; before: what was there when the record began. "
        f"Source: {memory.source}."
    )
    footer = [Cell(text="peak"), total, Cell(text="100")]
    return Table(columns=columns, rows=rows, footer=footer, caption=caption)


def _kind_row(kind: str, size: int, peak: int) -> list[Cell]:
    percent = 100 * size / peak if peak else 0.0
    share = number(percent, 3) if percent >= LEAST_SHARE or not size else f"under {LEAST_SHARE}"
    return [
        Cell(text=kind.replace("_", " ")),
        Cell(text=short_bytes(size), value=size),
        Cell(text=share, value=percent),
    ]


def alive(memory: DeviceMemory) -> Table:
    """Return what is alive at the peak by who allocated it, the most bytes first."""
    found = "allocations" if memory.num_allocations is None else f"{memory.num_allocations:,}"
    caption = f"Who made what lives at the peak, of {found} recorded allocations"
    return _table(memory.alive[:MOST_ALIVE], caption, with_counts=True)


def largest(memory: DeviceMemory) -> Table:
    """Return the largest single blocks at the peak."""
    return _table(memory.largest[:MOST_LARGEST], "The largest single blocks at the peak")


def _table(rows: Sequence[Alive], caption: str, *, with_counts: bool = False) -> Table:
    with_modules = any(row.module for row in rows)
    columns = [
        Column(title="Allocated by"),
        *([Column(title="Module")] if with_modules else []),
        Column(title="Kind"),
        Column(title="Phase"),
        *([Column(title="Number", is_numeric=True)] if with_counts else []),
        Column(title="Size", is_numeric=True),
        *([Column(title="Largest", is_numeric=True)] if with_counts else []),
    ]
    cells = []
    for row in rows:
        module = [Cell(text=row.module or "none", tone="plain" if row.module else "muted")]
        count = [Cell(text=f"{row.count:,}", value=row.count)]
        most = [Cell(text=short_bytes(row.largest_bytes), value=row.largest_bytes)]
        cells.append(
            [
                Cell(text=row.operator),
                *(module if with_modules else []),
                Cell(text=row.kind.replace("_", " ")),
                Cell(text=row.phase),
                *(count if with_counts else []),
                Cell(text=short_bytes(row.bytes), value=row.bytes),
                *(most if with_counts else []),
            ]
        )
    return Table(columns=columns, rows=cells, caption=caption, folded=True)
