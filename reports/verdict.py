"""The verdict: the first sentence of a comparison, which names the largest cause with evidence."""

from msgspec import Struct

from reports.account import (
    BUBBLE,
    CALLS,
    COMPUTE,
    COPIES,
    HOST,
    IDLE,
    LATE,
    RECOMPUTE,
    TRANSFER,
    Account,
    Line,
)
from reports.changes import Change, Changes
from reports.numbers import number, quantity, whole
from reports.permutation import ALPHA

SAME_PERCENT = 1.0


class Facts(Struct, frozen=True, kw_only=True):
    """What the verdict is made of; step times in s."""

    before: str
    after: str
    step: tuple[float, float] | None
    basis: str
    accounts: tuple[Account, Account] | None
    items: Changes | None
    operators: Changes | None
    collectives: Changes | None
    num_runs: tuple[int, int]
    p_value: float | None


def verdict(facts: Facts) -> str:
    """Return one or two sentences: how much the step changed, and its largest cause."""
    if facts.step is None:
        return "Neither side has a step time: only single metrics can be compared."
    before, after = facts.step
    change = 100 * (after - before) / before
    times = f"{quantity(before, 's')} to {quantity(after, 's')} per {_step_name(facts.basis)}"
    if abs(change) < SAME_PERCENT:
        opening = f"{facts.after} is as fast as {facts.before} within {SAME_PERCENT:g} %, {times}"
    else:
        word = "slower" if change > 0 else "faster"
        opening = f"{facts.after} is {number(abs(change), 3)} % {word} than {facts.before}, {times}"
    return f"{opening}{_caution(facts)}; {cause_sentence(facts)}"


def _step_name(basis: str) -> str:
    return "profiled step" if basis == "profiled" else "step"


def _caution(facts: Facts) -> str:
    if facts.p_value is not None:
        return "" if facts.p_value <= ALPHA else f", not beyond chance (p = {facts.p_value:.3g})"
    measured = facts.basis == "measured"
    return ", one run each" if measured and facts.num_runs == (1, 1) else ""


def cause_sentence(facts: Facts) -> str:
    """Return the largest cause in the direction of the change, with its evidence."""
    top = largest(facts.items)
    if top is None or facts.accounts is None or facts.items is None:
        return "its cause cannot be told: not both sides have traces."
    signed = _signed(top.change)
    share = f" of {_signed(facts.items.change)} ms in all" if top.share_percent else ""
    line = _line(facts.accounts[1 if top.change > 0 else 0], top)
    return f"the largest cause is {_cause(top, line)}: {signed} ms per step{share}" + (
        f"{_evidence(facts, top, line)}."
    )


def largest(items: Changes | None) -> Change | None:
    """Return the largest change in the direction of the whole; the profiler's is no cause."""
    if items is None:
        return None
    known = {COMPUTE, RECOMPUTE, TRANSFER, LATE, COPIES, HOST, CALLS, BUBBLE, IDLE}
    rows = [row for row in items.rows if row.group in known and row.change]
    along = [row for row in rows if (row.change > 0) == (items.change > 0)]
    return max(along or rows, key=lambda row: abs(row.change), default=None)


def _signed(ms: float) -> str:
    return f"{'+' if ms > 0 else '-'}{number(abs(ms), 3)}"


def _line(books: Account, row: Change) -> Line | None:
    found = (line for line in books.lines if (line.cause, line.item) == (row.group, row.name))
    return next(found, None)


def _cause(row: Change, line: Line | None) -> str:
    """Return what a row is, as the subject of a sentence."""
    if row.group == COMPUTE:
        return f"the operator class {row.name}"
    if row.group == RECOMPUTE:
        return f"recomputation of class {row.name}"
    if row.group == TRANSFER:
        return f"the collective {row.name}"
    if row.group == LATE:
        return f"{row.name}, which the others wait for" if line else row.name
    return {
        HOST: "the host, which leaves the device nothing to do",
        CALLS: "the host inside collective calls",
        BUBBLE: "the pipeline bubble",
        COPIES: "memory copies",
        IDLE: "idle time with work queued",
    }[row.group]


def _evidence(facts: Facts, row: Change, line: Line | None) -> str:
    """Return the operator, the collective's counts or the ranks behind a row."""
    if row.group in (COMPUTE, RECOMPUTE) and facts.operators is not None:
        return _operator_evidence(facts.operators, row)
    if row.group == TRANSFER and facts.collectives is not None:
        return _collective_evidence(facts.collectives, row)
    if line is None:
        return ""
    if row.group == LATE:
        return _late_evidence(facts, line)
    books = facts.accounts[1] if facts.accounts else None
    if books is None or len(line.by_rank) < 2:
        return ""
    rank = max(line.by_rank, key=lambda rank: line.by_rank[rank])
    return f"; most on rank {rank} ({number(line.by_rank[rank] / 1e6, 3)} ms in its trace)"


def _operator_evidence(operators: Changes, row: Change) -> str:
    own = [one for one in operators.rows if one.group == row.name] or [
        one for one in operators.rows if one.group
    ]
    along = [one for one in own if (one.change > 0) == (row.change > 0) and one.change]
    if not along:
        return ""
    top = max(along, key=lambda one: abs(one.change))
    return f"; most in {top.name} ({_signed(top.change)} ms{_calls(top)})"


def _calls(row: Change) -> str:
    if row.count_before is None or row.count_after is None:
        return f", {row.state}" if row.state != "both" else ""
    if row.count_before == row.count_after:
        return f", {whole(row.count_after)} calls as before"
    return f", {whole(row.count_before)} to {whole(row.count_after)} calls"


def _collective_evidence(collectives: Changes, row: Change) -> str:
    found = [one for one in collectives.rows if one.name == row.name]
    if not found:
        return ""
    return f" exposed beyond waiting for late ranks{_calls(found[0])} per step and rank"


def _late_evidence(facts: Facts, line: Line) -> str:
    if not line.why:
        return "; its own trace does not show why"
    what, ns = next(iter(line.why.items()))
    assert facts.accounts is not None
    num_steps = facts.accounts[1].num_rank_steps / facts.accounts[1].num_ranks
    kind = "" if what in (HOST, IDLE) else "class "
    return f"; it spends {number(ns / num_steps / 1e6, 3)} ms more than the others on {kind}{what}"
