"""Parts of a comparison: settings first, then the step time, then the change by cause."""

from collections.abc import Callable, Sequence

from reports.blocks import Block, Cell, Column, Figures, Part, Table, Text, Tile, Tiles, Tone
from reports.change_tables import ABSENT, changes_table, percent_cell
from reports.changes import Changes
from reports.comparison import Comparison
from reports.numbers import fitting_unit, number, quantity
from reports.record_changes import MetricChange, StepChange
from reports.waterfall_plot import change_figure

ComparePart = tuple[str, Callable[[Comparison, str], Sequence[Block]]]


def letters(comparison: Comparison) -> tuple[str, str]:
    """Return the letters of the two sides: what stands before the colon."""
    return comparison.before.partition(":")[0], comparison.after.partition(":")[0]


def picture(comparison: Comparison, key: str) -> list[Block]:
    """Return the step time's change as a waterfall."""
    if comparison.items is None:
        return []
    labels = (comparison.before, comparison.after)
    return [Figures(figures=[change_figure(comparison.items, *labels, f"{key}-change")])]


def tiles(comparison: Comparison, key: str) -> list[Block]:
    """Return the step times and the change."""
    step = comparison.step
    if step is None:
        return []
    kind = step.basis
    before, after = letters(comparison)
    return [
        Tiles(
            tiles=[
                _step_tile(f"Step time of {before}", step.before, step.before_runs, kind),
                _step_tile(f"Step time of {after}", step.after, step.after_runs, kind),
                Tile(
                    label="Change",
                    unit="%",
                    cell=percent_cell(step.percent),
                ),
                Tile(label="Runs", unit="", cell=_runs_cell(step)),
            ]
        )
    ]


def _runs_cell(step: StepChange) -> Cell:
    text = f"{len(step.before_runs)} and {len(step.after_runs)}"
    if not step.before_runs:
        return Cell(text="traces alone", note="not tested")
    note = "not tested" if step.p_value is None else f"p = {step.p_value:.3g}"
    return Cell(text=text, note=note)


def _step_tile(label: str, seconds: float, runs: Sequence[float], kind: str) -> Tile:
    size, unit = fitting_unit([seconds], "s")
    note = kind
    if len(runs) > 1:
        note = f"{kind}, {number(min(runs) / size)} to {number(max(runs) / size)} over runs"
    return Tile(label=label, unit=unit, cell=Cell(text=number(seconds / size), note=note))


def settings(comparison: Comparison, key: str) -> list[Block]:
    """Return what is configured differently."""
    if not comparison.settings:
        text = "No setting that both sides state differs."
        return [Text(text=text)]
    columns = [Column(title=title) for title in ("Setting", "Of", *letters(comparison))]
    rows = [
        [
            Cell(text=one.name),
            Cell(text=one.group),
            Cell(text=one.before) if one.before else ABSENT,
            Cell(text=one.after) if one.after else ABSENT,
        ]
        for one in comparison.settings
    ]
    asked = [one for one in comparison.settings if one.group not in ("environment", "hardware")]
    caption = (
        f"{len(comparison.settings)} settings differ, {len(asked)} of them asked for; the others "
        "are where it ran."
    )
    return [Table(columns=columns, rows=rows, caption=caption)]


def step_time(comparison: Comparison, key: str) -> list[Block]:
    """Return the spread of the step times and what it proves."""
    step = comparison.step
    if step is None:
        return [Text(text="Neither side has a step time.", tone="muted")]
    blocks: list[Block] = [Text(text=step.test)]
    before, after = letters(comparison)
    spreads = [_spread(before, step.before_steps), _spread(after, step.after_steps)]
    text = " ".join(spread for spread in spreads if spread)
    return [*blocks, Text(text=text, tone="muted")] if text else blocks


def _spread(letter: str, samples: Sequence[float]) -> str:
    if len(samples) < 2:
        return ""
    low, high = quantity(min(samples), "s"), quantity(max(samples), "s")
    return f"Steps of {letter}: {low} to {high} over {len(samples)} measured steps of one run."


