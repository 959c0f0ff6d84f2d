"""What records say about a change: step time with its spread and test, metrics, exact counters."""

from statistics import median

from msgspec import Struct

from bench.metrics import METRICS
from bench.record import RunRecord
from reports.account import Account
from reports.changes import Changes, changes, percent
from reports.permutation import permutation_p, statement
from reports.sides import Entry

NO_SAMPLE = (
    "A prediction or a published figure is no sample: the difference is how far it is from the "
    "other side, and there is nothing to test."
)


class StepChange(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Step time in s: ``before`` and ``after`` are medians over run medians, listed beside them.

    ``basis``: whether measured, predicted or the profiled step of a trace. ``test``: how much
    the runs prove, in a sentence.
    """

    before: float
    after: float
    before_runs: list[float]
    after_runs: list[float]
    before_steps: list[float]
    after_steps: list[float]
    percent: float | None
    p_value: float | None
    basis: str
    test: str


class MetricChange(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A metric of both sides. ``better``: None if it has no direction or did not change."""

    name: str
    title: str
    unit: str
    before: float | None
    after: float | None
    percent: float | None
    better: bool | None
    within_tolerance: bool
    formula: str
    why_not: str = ""


def step_change(
    one: Entry, two: Entry, accounts: tuple[Account, Account] | None
) -> StepChange | None:
    """Return the change of the measured step time, or of the traced step where one has none."""
    if one.step_times and two.step_times:
        records = [record for record in (one.record, two.record) if record is not None]
        kinds = list(dict.fromkeys(record.kind for record in records))
        sampled = all(kind in ("measured", "imported") for kind in kinds)
        before, after = one.step_times, two.step_times
        return StepChange(
            before=median(before),
            after=median(after),
            before_runs=before,
            after_runs=after,
            before_steps=_samples(one.record),
            after_steps=_samples(two.record),
            percent=percent(median(before), median(after)),
            p_value=permutation_p(before, after) if sampled and len(before + after) > 2 else None,
            basis=" against ".join(kinds),
            test=statement(before, after) if sampled else NO_SAMPLE,
        )
    if accounts is None:
        return None
    times = [books.per_step_ms(books.total_ns) / 1e3 for books in accounts]
    return StepChange(
        before=times[0],
        after=times[1],
        before_runs=[],
        after_runs=[],
        before_steps=[],
        after_steps=[],
        percent=percent(*times),
        p_value=None,
        basis="profiled",
        test="Steps under the profiler, one job each: the difference is shown but not tested.",
    )


def _samples(record: RunRecord | None) -> list[float]:
    metric = record.metrics.get("step_time") if record else None
    return list(metric.samples) if metric else []


def metric_changes(one: RunRecord | None, two: RunRecord | None) -> list[MetricChange]:
    """Return every metric that both records have, in the order of the table of metrics."""
    if one is None or two is None:
        return []
    return [
        _metric_change(name, one, two)
        for name in METRICS
        if name in one.metrics and name in two.metrics
    ]


def _metric_change(name: str, one: RunRecord, two: RunRecord) -> MetricChange:
    metric, before, after = METRICS[name], one.metrics[name], two.metrics[name]
    change = percent(before.value, after.value)
    within = change is None or abs(change) <= 100 * metric.tolerance
    better = None
    if change and not within and metric.direction != "none":
        better = (change < 0) == (metric.direction == "lower")
    return MetricChange(
        name=name,
        title=metric.title,
        unit=metric.unit,
        before=before.value,
        after=after.value,
        percent=change,
        better=better,
        within_tolerance=within,
        formula=metric.formula,
        why_not=before.invalid or after.invalid or "",
    )


def counter_changes(one: RunRecord | None, two: RunRecord | None) -> Changes | None:
    """Return calls per step by operator, exact; None if a record has not counted them."""
    if one is None or two is None:
        return None
    keyed = [_calls(record) for record in (one, two)]
    if not keyed[0] or not keyed[1]:
        return None
    different = [key for key in {**keyed[0], **keyed[1]} if keyed[0].get(key) != keyed[1].get(key)]
    sides = [{key: part[key] for key in different if key in part} for part in keyed]
    return changes(*sides, unit="calls", source="operators whose number of calls changed")


def _calls(record: RunRecord) -> dict[tuple[str, str], float]:
    counted = record.counters.get("by_operator") or {}
    return {("", str(name)): float(count) for name, count in counted.items()}
