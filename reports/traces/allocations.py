"""Memory over time by kind and what is alive at the peak, whoever recorded the allocations.

A kind that the recorder does not know follows from where an allocation is made and freed: what
the forward pass makes (or its recomputation) and another phase frees is an activation; likewise a
gradient in the backward pass and optimizer state in the optimizer. What is freed in the phase or
at the place that made it is a temporary. What was there before the record began is `before`.
"""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from reports.traces.columns import NONE, Bools, Ints
from reports.traces.phases import PHASES

KINDS = (
    "before",
    "parameter",
    "activation",
    "gradient",
    "optimizer_state",
    "input",
    "autograd_detail",
    "temporary",
    "kept",
    "other",
)
KIND = {name: number for number, name in enumerate(KINDS)}
_KIND_OF_PHASE = (
    ("forward", "activation"),
    ("recompute", "activation"),
    ("backward", "gradient"),
    ("optimizer", "optimizer_state"),
)
_MAX_POINTS = 512
_MAX_ALIVE = 50
_MAX_LARGEST = 20


class MemoryPoint(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True):
    """Bytes alive at one time: in total and by kind (in the order of DeviceMemory.kinds).

    reserved_bytes: what the allocator holds; None where the source does not say.
    """

    time_ns: int
    total_bytes: int
    reserved_bytes: int | None
    by_kind: tuple[int, ...]