def causes(comparison: Comparison, key: str) -> list[Block]:
    """Return the change by cause, and one level deeper; both add up to the step time's."""
    if comparison.causes is None or comparison.items is None:
        text = "The change cannot be split by cause: not both sides have traces."
        return [Text(text=text, tone="warning")]
    return [
        changes_table(
            comparison.causes,
            "Cause",
            "",
            "The change of the step time by cause",
            letters(comparison),
        ),
        changes_table(
            comparison.items,
            "Of which",
            "Cause",
            "The same by class, collective and late rank",
            letters(comparison),
        ),
    ]


def details(comparison: Comparison, key: str) -> list[Block]:
    """Return the change by class, operator, kernel and collective."""
    titles: tuple[tuple[Changes | None, str, str, str], ...] = (
        (comparison.classes, "Class", "Phase", "Computation by class and phase"),
        (comparison.operators, "Operator", "Part of", "Computation by operator"),
        (comparison.kernels, "Kernel", "Class", "Device time by kernel"),
        (comparison.collectives, "Collective", "", "Exposed communication by collective"),
    )
    return [
        changes_table(table, name, group, caption, letters(comparison), swapped=name == "Class")
        for table, name, group, caption in titles
        if table is not None and table.rows
    ]


def memory(comparison: Comparison, key: str) -> list[Block]:
    """Return the change of the memory's peak by kind."""
    if comparison.memory is None:
        return [Text(text="Not both sides have memory events in their traces.", tone="muted")]
    return [
        changes_table(
            comparison.memory, "Kind", "", "Memory at the peak, by kind", letters(comparison)
        )
    ]


def counters(comparison: Comparison, key: str) -> list[Block]:
    """Return the operators that are called more or less often."""
    if comparison.counters is None:
        return []
    if not comparison.counters.rows:
        return [Text(text="Every operator is called as often per step in both.")]
    return [
        changes_table(
            comparison.counters,
            "Operator",
            "",
            "Exact calls per step",
            letters(comparison),
            folded=True,
        )
    ]


def metrics(comparison: Comparison, key: str) -> list[Block]:
    """Return every metric of both sides."""
    if not comparison.metrics:
        return []
    columns = [
        Column(title="Metric"),
        Column(title="Unit"),
        *(Column(title=letter, is_numeric=True) for letter in letters(comparison)),
        Column(title="Change", unit="%", is_numeric=True),
        Column(title="How it is counted"),
    ]
    rows = [_metric_row(metric) for metric in comparison.metrics]
    caption = "Metrics of both; a change within the metric's own tolerance has no colour."
    return [Table(columns=columns, rows=rows, caption=caption)]


def _metric_row(metric: MetricChange) -> list[Cell]:
    tone: Tone = "plain"
    if metric.better is not None:
        tone = "good" if metric.better else "bad"
    invalid = Cell(text="invalid", tone="warning")
    values = [
        invalid if value is None else Cell(text=number(value), value=value)
        for value in (metric.before, metric.after)
    ]
    return [
        Cell(text=metric.title, note=metric.name),
        Cell(text="" if metric.unit == "1" else metric.unit),
        *values,
        percent_cell(metric.percent, tone),
        Cell(text=metric.formula, note=metric.why_not),
    ]


COMPARE_PARTS: tuple[ComparePart, ...] = (
    ("What differs", settings),
    ("Step time", step_time),
    ("The change by cause", causes),
    ("Class, operator and collective", details),
    ("Memory", memory),
    ("Metrics", metrics),
    ("Exact counters", counters),
)


def compare_parts(comparison: Comparison, key: str) -> list[Part]:
    """Return the parts that have something to say, with what limits the comparison last."""
    made = [Part(title=title, blocks=list(make(comparison, key))) for title, make in COMPARE_PARTS]
    notes: list[Block] = [Text(text=note, tone="muted") for note in comparison.notes]
    return [part for part in [*made, Part(title="Notes", blocks=notes)] if part.blocks]
