"""The traces of a run: its ranks' own summaries, or the trace files where those are newer."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bench.errors import UsageError
from bench.hardware import find_accelerator
from reports.traces.analyze import analyze, analyze_and_keep
from reports.traces.discover import trace_files
from reports.traces.memory_files import is_memory_file, read_memory_files
from reports.traces.merge import merge
from reports.traces.problems import TraceError
from reports.traces.summary import SCHEMA, Failure, RankSummary, TraceSummary

if TYPE_CHECKING:  # HTA is slow to import, and few ask for it
    from reports.traces.hta_run import HtaResult

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
        return _checked(analyze(files, num_workers=num_workers, progress=progress))
    except TraceError as error:
        raise UsageError(str(error)) from error


def read_traces_with_hta(
    paths: Sequence[Path], *, progress: Progress | None = None
) -> "tuple[TraceSummary, HtaResult | None]":
    """Return the analysis as ``read_traces`` does, and HTA's on the columns that were loaded.

    Each file is read once. There is no result of HTA's where the files are about memory alone.

    Raises:
        UsageError: as ``read_traces``.
    """
    from reports.traces.hta_run import run_hta

    try:
        summary, loaded = analyze_and_keep(paths, progress=progress)
        traces = _checked(summary)
    except TraceError as error:
        raise UsageError(str(error)) from error
    return traces, run_hta(loaded, path_ranks(traces)) if loaded else None


def export_hta_tables(result: "HtaResult | None", output: Path) -> list[Path]:
    """Write HTA's tables as CSV into a folder beside the report, and return the files.

    Raises:
        UsageError: if one cannot be written.
    """
    if result is None:
        return []
    from reports.traces.hta_run import export_hta

    folder = output / "hta" if output.is_dir() else output.with_name(f"{output.stem}-hta")
    try:
        return export_hta(result, folder)
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror}") from error


def path_ranks(traces: TraceSummary) -> list[int]:
    """Return whose critical paths to look at: the first rank's, and that of the latest rank."""
    late = [one.rank for one in traces.cross.stragglers[:1] if one.cause != "none"]
    return [*(summary.rank for summary in traces.ranks[:1]), *late]


def _checked(traces: TraceSummary) -> TraceSummary:
    """Return the analysis with the speed of the link, if there is anything in it."""
    if not traces.ranks and not traces.memory:
        reasons = "; ".join(failure.reason for failure in traces.failures[:3])
        raise UsageError(f"no file could be analysed: {reasons}")
    speed = link_speed(traces.ranks)
    if speed is None:
        return traces
    merged = merge(traces.ranks, traces.failures, link_bytes_per_second=speed)
    return msgspec.structs.replace(merged, memory=traces.memory)


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
