"""The account: where the time of a step goes, by cause, adding up to the step to the nanosecond.

All lines are sums over ranks and profiled steps in whole nanoseconds; ``per_step_ms`` divides.
Work that only one rank does, and for which the others wait, is that rank's line: ``late rank``.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

from msgspec import Struct

from reports.traces.breakdown import StepBreakdown
from reports.traces.classify import COMMUNICATION, COPY, OTHER
from reports.traces.summary import RankSummary, TraceSummary, overall
from reports.traces.waiting import exposed_waits

COMPUTE = "computation"
RECOMPUTE = "recomputation"
TRANSFER = "exposed communication"
LATE = "late rank"
COPIES = "exposed copies"
HOST = "host-bound idle"
CALLS = "idle inside collective calls"
BUBBLE = "pipeline bubble"
IDLE = "other idle"
CAUSES = (COMPUTE, RECOMPUTE, TRANSFER, LATE, COPIES, HOST, CALLS, BUBBLE, IDLE)

# What a rank may be late for. Its communication and its waits are consequences, not causes.
_OWN = (COMPUTE, RECOMPUTE, HOST, IDLE)
_IDLE_PARTS = {
    HOST: "idle_host_ns",
    CALLS: "idle_collective_ns",
    BUBBLE: "idle_bubble_ns",
    IDLE: "idle_other_ns",
}

Key = tuple[str, str]


class Line(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time of one cause and item: a class, a collective and its axis, a rank; ns by rank.

    ``why`` of a late rank: what it does longer than the others, ns (its part of the line).
    """

    cause: str
    item: str
    ns: int
    by_rank: dict[int, int]
    why: dict[str, int] = {}


