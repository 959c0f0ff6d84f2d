"""What is compared: each path on the command line is a side with one or several workloads."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

from bench.errors import UsageError
from bench.record import RunRecord
from reports.load import Run, find_records, read_steps, record_files
from reports.run_traces import Progress, read_traces, run_traces
from reports.traces.summary import TraceSummary

TRACES_ALONE = ""
MAX_LABEL = 40


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One workload of a side: its repeated runs and the traces of one of them.

    ``runs`` is empty for traces without a record; ``failed`` are the runs that did not succeed.
    ``traced`` is the run that the traces are of.
    """

    workload: str
    runs: list[Run] = []
    failed: list[RunRecord] = []
    traces: TraceSummary | None = None
    traced: Run | None = None

    @property
    def step_times(self) -> list[float]:
        """The median step time of each run, in s."""
        metrics = [run.record.metrics.get("step_time") for run in self.runs]
        return [metric.value for metric in metrics if metric and metric.value is not None]

    @property
    def record(self) -> RunRecord | None:
        """The record to read settings and metrics from: the traced one, else the middle one."""
        if self.traced is not None:
            return self.traced.record
        return middle(self.runs).record if self.runs else None


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One path: its letter, what it is called, and its workloads by name."""

    letter: str
    label: str
    entries: dict[str, Entry]

    @property
    def short_name(self) -> str:
        """The letter, with the label if that is short enough for a sentence."""
        return f"{self.letter} ({self.label})" if len(self.label) <= MAX_LABEL else self.letter


def read_sides(paths: Sequence[Path], *, progress: Progress | None = None) -> list[Side]:
    """Read run folders, folders of runs, and traces without records.

    Raises:
        UsageError: if a path has neither, or what it has cannot be read.
    """
    sides = []
    for number, path in enumerate(paths):
        entries = _entries(path, progress)
        sides.append(
            Side(
                letter=chr(ord("A") + number) if number < 26 else f"#{number + 1}",
                label=_label(path, paths),
                entries={entry.workload: entry for entry in entries},
            )
        )
    return sides


def _label(path: Path, paths: Sequence[Path]) -> str:
    """Return the last parts of a path, as many as tell it from the others."""
    parts = path.resolve().parts
    others = [other.resolve().parts for other in paths if other.resolve() != path.resolve()]
    for length in range(1, len(parts)):
        if all(other[-length:] != parts[-length:] for other in others):
            return "/".join(parts[-length:])
    return str(path)


def _entries(path: Path, progress: Progress | None) -> list[Entry]:
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder")
    is_record = path.is_dir() or path.name == "run.json"
    if not is_record or not record_files(path):
        traces = read_traces([path], progress=progress)
        if not traces.ranks:
            raise UsageError(f"{path} has memory alone, no trace: it can be analysed, not compared")
        return [Entry(workload=TRACES_ALONE, traces=traces)]
    by_workload: dict[str, list[Run]] = {}
    for folder, record in find_records([path]):
        run = Run(record=record, folder=folder, steps=read_steps(folder))
        by_workload.setdefault(record.workload.name, []).append(run)
    return [_entry(name, runs) for name, runs in by_workload.items()]


def _entry(workload: str, runs: Sequence[Run]) -> Entry:
    good = [run for run in runs if run.record.status == "ok"]
    failed = [run.record for run in runs if run.record.status != "ok"]
    traces, traced = None, None
    for run in sorted(good, key=lambda run: abs(_time(run) - _time(middle(good)))):
        traces = run_traces(run.folder) if run.folder else None
        if traces is not None:
            traced = run
            break
    return Entry(workload=workload, runs=good, failed=failed, traces=traces, traced=traced)


def middle(runs: Sequence[Run]) -> Run:
    """Return the run whose step time is closest to the median of all; the first without times."""
    wanted = median(_time(run) for run in runs)
    return min(runs, key=lambda run: abs(_time(run) - wanted))


def _time(run: Run) -> float:
    metric = run.record.metrics.get("step_time")
    return metric.value if metric and metric.value is not None else 0.0