class Alive(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Allocations of one operator or frame, module, kind and phase that are alive at the peak.

    module: empty where the source does not say. largest_bytes: the largest of them.
    """

    operator: str
    module: str = ""
    phase: str
    kind: str
    count: int
    bytes: int
    largest_bytes: int


class DeviceMemory(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory of one device. device: `cpu` or `device N`.

    source: who recorded it, and what counts as a byte there. kinds: those that the source can
    tell. points: the course, thinned, always with the peak; times are ns, or the number of the
    event where has_clock is false. alive: at the peak, the largest first; largest: the largest
    single blocks then. num_allocations: None if only sizes are known. num_unmatched_frees: frees
    of memory from before the record, of which it says nothing else. notes: what else the record
    says, in sentences.
    """

    device: str
    source: str
    kinds: tuple[str, ...]
    peak_bytes: int
    peak_time_ns: int
    peak_reserved_bytes: int | None
    peak_by_kind: dict[str, int]
    num_allocations: int | None
    num_unmatched_frees: int
    points: list[MemoryPoint]
    alive: list[Alive]
    largest: list[Alive]
    has_clock: bool = True
    notes: list[str] = []


class Recorded(Struct, frozen=True, kw_only=True):
    """Allocations (bytes > 0) and frees (< 0) of one device as rows in the order of time.

    total, reserved: bytes of the device after each row; None where only the sizes are known.
    phase: number into PHASES. place: number of the operator or stack, -1 if unknown.
    operator, module: numbers into `labels` of who made a block. kind: number into KINDS where the
    recorder knows it, else -1. The first `num_before` rows stand for blocks that were alive
    before; `before` is the bytes alive then that have no row.
    """

    time: Ints
    address: Ints
    bytes: Ints
    phase: Ints
    place: Ints
    operator: Ints
    module: Ints
    kind: Ints
    labels: Sequence[str]
    total: Ints | None = None
    reserved: Ints | None = None
    num_before: int = 0
    before: int = 0


_Origin = tuple[int, int, int, int]  # operator, module, phase, kind


class _Blocks(Struct, frozen=True, kw_only=True):
    """Allocations as rows: rows that made and that freed each (or -1), number of its kind."""

    made: Ints
    freed: Ints
    kind: Ints


def device_memory(
    recorded: Recorded,
    *,
    device: str,
    source: str,
    kinds: Sequence[str],
    has_clock: bool = True,
    notes: Sequence[str] = (),
) -> DeviceMemory:
    """The course, the peak and what is alive then; there must be at least one row."""
    made, freed, num_unmatched = pair_blocks(recorded.address, recorded.bytes)
    blocks = _Blocks(made=made, freed=freed, kind=_kinds(recorded, made, freed))
    by_kind = _courses(recorded, blocks)
    total = by_kind.sum(axis=0) if recorded.total is None else recorded.total
    first = max(recorded.num_before - 1, 0)
    peak = first + int(np.argmax(total[first:]))
    shown = [KIND[name] for name in kinds]
    reserved = None if recorded.reserved is None else int(recorded.reserved.max())
    return DeviceMemory(
        device=device,
        source=source,
        kinds=tuple(kinds),
        peak_bytes=int(total[peak]),
        peak_time_ns=int(recorded.time[peak]),
        peak_reserved_bytes=reserved,
        peak_by_kind={KINDS[k]: int(by_kind[k, peak]) for k in shown},
        num_allocations=len(made) - recorded.num_before,
        num_unmatched_frees=num_unmatched,
        points=_points(recorded, total, by_kind[shown], first, peak),
        alive=_alive(recorded, blocks, peak),
        largest=_largest(recorded, blocks, peak),
        has_clock=has_clock,
        notes=list(notes),
    )


def pair_blocks(addresses: Ints, sizes: Ints) -> tuple[Ints, Ints, int]:
    """Pair each allocation with the next free of its address.

    Rows that allocate, the row that frees each (or -1), and the number of frees without one.
    """
    made: list[int] = []
    freed: list[int] = []
    live: dict[int, int] = {}
    num_unmatched = 0
    for index, (address, size) in enumerate(zip(addresses.tolist(), sizes.tolist(), strict=True)):
        if size > 0:
            live[address] = len(made)
            made.append(index)
            freed.append(NONE)
        elif size < 0 and address in live:
            freed[live.pop(address)] = index
        elif size < 0:
            num_unmatched += 1
    return np.array(made, np.int64), np.array(freed, np.int64), num_unmatched


def _kinds(recorded: Recorded, made: Ints, freed: Ints) -> Ints:
    """Number into KINDS of each block."""
    stays = freed == NONE
    end = np.maximum(freed, 0)
    made_in, made_at = recorded.phase[made], recorded.place[made]
    leaves = stays | (recorded.phase[end] != made_in)
    kinds = np.where(stays, KIND["kept"], KIND["other"])
    for name, kind in _KIND_OF_PHASE:
        inside = made_in == PHASES.index(name)
        kinds[inside] = np.where(leaves[inside], KIND[kind], KIND["temporary"])
    same_place = ~stays & (made_at != NONE) & (made_at == recorded.place[end])
    kinds[same_place] = KIND["temporary"]
    kinds = np.where(made < recorded.num_before, KIND["before"], kinds)
    known = recorded.kind[made]
    return np.where(known == NONE, kinds, known)


def _courses(recorded: Recorded, blocks: _Blocks) -> Ints:
    """Bytes alive by kind after each row: (number of kinds, number of rows)."""
    sizes = recorded.bytes
    change = np.zeros((len(KINDS), len(sizes)), dtype=np.int64)
    size = sizes[blocks.made]
    np.add.at(change, (blocks.kind, blocks.made), size)
    ends = blocks.freed != NONE
    np.add.at(change, (blocks.kind[ends], blocks.freed[ends]), -size[ends])
    paired = np.zeros(len(sizes), dtype=np.bool_)
    paired[blocks.freed[ends]] = True
    change[0] += np.where((sizes < 0) & ~paired, sizes, 0)
    change[0, 0] += recorded.before
    return np.cumsum(change, axis=1)


def _points(
    recorded: Recorded, total: Ints, by_kind: Ints, first: int, peak: int
) -> list[MemoryPoint]:
    reserved = recorded.reserved
    return [
        MemoryPoint(
            time_ns=int(recorded.time[index]),
            total_bytes=int(total[index]),
            reserved_bytes=None if reserved is None else int(reserved[index]),
            by_kind=tuple(by_kind[:, index].tolist()),
        )
        for index in thinned(first, len(total), peak).tolist()
    ]


def thinned(first: int, stop: int, peak: int) -> Ints:
    """At most 513 of the rows from `first` to before `stop`, with the peak's among them."""
    spread = np.linspace(first, stop - 1, _MAX_POINTS).astype(np.int64)
    return np.unique(np.append(spread, peak))


def _living(blocks: _Blocks, peak: int) -> Bools:
    return (blocks.made <= peak) & ((blocks.freed == NONE) | (blocks.freed > peak))


def _alive(recorded: Recorded, blocks: _Blocks, peak: int) -> list[Alive]:
    """Blocks that live at the peak, those of one origin together."""
    groups: dict[_Origin, list[int]] = {}
    for block in np.flatnonzero(_living(blocks, peak)).tolist():
        row = int(blocks.made[block])
        groups.setdefault(_origin(recorded, blocks, block), []).append(int(recorded.bytes[row]))
    found = [_entry(recorded, key, sizes) for key, sizes in groups.items()]
    return sorted(found, key=lambda one: -one.bytes)[:_MAX_ALIVE]


def _largest(recorded: Recorded, blocks: _Blocks, peak: int) -> list[Alive]:
    """The largest single blocks that live at the peak."""
    living = np.flatnonzero(_living(blocks, peak))
    size = recorded.bytes[blocks.made[living]]
    order = np.argsort(-size, kind="stable")[:_MAX_LARGEST]
    return [
        _entry(recorded, _origin(recorded, blocks, block), [one])
        for block, one in zip(living[order].tolist(), size[order].tolist(), strict=True)
    ]


def _origin(recorded: Recorded, blocks: _Blocks, block: int) -> _Origin:
    row = blocks.made[block]
    return (
        int(recorded.operator[row]),
        int(recorded.module[row]),
        int(recorded.phase[row]),
        int(blocks.kind[block]),
    )


def _entry(recorded: Recorded, origin: _Origin, sizes: list[int]) -> Alive:
    operator, module, phase, kind = origin
    return Alive(
        operator=recorded.labels[operator],
        module=recorded.labels[module],
        phase=PHASES[phase],
        kind=KINDS[kind],
        count=len(sizes),
        bytes=sum(sizes),
        largest_bytes=max(sizes),
    )
