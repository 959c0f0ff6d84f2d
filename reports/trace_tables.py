"""Tables over all ranks of a trace, in ms per step and rank, each adding up to what it divides."""

from collections import defaultdict
from collections.abc import Mapping

from msgspec import Struct

from reports.account import collective_name
from reports.traces.allocations import DeviceMemory
from reports.traces.classify import COMMUNICATION, COPY
from reports.traces.summary import RankSummary, TraceSummary, overall

Key = tuple[str, str]


class RankDevice(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory of one device and whose it is; rank: None where the file does not say."""

    rank: int | None
    memory: DeviceMemory


UNLINKED = "work of no operator, less copies and what runs side by side"


def num_rank_steps(traces: TraceSummary) -> int:
    """Return the number of profiled steps of all ranks; a trace without steps is one."""
    return sum(max(summary.num_steps, 1) for summary in traces.ranks)


def busy_ns(summary: RankSummary) -> int:
    """Return the time in which a rank computes, alone or beside communication."""
    row = overall(summary)
    return row.compute_ns + row.overlapped_communication_ns


def class_ms(traces: TraceSummary) -> dict[Key, float]:
    """Return computation by (class, phase); adds up to the time in which a rank computes."""
    sums: dict[Key, int] = defaultdict(int)
    for summary in traces.ranks:
        rows = [row for row in summary.classes if row.name not in (COMMUNICATION, COPY)]
        for row in rows:
            sums[row.name, row.phase] += row.exclusive_ns
        sums[COPY, ""] += busy_ns(summary) - sum(row.exclusive_ns for row in rows)
    return _per_step(sums, traces)


def operator_ms(traces: TraceSummary) -> tuple[dict[Key, float], dict[Key, float]]:
    """Return (class or phase, operator): computation that it does, and how often per step.

    On a CPU the operators' own time; with a device that of the kernels that they launch, so that
    the names are the same on all hardware. Adds up to the time in which a rank computes.
    """
    sums: dict[Key, int] = defaultdict(int)
    counts: dict[Key, int] = defaultdict(int)
    for summary in traces.ranks:
        if summary.lane == "operators":
            for name in summary.names:
                if name.class_name != COMMUNICATION:
                    sums[name.class_name, name.name] += name.exclusive_ns
                    counts[name.class_name, name.name] += name.count
        else:
            for one in summary.operators:
                if one.device_ns:
                    sums[one.phase, one.name] += one.device_ns
                    counts[one.phase, one.name] += one.count
    total = sum(busy_ns(summary) for summary in traces.ranks)
    rest = total - sum(sums.values())
    if rest:
        sums["", UNLINKED] = rest
    return _per_step(sums, traces), _per_step(counts, traces, 1.0)


def kernel_ms(traces: TraceSummary) -> tuple[dict[Key, float], dict[Key, float]]:
    """Return (class, kernel): device time without what an earlier kernel covers, and counts."""
    sums: dict[Key, int] = defaultdict(int)
    counts: dict[Key, int] = defaultdict(int)
    for summary in traces.ranks:
        if summary.lane == "device":
            for name in summary.names:
                sums[name.class_name, name.name] += name.exclusive_ns
                counts[name.class_name, name.name] += name.count
    return _per_step(sums, traces), _per_step(counts, traces, 1.0)


def module_ms(traces: TraceSummary) -> tuple[dict[Key, float], dict[Key, float]]:
    """Return (phase, kind of module): computation inside, and calls; empty without modules."""
    sums: dict[Key, int] = defaultdict(int)
    counts: dict[Key, int] = defaultdict(int)
    for summary in traces.ranks:
        for row in summary.modules:
            sums[row.phase, row.module] += row.exclusive_ns
            counts[row.phase, row.module] += row.count
    return _per_step(sums, traces), _per_step(counts, traces, 1.0)


def collective_ms(traces: TraceSummary) -> tuple[dict[Key, float], dict[Key, float]]:
    """Return ("", collective): exposed communication with all waiting in it, and counts."""
    sums: dict[Key, int] = defaultdict(int)
    counts: dict[Key, int] = defaultdict(int)
    for summary in traces.ranks:
        for row in summary.classes:
            if row.name == COMMUNICATION:
                sums["", collective_name(row.kind, row.axis)] += row.exposed_ns
                counts["", collective_name(row.kind, row.axis)] += row.count
    return _per_step(sums, traces), _per_step(counts, traces, 1.0)


def memory_by_source(traces: TraceSummary) -> list[RankDevice]:
    """Return, for each source of memory, the rank with the highest peak; traces come first.

    A device counts before the host.
    """
    found = [RankDevice(rank=rank.rank, memory=one) for rank in traces.ranks for one in rank.memory]
    found += memory_of_files(traces)
    sources: dict[str, list[RankDevice]] = defaultdict(list)
    for one in found:
        sources[one.memory.source].append(one)
    return [
        max(group, key=lambda one: (one.memory.device != "cpu", one.memory.peak_bytes))
        for group in sources.values()
    ]


def memory_of_files(traces: TraceSummary) -> list[RankDevice]:
    """Return each device of each file that is about memory alone, in the order of ranks."""
    return [
        RankDevice(rank=file.rank, memory=one) for file in traces.memory for one in file.devices
    ]


def main_memory(traces: TraceSummary) -> RankDevice | None:
    """Return the memory that stands for all: of the first source; None if there is none."""
    return next(iter(memory_by_source(traces)), None)


def memory_mib(memory: DeviceMemory) -> dict[Key, float]:
    """Return what is alive at the peak by kind, in MiB; adds up to the peak."""
    known = {("", kind): size / 2**20 for kind, size in memory.peak_by_kind.items() if size}
    rest = memory.peak_bytes / 2**20 - sum(known.values())
    return known if abs(rest) < 1e-6 else {**known, ("", "not told apart"): rest}


def _per_step(sums: Mapping[Key, int], traces: TraceSummary, unit: float = 1e6) -> dict[Key, float]:
    steps = num_rank_steps(traces)
    return {key: value / steps / unit for key, value in sums.items() if value}
