"""Plots of a run: time of each step, memory of each rank, loss over the steps."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from matplotlib.ticker import MaxNLocator

from bench.metrics import METRICS
from reports.blocks import Figure
from reports.load import Run, Step
from reports.numbers import fitting_unit, number, quantity
from reports.svg import HEIGHT, INK, SERIES, Canvas
from reports.tables import MEMORY_METRICS

MAX_MARKERS = 60
MAX_BARS = 16
SOURCE = "Source: steps.jsonl of this run."


def figures(run: Run, key: str) -> list[Figure]:
    """Return the figures that the run has data for; ``key`` is unique in the page."""
    drawn = (
        step_time_figure(run, f"{key}-time"),
        memory_figure(run, f"{key}-memory"),
        loss_figure(run, f"{key}-loss"),
    )
    return [figure for figure in drawn if figure is not None]


def step_time_figure(run: Run, key: str) -> Figure | None:
    """Return the slowest rank's time of every measured step, with the median."""
    steps = run.measured_steps()
    if not steps:
        return None
    times = [step.step_time for step in steps]
    size, unit = fitting_unit(times, "s")
    values = [time / size for time in times]
    middle = median(values)
    canvas = Canvas(xlabel="step", ylabel=f"step time ({unit})")
    axes = canvas.axes
    axes.plot([step.step for step in steps], values, label="slowest rank", **line(0, len(values)))
    label = f"median {number(middle)} {unit}"
    axes.axhline(middle, color=INK, linewidth=1, linestyle=(0, (4, 3)), alpha=0.6, label=label)
    axes.set_ylim(0, 1.15 * max(values))
    whole_steps(canvas)
    above(canvas, 2)
    low, high = number(min(values)), number(max(values))
    return Figure(
        title="Step time",
        svg=canvas.svg(key),
        caption=f"Time of the slowest rank in {unit}, each measured step. {left_out(run)}{SOURCE}",
        words=f"median {number(middle)} {unit}, from {low} to {high} {unit} "
        f"over {len(values)} measured steps",
    )


def left_out(run: Run) -> str:
    """Return a sentence about the steps that are not in the picture, if there are any."""
    warmup = [step.step_time for step in run.steps if step.phase == "warmup"]
    num_others = len(run.steps) - len(run.training_steps())
    parts = []
    if warmup:
        longest = quantity(max(warmup), "s")
        parts.append(f"{len(warmup)} of warm-up, the longest {longest}")
    if num_others:
        parts.append(f"{num_others} under counters or profiler")
    return f"Steps not shown: {'; '.join(parts)}. " if parts else ""


def memory_figure(run: Run, key: str) -> Figure | None:
    """Return the peak memory of every rank, of the kinds that the record has for each rank."""
    metrics = run.record.metrics
    kinds = [name for name in MEMORY_METRICS if name in metrics and metrics[name].samples]
    if not kinds:
        return None
    size, unit = fitting_unit([max(metrics[name].samples) for name in kinds], "GiB")
    series = {
        METRICS[name].title: [sample / size for sample in metrics[name].samples] for name in kinds
    }
    num_ranks = max(len(values) for values in series.values())
    canvas = memory_bars(series, unit) if num_ranks <= MAX_BARS else memory_lines(series, unit)
    sources = " ".join(f"{METRICS[name].title}: {of_a_rank(name)}." for name in kinds)
    words = "; ".join(
        f"{title.lower()} {number(min(values))} to {number(max(values))} {unit}"
        for title, values in series.items()
    )
    return Figure(
        title="Memory by rank",
        svg=canvas.svg(key),
        caption=f"Peak of each rank in {unit}. {sources}",
        words=f"{words} over {num_ranks} rank{'s' if num_ranks > 1 else ''}",
    )


def of_a_rank(name: str) -> str:
    """Return how a memory metric is counted before the maximum over ranks is taken."""
    return METRICS[name].formula.removesuffix(", maximum over ranks")


def memory_bars(series: dict[str, list[float]], unit: str) -> Canvas:
    """Return horizontal bars, a group a rank, for few ranks."""
    num_ranks = max(len(values) for values in series.values())
    height = max(HEIGHT, 0.9 + 0.2 * num_ranks * len(series))
    canvas = Canvas(xlabel=f"peak memory ({unit})", ylabel="", height=height)
    axes = canvas.axes
    axes.grid(visible=False)
    thickness = 0.8 / len(series)
    for index, (title, values) in enumerate(series.items()):
        offsets = [rank + thickness * (index - (len(series) - 1) / 2) for rank in range(num_ranks)]
        bars = axes.barh(offsets, values, height=0.85 * thickness, color=SERIES[index % 3])
        bars.set_label(title)
        axes.bar_label(bars, labels=[number(value, 3) for value in values], padding=3, color=INK)
    axes.set_yticks(range(num_ranks), [f"rank {rank}" for rank in range(num_ranks)])
    axes.invert_yaxis()
    axes.margins(x=0.14)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    above(canvas, len(series))
    return canvas


def memory_lines(series: dict[str, list[float]], unit: str) -> Canvas:
    """Return a line over the ranks, for many."""
    canvas = Canvas(xlabel="rank", ylabel=f"peak memory ({unit})")
    for index, (title, values) in enumerate(series.items()):
        canvas.axes.plot(values, label=title, color=SERIES[index % 3], drawstyle="steps-mid")
    canvas.axes.set_ylim(0, 1.1 * max(max(values) for values in series.values()))
    whole_steps(canvas)
    above(canvas, len(series))
    return canvas


def loss_figure(run: Run, key: str) -> Figure | None:
    """Return the loss of every step, and that of the multi-token prediction if there is one."""
    steps = run.steps
    if len(steps) < 2:
        return None
    canvas = Canvas(xlabel="step", ylabel="loss (nats per token)")
    canvas.axes.plot(
        [step.step for step in steps],
        [step.loss for step in steps],
        label="next token",
        **line(0, len(steps)),
    )
    mtp = [(step.step, step.mtp_loss) for step in steps if step.mtp_loss is not None]
    if mtp:
        canvas.axes.plot(
            [step for step, _ in mtp],
            [loss for _, loss in mtp],
            label="multi-token prediction",
            **line(1, len(mtp)),
        )
    whole_steps(canvas)
    above(canvas, 2 if mtp else 1)
    return Figure(
        title="Loss",
        svg=canvas.svg(key),
        caption="Cross-entropy in nats per token, mean over all targets of the global batch, "
        f"all steps from the first. {SOURCE}",
        words=loss_words(steps, [loss for _, loss in mtp]),
    )


def loss_words(steps: Sequence[Step], mtp_losses: Sequence[float]) -> str:
    """Return how the losses moved."""
    first, last = steps[0], steps[-1]
    words = f"{number(first.loss)} at step {first.step} to {number(last.loss)} at step {last.step}"
    if mtp_losses:
        moved = f"{number(mtp_losses[0])} to {number(mtp_losses[-1])}"
        words += f"; multi-token prediction {moved}"
    return words


def line(series: int, num_points: int) -> dict[str, Any]:
    """Return how a line is drawn: with its points as long as they can be told apart."""
    marker = "o" if num_points <= MAX_MARKERS else ""
    return {"color": SERIES[series], "marker": marker, "markersize": 3.5, "linewidth": 1.5}


def whole_steps(canvas: Canvas) -> None:
    """Put ticks at whole numbers only."""
    canvas.axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))


def above(canvas: Canvas, num_series: int) -> None:
    """Put a legend above the axes if there is more than one series to tell apart."""
    if num_series > 1:
        canvas.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderpad=0)
