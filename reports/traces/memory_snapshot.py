"""A snapshot of torch's CUDA allocator (`torch.cuda.memory._dump_snapshot`), read without torch.

Its history of allocations and frees gives the course; what is allocated when the snapshot was
taken gives, going backwards, what was there before the history began. Sizes are requested bytes,
as the history has them: the allocator rounds them up by up to 511 bytes, or more for large blocks.
"""

import pickle
from pathlib import Path
from typing import Any, Never

import numpy as np
from msgspec import Struct

from reports.traces.allocations import KIND, KINDS, DeviceMemory, Recorded, device_memory
from reports.traces.columns import NONE, Ints, Numbering
from reports.traces.phases import OTHER
from reports.traces.problems import TraceError
from reports.traces.snapshot_frames import label_of, phase_of

SOURCE = "snapshot of torch's CUDA allocator, requested bytes"
NO_HISTORY = (
    "The snapshot has no history: this is what was allocated when it was taken, which need not be "
    "the peak. Call torch.cuda.memory._record_memory_history() before the steps."
)
_DERIVED = ("before", "activation", "gradient", "optimizer_state", "temporary", "kept", "other")
_MADE, _FREED = "alloc", "free_requested"
_RESERVES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_BEFORE_LABEL = "made before the history"


_Plain = dict[str, Any]


class _Row(Struct, frozen=True, kw_only=True):
    """One allocation or free; frames are None for a block of which only its free is known.

    `frames` stays as the file has it: many rows share one list.
    """

    time_us: int | None = None
    address: int
    bytes: int
    frames: list[_Plain] | None = None
    kind: int = NONE


class _PlainUnpickler(pickle.Unpickler):
    """Loads builtin values only: a snapshot needs nothing else, and a pickle can run any code."""

    def find_class(self, module: str, name: str) -> Never:
        raise pickle.UnpicklingError(
            f"it refers to {module}.{name}, and a memory snapshot holds plain values only"
        )