class Account(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All lines of some ranks and steps. ``num_rank_steps``: profiled steps of all ranks."""

    lines: list[Line]
    total_ns: int
    num_ranks: int
    num_rank_steps: int

    def per_step_ms(self, ns: int) -> float:
        """Return a sum as ms per step, mean over ranks."""
        return ns / self.num_rank_steps / 1e6


def account(traces: TraceSummary) -> Account:
    """Return the account of all ranks together; there must be at least one."""
    assert traces.ranks, "no rank to account for"
    own = {summary.rank: rank_lines(summary) for summary in traces.ranks}
    late = _move_waits(own, traces) if len(own) > 1 else {}
    why = _move_excess(own, late, traces)
    keys = {key: None for lines in own.values() for key in lines}
    lines = [_line(key, own, why) for key in keys]
    lines = sorted((line for line in lines if line.ns), key=lambda line: -line.ns)
    total = sum(overall(summary).duration_ns for summary in traces.ranks)
    assert sum(line.ns for line in lines) == total, "the lines add up to the steps"
    return Account(
        lines=lines,
        total_ns=total,
        num_ranks=len(own),
        num_rank_steps=sum(max(summary.num_steps, 1) for summary in traces.ranks),
    )


def rank_lines(summary: RankSummary) -> dict[Key, int]:
    """Return one rank's time in ns by cause and item; adds up to its window."""
    row = overall(summary)
    lines: dict[Key, int] = defaultdict(int)
    for key, ns in _work(summary, row).items():
        lines[key] += ns
    lines[COPIES, "memory copies"] = row.copies_ns
    for cause, part in _IDLE_PARTS.items():
        lines[cause, ""] = getattr(row, part)
    assert sum(lines.values()) == row.duration_ns, (summary.rank, row, lines)
    return lines


def _work(summary: RankSummary, row: StepBreakdown) -> dict[Key, int]:
    """Return computation by class and exposed communication by collective."""
    lines: dict[Key, int] = defaultdict(int)
    for one in summary.classes:
        if one.name == COMMUNICATION:
            lines[TRANSFER, collective_name(one.kind, one.axis)] += one.exposed_ns
        elif one.name != COPY:
            cause = RECOMPUTE if one.phase == "recompute" else COMPUTE
            lines[cause, one.name] += one.exclusive_ns
    # Copies are operators on a CPU and have a lane of their own on a device.
    busy = row.compute_ns + row.overlapped_communication_ns
    lines[COMPUTE, COPY] += busy - sum(ns for key, ns in lines.items() if key[0] != TRANSFER)
    exposed = sum(ns for key, ns in lines.items() if key[0] == TRANSFER)
    lines[TRANSFER, "not told apart"] += row.exposed_communication_ns - exposed
    return lines


def collective_name(kind: str, axis: str) -> str:
    """Return how a collective is called in tables: ``all_gather over dp_shard``."""
    return kind if axis in ("", "unknown") else f"{kind} over {axis}"


def rank_name(rank: int) -> str:
    """Return the item of a late rank."""
    return f"rank {rank}"


def _move_waits(own: dict[int, dict[Key, int]], traces: TraceSummary) -> dict[int, int]:
    """Move waiting in collectives to the line of the rank it is for; return the sum for each."""
    late: dict[int, int] = defaultdict(int)
    for wait in exposed_waits(traces):
        lines = own[wait.rank]
        source = (TRANSFER, collective_name(wait.kind, wait.axis))
        moved = min(wait.wait_ns, lines[source])
        lines[source] -= moved
        lines[LATE, rank_name(wait.late_rank)] += moved
        late[wait.late_rank] += moved
    return late


def _move_excess(
    own: dict[int, dict[Key, int]], late: Mapping[int, int], traces: TraceSummary
) -> dict[int, dict[str, int]]:
    """Move what a late rank does longer than the others to its own line.

    No more than the others wait for it, each on average: the rest delays nobody.
    """
    excess = {rank: _excess(own, rank) for rank in late}
    why: dict[int, dict[str, int]] = {}
    for rank, waited in late.items():
        longer = sum(excess[rank].values())
        bound = min(longer, waited // (len(own) - 1))
        why[rank] = {}
        for key, ns in excess[rank].items():
            moved = ns * bound // longer
            own[rank][key] -= moved
            own[rank][LATE, rank_name(rank)] += moved
            why[rank][key[1] or key[0]] = why[rank].get(key[1] or key[0], 0) + moved
    return why


def _excess(own: Mapping[int, Mapping[Key, int]], rank: int) -> dict[Key, int]:
    """Return by how much a rank's own work exceeds the median of the other ranks'."""
    others = [lines for other, lines in own.items() if other != rank]
    found = {}
    for key, ns in own[rank].items():
        if key[0] in _OWN:
            more = ns - round(median(lines.get(key, 0) for lines in others))
            if more > 0:
                found[key] = more
    return found


def _line(
    key: Key, own: Mapping[int, Mapping[Key, int]], why: Mapping[int, Mapping[str, int]]
) -> Line:
    by_rank = {rank: lines[key] for rank, lines in own.items() if lines.get(key)}
    reasons: dict[str, int] = {}
    if key[0] == LATE:
        reasons = dict(why.get(int(key[1].removeprefix("rank ")), {}))
    ordered = sorted(((name, ns) for name, ns in reasons.items() if ns), key=lambda pair: -pair[1])
    return Line(
        cause=key[0], item=key[1], ns=sum(by_rank.values()), by_rank=by_rank, why=dict(ordered)
    )


def item_title(cause: str, item: str) -> str:
    """Return how a line is called beside others: its item, with its cause where that is unclear."""
    name = item.replace("_", " ") if cause in (COMPUTE, RECOMPUTE) else item
    if not item or cause == COPIES:
        return cause
    if cause == COMPUTE:
        return "operators of no class" if item == OTHER else name
    return {RECOMPUTE: f"recomputed {name}", LATE: f"{name} late"}.get(cause, name)


def by_cause(lines: Sequence[Line]) -> dict[str, int]:
    """Return the sum of each cause that has a line, in the order of CAUSES."""
    sums: dict[str, int] = defaultdict(int)
    for line in lines:
        sums[line.cause] += line.ns
    return {cause: sums[cause] for cause in CAUSES if cause in sums}
