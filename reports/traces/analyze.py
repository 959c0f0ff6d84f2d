"""Files into one analysis: every rank reduced in a process of its own, then merged."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

import msgspec

from reports.traces.discover import trace_files
from reports.traces.loader import Trace, load
from reports.traces.memory_files import RankMemory, is_memory_file, read_memory_files
from reports.traces.merge import check_distinct, merge
from reports.traces.problems import TraceError
from reports.traces.reduce import reduce_trace, summarise
from reports.traces.summary import Failure, RankSummary, TraceSummary

Analysis = TraceSummary


def analyze(
    paths: Iterable[Path | str],
    *,
    num_workers: int | None = None,
    cache: bool = False,
    link_bytes_per_second: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Analysis:
    """Analyse files, or folders of files, one per rank; memory snapshots may be among them.

    A file that cannot be read becomes a failure with its reason and leaves the others alone.
    `progress` is called with (files done, files). Raises TraceError when a path does not exist or
    when two files have the same rank.
    """
    files, memory, failures = _read_memory(paths)
    if num_workers is None:
        num_workers = os.cpu_count() or 1
    summaries: list[RankSummary] = []
    for done, result in enumerate(_reduced(files, min(num_workers, len(files)), cache), 1):
        if isinstance(result, Failure):
            failures.append(result)
        else:
            summaries.append(result)
        if progress is not None:
            progress(done, len(files))
    merged = _merged(summaries, failures, link_bytes_per_second)
    return msgspec.structs.replace(merged, memory=memory)


def analyze_and_keep(
    paths: Iterable[Path | str], *, progress: Callable[[int, int], None] | None = None
) -> tuple[Analysis, list[Trace]]:
    """Analyse files as `analyze` does, in this process, and keep what was loaded of each rank.

    For analyses that need all columns of all ranks at once, so that no file is read twice.
    """
    files, memory, failures = _read_memory(paths)
    traces: list[Trace] = []
    summaries: list[RankSummary] = []
    for done, file in enumerate(files, 1):
        try:
            trace = load(file)
            summaries.append(summarise(trace))
            traces.append(trace)
        except (TraceError, OSError, MemoryError) as error:
            failures.append(Failure(path=str(file), reason=str(error) or type(error).__name__))
        if progress is not None:
            progress(done, len(files))
    merged = _merged(summaries, failures, None)
    kept = {summary.path for summary in merged.ranks}
    traces = sorted((t for t in traces if t.path in kept), key=lambda trace: trace.rank)
    return msgspec.structs.replace(merged, memory=memory), traces


def _read_memory(
    paths: Iterable[Path | str],
) -> tuple[list[Path], list[RankMemory], list[Failure]]:
    """The traces among the files, and what the files about memory alone say."""
    given = trace_files(paths)
    files = [file for file in given if not is_memory_file(file)]
    memory, unread = read_memory_files(file for file in given if file not in files)
    failures = [Failure(path=path, reason=reason) for path, reason in unread.items()]
    return files, memory, failures


def _merged(
    summaries: list[RankSummary], failures: list[Failure], link_bytes_per_second: float | None
) -> Analysis:
    summaries, unknown = _without_rankless(summaries)
    check_distinct([(one.rank, one.path) for one in summaries])
    failures = sorted([*failures, *unknown], key=lambda failure: failure.path)
    return merge(summaries, failures, link_bytes_per_second=link_bytes_per_second)


def _without_rankless(
    summaries: list[RankSummary],
) -> tuple[list[RankSummary], list[Failure]]:
    """A file without a rank is rank 0 when it is alone; beside others it has no place."""
    if len(summaries) < 2:
        return summaries, []
    reason = "its rank is neither in the file nor in its name; name it rank<N>.json.gz"
    unknown = [Failure(path=one.path, reason=reason) for one in summaries if not one.rank_is_known]
    return [one for one in summaries if one.rank_is_known], unknown


def _reduced(
    files: Sequence[Path], num_workers: int, cache: bool
) -> Iterator[RankSummary | Failure]:
    if num_workers <= 1:
        for file in files:
            yield _decoded(_reduce(file, cache))
        return
    with ProcessPoolExecutor(num_workers, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(_reduce, file, cache): file for file in files}
        for future in as_completed(futures):
            yield _result(future, futures[future])


def _result(future: Future[bytes], file: Path) -> RankSummary | Failure:
    try:
        return _decoded(future.result())
    except BrokenProcessPool:
        reason = "the process that read it was killed, most likely for memory; use fewer workers"
        return Failure(path=str(file), reason=reason)


def _reduce(file: Path, cache: bool) -> bytes:
    """Summary or failure of one file, encoded so that a process returns few bytes."""
    try:
        return msgspec.msgpack.encode([reduce_trace(file, cache=cache)])
    except (TraceError, OSError, MemoryError) as error:
        reason = str(error) or type(error).__name__
        return msgspec.msgpack.encode(Failure(path=str(file), reason=reason))


def _decoded(data: bytes) -> RankSummary | Failure:
    if data[:1] == b"\x91":
        return msgspec.msgpack.decode(data, type=tuple[RankSummary])[0]
    return msgspec.msgpack.decode(data, type=Failure)
