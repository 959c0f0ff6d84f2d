"""A Kineto trace file into columns: streamed, exact to the nanosecond, tolerant of real faults."""

from pathlib import Path

from msgspec import Struct

from reports.traces.builder import Builder
from reports.traces.columns import CollectiveArgs, Events, MemoryEvents
from reports.traces.metadata import Metadata, parse_metadata, rank_of_name
from reports.traces.pieces import PieceReader
from reports.traces.problems import Problems, TraceError, Warning
from reports.traces.repair import decode_piece
from reports.traces.sanity import repaired


class Trace(Struct, frozen=True, kw_only=True):
    """One rank's trace.

    names, identifiers (of processes and threads), dims: the tables that the columns number.
    labels: names of threads and processes; a process has no thread id.
    num_bytes: size of the JSON text.
    """

    path: str
    rank: int
    rank_is_known: bool
    metadata: Metadata
    events: Events
    memory: MemoryEvents
    collectives: tuple[CollectiveArgs, ...]
    names: tuple[str, ...]
    identifiers: tuple[str, ...]
    dims: tuple[str, ...]
    labels: dict[str, str]
    num_bytes: int
    warnings: tuple[Warning, ...]


def load(path: Path | str) -> Trace:
    """Read a trace, plain or gzipped, whole or cut short.

    Raises TraceError when the file holds no list of events at all, OSError when it cannot be read.
    """
    path = Path(path)
    problems = Problems(str(path))
    reader = PieceReader(path)
    builder = Builder(problems)
    for piece in reader.pieces():
        events, leftover = decode_piece(piece, problems, is_last=reader.is_last)
        reader.give_back(leftover.unfinished, leftover.tail)
        builder.add(events, piece)
    if not reader.has_events:
        raise TraceError(_no_events(path, reader.num_bytes))
    problems.add("truncated", int(reader.truncated))
    metadata = parse_metadata(reader.header, reader.tail, problems)
    return _trace(path, builder, metadata, reader.num_bytes, problems)


def _no_events(path: Path, num_bytes: int) -> str:
    what = "the file is empty" if num_bytes == 0 else "it has no traceEvents list"
    return f"{path}: not a Kineto trace: {what} ({num_bytes} bytes read); export the trace again"


def _trace(
    path: Path, builder: Builder, metadata: Metadata, num_bytes: int, problems: Problems
) -> Trace:
    events, memory = builder.finish(metadata.base_ns)
    if not len(events):
        raise TraceError(f"{path}: no event with a duration in it; profile with a longer window")
    events = repaired(events, metadata.base_ns, problems)
    rank = metadata.rank if metadata.rank is not None else rank_of_name(path)
    problems.add("unknown_rank", int(rank is None))
    return Trace(
        path=str(path),
        rank=0 if rank is None else rank,
        rank_is_known=rank is not None,
        metadata=metadata,
        events=events,
        memory=memory,
        collectives=tuple(builder.collectives),
        names=tuple(builder.names),
        identifiers=tuple(str(identifier) for identifier in builder.identifiers),
        dims=tuple(dims.decode("utf-8", errors="replace") for dims in builder.dims),
        labels={f"{pid}/{_blank(tid)}": name for (pid, tid), name in builder.labels.items()},
        num_bytes=num_bytes,
        warnings=problems.warnings(),
    )


def _blank(value: object) -> str:
    return "" if value is None else str(value)
