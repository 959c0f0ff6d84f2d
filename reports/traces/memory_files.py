"""Files that say only something about memory: snapshots, torch's timelines, our own tracker's."""

import gzip
import zlib
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec import Struct

from reports.traces.allocations import DeviceMemory
from reports.traces.memory_snapshot import read_snapshot
from reports.traces.memory_timeline import timeline_memory
from reports.traces.metadata import rank_of_name
from reports.traces.problems import TraceError

SCHEMA = 1
TRACKED_SUFFIX = ".memory.json"  # what our own tracker writes
_PICKLES = (".pickle", ".pkl")
_GZIP_MAGIC = b"\x1f\x8b"


class RankMemory(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory of one rank as one file has it; rank: None where neither file nor name says it."""

    schema: int = SCHEMA
    path: str
    rank: int | None
    devices: list[DeviceMemory]


def is_memory_file(path: Path) -> bool:
    """Whether a file is about memory alone; others are traces."""
    if path.name.endswith((*_PICKLES, TRACKED_SUFFIX)):
        return True
    return path.name.endswith((".json", ".json.gz")) and _begins_with_two_lists(path)


def _begins_with_two_lists(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            is_gzip = file.read(2) == _GZIP_MAGIC
        with gzip.open(path) if is_gzip else path.open("rb") as file:
            return b"".join(file.read(64).split()).startswith(b"[[")
    except (OSError, EOFError, zlib.error):
        return False


def read_memory_files(paths: Iterable[Path]) -> tuple[list[RankMemory], dict[str, str]]:
    """All that can be read, in order of rank, and the reasons by path where one cannot."""
    found, failures = [], {}
    for path in paths:
        try:
            found.append(read_memory_file(path))
        except (TraceError, OSError, MemoryError) as error:
            failures[str(path)] = str(error) or type(error).__name__
    found.sort(key=lambda one: (one.rank is None, one.rank or 0))
    return found, failures


def read_memory_file(path: Path) -> RankMemory:
    """Read one such file.

    Raises TraceError when it is none of them, OSError when it cannot be read.
    """
    if path.name.endswith(_PICKLES):
        return RankMemory(path=str(path), rank=rank_of_name(path), devices=read_snapshot(path))
    data = path.read_bytes()
    try:
        if path.name.endswith(TRACKED_SUFFIX):
            return _tracked(data, path)
        text = gzip.decompress(data) if data[:2] == _GZIP_MAGIC else data
        memory = timeline_memory(msgspec.json.decode(text, type=list))
    except (msgspec.MsgspecError, ValueError, TypeError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: not a memory timeline: {error}") from error
    return RankMemory(path=str(path), rank=rank_of_name(path), devices=[memory])


def _tracked(data: bytes, path: Path) -> RankMemory:
    memory = msgspec.json.decode(data, type=RankMemory)
    if memory.schema != SCHEMA:
        raise TraceError(f"{path}: memory of schema {memory.schema}, not {SCHEMA}; run it again")
    return msgspec.structs.replace(memory, path=str(path))