def read_snapshot(path: Path) -> list[DeviceMemory]:
    """One entry for each device with memory in the snapshot.

    Raises TraceError when the file is no such snapshot, OSError when it cannot be read.
    """
    document = _load(path)
    try:
        devices = _devices(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise TraceError(f"{path}: not a snapshot of the CUDA allocator ({reason})") from error
    if not devices:
        raise TraceError(f"{path}: the snapshot holds no memory of any device")
    return sorted(devices, key=lambda one: -one.peak_bytes)


def _load(path: Path) -> _Plain:
    with path.open("rb") as file:
        try:
            document = _PlainUnpickler(file).load()
        # What a damaged pickle raises depends on the byte at which it is damaged.
        except Exception as error:
            if isinstance(error, OSError):
                raise
            raise TraceError(f"{path}: not a memory snapshot: {error}") from error
    if not isinstance(document, dict) or not {"segments", "device_traces"} <= document.keys():
        raise TraceError(f"{path}: not a memory snapshot: it has no segments and device_traces")
    return document


def _devices(document: _Plain) -> list[DeviceMemory]:
    histories = document["device_traces"]
    segments = document["segments"]
    numbers = {int(segment.get("device", 0)) for segment in segments}
    numbers |= {number for number, history in enumerate(histories) if history}
    names = [str(name) for name in document.get("categories", ())]
    found = []
    for number in sorted(numbers):
        history = histories[number] if number < len(histories) else []
        own = [segment for segment in segments if int(segment.get("device", 0)) == number]
        rows = [_row(entry, names) for entry in history if entry["action"] in (_MADE, _FREED)]
        before = _before(rows, own)
        if before or rows:
            found.append(_device(number, before, rows, (history, own)))
    return found


def _device(
    number: int, before: list[_Row], rows: list[_Row], raw: tuple[list[_Plain], list[_Plain]]
) -> DeviceMemory:
    """Memory of one device from its rows and its raw history and segments."""
    history, segments = raw
    has_clock = all(row.time_us is not None for row in rows)
    reserved = _reserved(history, segments)
    first = reserved[0] if reserved else _size_of(segments)
    notes = [_oom(entry) for entry in history if entry["action"] == "oom"]
    return device_memory(
        _recorded(before, rows, [first] * len(before) + reserved, has_clock=has_clock),
        device=f"device {number}",
        source=SOURCE,
        kinds=KINDS if any(row.kind != NONE for row in rows) else _DERIVED,
        has_clock=has_clock,
        notes=notes if rows else [NO_HISTORY, *notes],
    )


def _row(entry: _Plain, names: list[str]) -> _Row:
    size = int(entry["size"])
    category = entry.get("category")
    if isinstance(category, int):
        category = names[category] if 0 <= category < len(names) else "other"
    return _Row(
        time_us=entry.get("time_us"),
        address=int(entry["addr"]),
        bytes=size if entry["action"] == _MADE else -size,
        frames=entry.get("frames") or [],
        kind=NONE if category is None else KIND.get(category, KIND["other"]),
    )


def _before(rows: list[_Row], segments: list[_Plain]) -> list[_Row]:
    """Blocks that were alive before the history: it frees them, or they still are at its end."""
    made: set[int] = set()
    before = []
    for row in rows:
        if row.bytes > 0:
            made.add(row.address)
        elif row.address in made:
            made.remove(row.address)
        elif row.bytes < 0:
            before.append(_Row(address=row.address, bytes=-row.bytes))
    for segment in segments:
        address = int(segment.get("address") or 0)
        for block in segment["blocks"]:
            own = int(block.get("address", address))
            address = own + int(block["size"])
            size = int(block.get("requested_size", block["size"]))
            if block["state"] == "active_allocated" and own not in made and size:
                before.append(_Row(address=own, bytes=size, frames=block.get("frames") or None))
    return before


def _size_of(segments: list[_Plain]) -> int:
    return sum(int(segment["total_size"]) for segment in segments)


def _reserved(history: list[_Plain], segments: list[_Plain]) -> list[int]:
    """Bytes of all segments after each allocation or free of the history."""
    sizes = [_RESERVES.get(entry["action"], 0) * int(entry.get("size", 0)) for entry in history]
    current = _size_of(segments) - sum(sizes)
    found = []
    for entry, size in zip(history, sizes, strict=True):
        current += size
        if entry["action"] in (_MADE, _FREED):
            found.append(current)
    return found


def _oom(entry: _Plain) -> str:
    wanted, free = int(entry.get("size", 0)), entry.get("device_free")
    left = "" if free is None else f", {int(free) / 2**20:,.1f} MiB were free on the device"
    return f"An allocation of {wanted / 2**20:,.1f} MiB failed for lack of memory{left}."


def _recorded(
    before: list[_Row], rows: list[_Row], reserved: list[int], *, has_clock: bool
) -> Recorded:
    whole = [*before, *rows]
    start = rows[0].time_us if rows and has_clock else 0
    times = [row.time_us if has_clock else number for number, row in enumerate(rows)]
    labels: Numbering[str] = Numbering()
    operators = _labels(whole, labels)
    nothing = labels[""]
    return Recorded(
        time=np.array([start] * len(before) + times, dtype=np.int64) * (1000 if has_clock else 1),
        address=np.array([row.address for row in whole], dtype=np.int64),
        bytes=np.array([row.bytes for row in whole], dtype=np.int64),
        phase=np.array([OTHER] * len(before) + _phases(rows), dtype=np.int64),
        place=np.full(len(whole), NONE, dtype=np.int64),
        operator=operators,
        module=np.full(len(whole), nothing, dtype=np.int64),
        kind=np.array([row.kind for row in whole], dtype=np.int64),
        labels=tuple(labels),
        reserved=np.array(reserved, dtype=np.int64),
        num_before=len(before),
    )


def _labels(rows: list[_Row], labels: Numbering[str]) -> Ints:
    """Number of the label of each row; rows that share a list of frames are looked at once."""
    known: dict[int, int] = {}
    for row in rows:
        if id(row.frames) not in known:
            text = _BEFORE_LABEL if row.frames is None else label_of(row.frames)
            known[id(row.frames)] = labels[text]
    return np.array([known[id(row.frames)] for row in rows], dtype=np.int64)


def _phases(rows: list[_Row]) -> list[int]:
    """Phase of each row. A free without frames of its own is in the phase of what came before."""
    has_frames = any(row.frames for row in rows)
    has_freeing_frames = any(row.frames for row in rows if row.bytes < 0)
    known: dict[int, int] = {}
    found: list[int] = []
    for row in rows:
        if not has_frames:
            found.append(OTHER)
        elif row.bytes < 0 and not has_freeing_frames:
            found.append(found[-1] if found else OTHER)
        else:
            if id(row.frames) not in known:
                known[id(row.frames)] = phase_of(row.frames or [])
            found.append(known[id(row.frames)])
    return found
