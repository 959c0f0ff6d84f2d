"""The traces of a run: its ranks' own summaries, or the trace files where those are newer."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bench.errors import UsageError
from bench.hardware import find_accelerator
from reports.traces.analyze import analyze
from reports.traces.discover import trace_files
from reports.traces.loader import load
from reports.traces.memory_files import is_memory_file, read_memory_files
from reports.traces.merge import merge
from reports.traces.problems import TraceError
from reports.traces.summary import SCHEMA, Failure, RankSummary, TraceSummary

if TYPE_CHECKING:  # HTA is slow to import, and few ask for it
    from reports.traces.hta_run import HtaTable

TRACES_FOLDER = "traces"
MEMORY_FOLDER = "memory"
SUMMARY_SUFFIX = ".summary.json"

Progress = Callable[[int, int], None]


def summary_path(trace: Path) -> Path:
    """Return where the summary of a trace lies: ``rank3.summary.json`` beside ``rank3.json.gz``."""
    return trace.with_name(trace.name.removesuffix(".gz").removesuffix(".json") + SUMMARY_SUFFIX)


def read_traces(
    paths: Sequence[Path], *, num_workers: int | None = None, progress: Progress | None = None
) -> TraceSummary:
    """Return the analysis of trace files, or of folders of them, one file a rank.

    Raises:
        UsageError: if a path does not exist, nothing in it is a trace, two files have one rank,
            or not one file can be analysed.
    """
    try:
        files = trace_files(paths)
        known = [written_summary(file) for file in files]
        ready = [summary for summary in known if summary is not None]
        if len(ready) == len(files):
            return merge(ready, link_bytes_per_second=link_speed(ready))
        traces = analyze(files, num_workers=num_workers, progress=progress)
        speed = link_speed(traces.ranks)
        if speed is not None:
            merged = merge(traces.ranks, traces.failures, link_bytes_per_second=speed)
            traces = msgspec.structs.replace(merged, memory=traces.memory)
    except TraceError as error:
        raise UsageError(str(error)) from error
    if not traces.ranks and not traces.memory:
        reasons = "; ".join(failure.reason for failure in traces.failures[:3])
        raise UsageError(f"no file could be analysed: {reasons}")
    return traces


def run_traces(run_folder: Path) -> TraceSummary | None:
    """Return the analysis of a run's traces; None if it has none.

    Raises:
        UsageError: if it has some and they cannot be analysed.
    """
    folder = run_folder / TRACES_FOLDER
    if not folder.is_dir() or not any(folder.glob("*.json*")):
        return None
    return with_memory(read_traces([folder], num_workers=1), run_folder)


def with_memory(traces: TraceSummary, run_folder: Path) -> TraceSummary:
    """Return the analysis with what the run's own tracker and snapshots say about memory."""
    folder = run_folder / MEMORY_FOLDER
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    memory, unread = read_memory_files(file for file in files if is_memory_file(file))
    failures = [Failure(path=path, reason=reason) for path, reason in unread.items()]
    return msgspec.structs.replace(
        traces, memory=[*traces.memory, *memory], failures=[*traces.failures, *failures]
    )


def run_hta_tables(traces: TraceSummary) -> "list[HtaTable]":
    """Return what HolisticTraceAnalysis makes of the same traces, on our columns."""
    from reports.traces.hta_run import run_hta

    return run_hta([load(summary.path) for summary in traces.ranks])


def written_summary(trace: Path) -> RankSummary | None:
    """Return the summary that a rank wrote of its trace; None if there is none, or an old one."""
    path = summary_path(trace)
    if not path.exists() or path.stat().st_mtime_ns < trace.stat().st_mtime_ns:
        return None
    try:
        summary = msgspec.json.decode(path.read_bytes(), type=RankSummary)
    except msgspec.MsgspecError:
        return None
    return msgspec.structs.replace(summary, path=str(trace)) if summary.schema == SCHEMA else None


def link_speed(ranks: Sequence[RankSummary]) -> float | None:
    """Return bytes/s of the fast fabric that all ranks are within; None if that is not known."""
    devices = {device for summary in ranks for device in summary.devices[:1]}
    if len(devices) != 1:
        return None
    try:
        accelerator = find_accelerator(devices.pop())
    except LookupError:
        return None
    size = max((summary.world_size or len(ranks) for summary in ranks), default=0)
    if accelerator.scale_up_gb_per_s is None or size > (accelerator.scale_up_devices or 0):
        return None
    return accelerator.scale_up_gb_per_s * 1e9
