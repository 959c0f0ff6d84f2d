"""Memory in a trace: its course by kind as a picture, and what is alive at the peak."""

from reports.blocks import Block, Cell, Column, Figure, Figures, Table
from reports.numbers import number, quantity, short_bytes
from reports.svg import INK, SERIES, WIDTH, Canvas
from reports.traces.memory import KINDS, DeviceMemory

WIDE, HEIGHT = 7.8, 2.6
MOST_ALIVE = 15


def memory_blocks(memory: DeviceMemory, rank: int, key: str) -> list[Block]:
    """Return the course of memory, its kinds at the peak, and the allocations alive then."""
    return [Figures(figures=[course_figure(memory, rank, key)]), kinds_table(memory), alive(memory)]


def course_figure(memory: DeviceMemory, rank: int, key: str) -> Figure:
    """Return memory over time, stacked by kind, with the allocator's total as a line."""
    peak = quantity(memory.peak_bytes / 2**30, "GiB")
    kinds = sorted(memory.peak_by_kind.items(), key=lambda pair: -pair[1])
    words = ", ".join(
        f"{kind.replace('_', ' ')} {short_bytes(size)}" for kind, size in kinds if size
    )
    return Figure(
        title="Memory over the trace",
        svg=_draw(memory, WIDTH).svg(f"{key}-narrow"),
        wide_svg=_draw(memory, WIDE).svg(f"{key}-wide"),
        caption=f"MiB alive on {memory.device} of rank {rank}, the rank with the highest peak. "
        "Source: memory events of the trace; the kind follows from the phases that make and free.",
        words=f"peak {peak}: {words}",
    )


def _draw(memory: DeviceMemory, width: float) -> Canvas:
    canvas = Canvas(xlabel="ms", ylabel="MiB", height=HEIGHT, width=width)
    start = memory.points[0].time_ns
    times = [(point.time_ns - start) / 1e6 for point in memory.points]
    shown = [
        index for index, kind in enumerate(KINDS) if any(p.by_kind[index] for p in memory.points)
    ]
    shown.sort(key=lambda index: -memory.peak_by_kind[KINDS[index]])
    stacks = [[max(p.by_kind[index], 0) / 2**20 for p in memory.points] for index in shown[:5]]
    labels = [KINDS[index].replace("_", " ") for index in shown[:5]]
    colors = SERIES[: len(stacks)]
    canvas.axes.stackplot(times, stacks, labels=labels, colors=colors, step="post")
    total = [point.total_bytes / 2**20 for point in memory.points]
    canvas.axes.plot(times, total, color=INK, linewidth=0.8, drawstyle="steps-post", label="total")
    canvas.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderpad=0, fontsize=8)
    canvas.axes.set_xlim(times[0], times[-1] or 1.0)
    canvas.axes.set_ylim(0, None)
    return canvas


def kinds_table(memory: DeviceMemory) -> Table:
    """Return what is alive at the peak by kind."""
    rows = [
        [
            Cell(text=kind.replace("_", " ")),
            Cell(text=short_bytes(size), value=size),
            Cell(text=number(100 * size / memory.peak_bytes, 3) if memory.peak_bytes else "0"),
        ]
        for kind, size in memory.peak_by_kind.items()
    ]
    columns = [
        Column(title="Kind"),
        Column(title="At the peak", is_numeric=True),
        Column(title="Share", unit="%", is_numeric=True),
    ]
    caption = "Alive at the peak; before: what was there when the trace began"
    return Table(columns=columns, rows=rows, caption=caption)


def alive(memory: DeviceMemory) -> Table:
    """Return the largest allocations that are alive at the peak."""
    columns = [
        Column(title="Allocated by"),
        Column(title="Kind"),
        Column(title="Phase"),
        Column(title="Number", is_numeric=True),
        Column(title="Size", is_numeric=True),
    ]
    rows = [
        [
            Cell(text=one.operator),
            Cell(text=one.kind.replace("_", " ")),
            Cell(text=one.phase),
            Cell(text=f"{one.count:,}", value=one.count),
            Cell(text=short_bytes(one.bytes), value=one.bytes),
        ]
        for one in memory.alive[:MOST_ALIVE]
    ]
    caption = f"The largest of {memory.num_allocations:,} allocations that live at the peak"
    return Table(columns=columns, rows=rows, caption=caption, folded=True)
