"""The comparison of two sides on one workload: settings, step time, and the change by cause."""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from bench.errors import NotComparableError
from reports.account import Account, account
from reports.changes import Changes, changes
from reports.record_changes import (
    MetricChange,
    StepChange,
    counter_changes,
    metric_changes,
    step_change,
)
from reports.setting_differences import Setting, setting_differences
from reports.sides import Entry, Side
from reports.trace_tables import (
    class_ms,
    collective_ms,
    kernel_ms,
    main_memory,
    memory_mib,
    operator_ms,
)
from reports.traces.summary import TraceSummary
from reports.verdict import Facts, verdict

PROFILER = "not in the traces"
MOST_NAMES = 30


class Comparison(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that is said about two sides; a table is None where a side has no data for it.

    ``causes`` and ``items`` (a class, a collective, a rank) are two depths of one account and
    add up to the change of the step time; the other tables add up to their part of it.
    """

    verdict: str
    before: str
    after: str
    workload: str
    settings: list[Setting]
    step: StepChange | None
    metrics: list[MetricChange]
    causes: Changes | None
    items: Changes | None
    classes: Changes | None
    operators: Changes | None
    kernels: Changes | None
    collectives: Changes | None
    memory: Changes | None
    counters: Changes | None
    notes: list[str]


def compare(before: Side, after: Side, workload: str | None = None) -> Comparison:
    """Compare one workload of two sides.

    Raises:
        NotComparableError: if they share no workload, or no quantity of it.
    """
    one, two = entry_pair(before, after, workload)
    both_traced = one.traces is not None and two.traces is not None
    accounts = (_account(one), _account(two)) if both_traced else None
    step = step_change(one, two, accounts)
    metrics = metric_changes(one.record, two.record)
    if step is None and not any(m.before is not None and m.after is not None for m in metrics):
        raise NotComparableError(
            f"{before.label} and {after.label} have no quantity in common",
            hint="give runs that succeeded, or traces of both",
        )
    tables = _tables(one.traces, two.traces) if one.traces and two.traces else {}
    causes, items = _causes(accounts, step) if accounts and step else (None, None)
    facts = Facts(
        before=before.short_name,
        after=after.short_name,
        step=None if step is None else (step.before, step.after),
        basis=step.basis if step else "",
        accounts=accounts,
        items=items,
        operators=tables.get("operators"),
        collectives=tables.get("collectives"),
        num_runs=(len(one.runs), len(two.runs)),
        p_value=step.p_value if step else None,
    )
    return Comparison(
        verdict=verdict(facts),
        before=f"{before.letter}: {before.label}",
        after=f"{after.letter}: {after.label}",
        workload=one.workload or two.workload,
        settings=setting_differences(one, two),
        step=step,
        metrics=metrics,
        causes=causes,
        items=items,
        classes=tables.get("classes"),
        operators=tables.get("operators"),
        kernels=tables.get("kernels"),
        collectives=tables.get("collectives"),
        memory=_memory(one.traces, two.traces),
        counters=counter_changes(one.record, two.record),
        notes=_notes({before.letter: one, after.letter: two}),
    )


def entry_pair(before: Side, after: Side, workload: str | None) -> tuple[Entry, Entry]:
    """Return the entries of ``workload``, of the only common one, or of two different ones alone.

    Raises:
        NotComparableError: if there is no such pair, or the networks are of different families.
    """
    if workload is not None and workload in before.entries and workload in after.entries:
        return before.entries[workload], after.entries[workload]
    if len(before.entries) == len(after.entries) == 1:
        one, two = next(iter(before.entries.values())), next(iter(after.entries.values()))
        records = [entry.record for entry in (one, two) if entry.record is not None]
        families = {record.model.family for record in records if record.model.family}
        if len(families) < 2:
            return one, two
    raise NotComparableError(
        f"{before.label} has {_names(before)}, {after.label} has {_names(after)}",
        hint="compare runs of one workload, or of one family of networks",
    )


def _names(side: Side) -> str:
    return ", ".join(name or "traces without a record" for name in side.entries)


def _account(entry: Entry) -> Account:
    assert entry.traces is not None
    return account(entry.traces)


def _causes(accounts: tuple[Account, Account], step: StepChange) -> tuple[Changes, Changes]:
    """Return the account's change at two depths, with what the profiled steps do not show."""
    causes: list[dict[tuple[str, str], float]] = []
    items: list[dict[tuple[str, str], float]] = []
    for books, measured in zip(accounts, (step.before, step.after), strict=True):
        missing = 1e3 * measured - books.per_step_ms(books.total_ns)
        rest = {(PROFILER, ""): missing} if abs(missing) > 1e-9 else {}
        own = {(line.cause, line.item): books.per_step_ms(line.ns) for line in books.lines}
        items.append({**own, **rest})
        sums: dict[tuple[str, str], float] = {}
        for (cause, _), ms in items[-1].items():
            sums[cause, ""] = sums.get((cause, ""), 0.0) + ms
        causes.append(sums)
    source = "mean over ranks of the profiled steps, as an account that adds up to the step time"
    return changes(*causes, source=source), changes(*items, source=source)


def _tables(one: TraceSummary, two: TraceSummary) -> dict[str, Changes]:
    """Return the changes by class, operator, kernel and collective."""
    tables = {"classes": changes(class_ms(one), class_ms(two), source="time spent computing")}
    source = "time spent computing, by the operator that does it or launches it"
    tables["operators"] = _counted(operator_ms(one), operator_ms(two), source)
    if all(summary.lane == "device" for traces in (one, two) for summary in traces.ranks):
        source = "device time of kernels, names without template values and tile sizes"
        tables["kernels"] = _counted(kernel_ms(one), kernel_ms(two), source)
    source = "exposed communication, waiting for late ranks included"
    tables["collectives"] = _counted(collective_ms(one), collective_ms(two), source)
    return tables


Counted = tuple[dict[tuple[str, str], float], dict[tuple[str, str], float]]


def _counted(one: Counted, two: Counted, source: str) -> Changes:
    return changes(one[0], two[0], counts=(one[1], two[1]), source=source, most=MOST_NAMES)


def _memory(one: TraceSummary | None, two: TraceSummary | None) -> Changes | None:
    found = [main_memory(traces) if traces else None for traces in (one, two)]
    if found[0] is None or found[1] is None:
        return None
    ranks = " against ".join(f"rank {one.rank}" for one in found if one is not None)
    source = f"alive at the peak of the rank with the highest, {ranks}, by kind"
    sizes = [memory_mib(one.memory) for one in found if one is not None]
    return changes(*sizes, unit="MiB", source=source)


def _notes(sides: Mapping[str, Entry]) -> list[str]:
    """Return what limits the comparison."""
    notes = []
    for letter, entry in sides.items():
        if entry.failed:
            notes.append(f"{letter}: {len(entry.failed)} runs did not succeed and do not count.")
        if entry.traces is None:
            notes.append(f"{letter} has no traces, so the change cannot be split by cause.")
        elif entry.traced is not None and len(entry.runs) > 1:
            notes.append(f"{letter}: traces are of run {entry.traced.record.run_id}.")
    entries = sides.values()
    if all(entry.traces for entry in entries) and any(entry.runs for entry in entries):
        notes.append(
            "The profiler slows the step that it records; what that leaves between the traced "
            f"and the measured steps is the row {PROFILER!r}."
        )
    return notes


def pairs_of(sides: Sequence[Side]) -> list[tuple[Side, str | None]]:
    """Return what to compare with the first side: every later side in every common workload."""
    first, found = sides[0], list[tuple[Side, str | None]]()
    for side in sides[1:]:
        common = [name for name in first.entries if name in side.entries]
        found += [(side, name) for name in common] or [(side, None)]
    return found


def compare_all(sides: Sequence[Side]) -> tuple[list[Comparison], Mapping[str, str]]:
    """Compare every side with the first; return the comparisons, and why others are missing.

    Raises:
        NotComparableError: if there is not a single one.
    """
    done, reasons = [], {}
    for side, workload in pairs_of(sides):
        try:
            done.append(compare(sides[0], side, workload))
        except NotComparableError as error:
            reasons[side.label] = error.what
            last = error
    if not done:
        raise last
    return done, reasons
