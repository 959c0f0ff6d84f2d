"""Columns of a trace as a Parquet file beside it, used as long as the trace does not change."""

import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Struct

from reports.traces.columns import CollectiveArgs, Events, MemoryEvents
from reports.traces.loader import Trace, load
from reports.traces.metadata import Metadata
from reports.traces.problems import Problems, Warning

VERSION = 3
SUFFIX = ".columns.parquet"
_KEY = b"trace"
_SAMPLE_BYTES = 1 << 16


class _Rest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything of a trace that is no column of events."""

    version: int
    stamp: str
    rank: int
    rank_is_known: bool
    metadata: Metadata
    memory: dict[str, list[int]]
    collectives: tuple[CollectiveArgs, ...]
    names: tuple[str, ...]
    identifiers: tuple[str, ...]
    dims: tuple[str, ...]
    labels: dict[str, str]
    num_bytes: int
    warnings: tuple[Warning, ...]


def cache_path(path: Path) -> Path:
    """Where the cache of a trace lies."""
    return path.with_name(path.name + SUFFIX)


def load_cached(path: Path) -> Trace:
    """Load a trace from its cache, or from the file, which then gets a cache."""
    stamp = _stamp(path)
    cached = _read(path, stamp)
    if cached is not None:
        return cached
    trace = load(path)
    try:
        _write(trace, path, stamp)
    except OSError:
        problems = Problems(str(path))
        problems.add("cache")
        return msgspec.structs.replace(trace, warnings=(*trace.warnings, *problems.warnings()))
    return trace


def _stamp(path: Path) -> str:
    """Changes whenever the file does: size, time of change, and a hash of both its ends."""
    status = path.stat()
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        digest.update(file.read(_SAMPLE_BYTES))
        file.seek(max(0, status.st_size - _SAMPLE_BYTES))
        digest.update(file.read(_SAMPLE_BYTES))
    return f"{status.st_size} {status.st_mtime_ns} {digest.hexdigest()}"


def _read(path: Path, stamp: str) -> Trace | None:
    """The cached trace; None if there is no cache, or an old, foreign or damaged one."""
    try:
        table = pq.read_table(cache_path(path))
        rest = msgspec.json.decode((table.schema.metadata or {})[_KEY], type=_Rest)
    except (OSError, KeyError, pa.ArrowException, msgspec.DecodeError):
        return None
    if rest.version != VERSION or rest.stamp != stamp:
        return None
    columns: dict[str, Any] = {
        name: table.column(name).to_numpy() for name in Events.__struct_fields__
    }
    memory: dict[str, Any] = {
        name: np.array(values, dtype=np.int64) for name, values in rest.memory.items()
    }
    memory["thread"] = memory["thread"].astype(np.int32)
    fields = {
        name: getattr(rest, name) for name in _Rest.__struct_fields__ if name in _SHARED_FIELDS
    }
    return Trace(path=str(path), events=Events(**columns), memory=MemoryEvents(**memory), **fields)


_SHARED_FIELDS = frozenset(Trace.__struct_fields__) - {"memory"}


def _write(trace: Trace, path: Path, stamp: str) -> None:
    memory = {name: getattr(trace.memory, name).tolist() for name in MemoryEvents.__struct_fields__}
    shared = {
        name: getattr(trace, name) for name in _Rest.__struct_fields__ if name in _SHARED_FIELDS
    }
    rest = _Rest(version=VERSION, stamp=stamp, memory=memory, **shared)
    columns = {name: getattr(trace.events, name) for name in Events.__struct_fields__}
    table = pa.table(columns).replace_schema_metadata({_KEY: msgspec.json.encode(rest)})
    target = cache_path(path)
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        pq.write_table(table, temporary, compression="zstd")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
