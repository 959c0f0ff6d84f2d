"""Decoded events into columns, piece by piece, so that only one piece is ever held as objects."""

import re
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from reports.traces.columns import (
    NONE,
    Bools,
    CollectiveArgs,
    Events,
    Ints,
    MemoryEvents,
    Numbering,
    category_number,
)
from reports.traces.problems import Problems
from reports.traces.times import exact_ns, is_exact, numbers, to_ns
from reports.traces.wire import (
    Args,
    Begin,
    Complete,
    End,
    Event,
    Identifier,
    Instant,
    Label,
    MemoryArgs,
)

_NO_ARGS = Args()
_PAIRED = frozenset((Label, Begin, End))
_WANTS_DIMS = re.compile(
    r"^(aten::(addmm|mm|bmm|baddbmm|linear|matmul|_scaled_mm|_grouped_mm|_scaled_grouped_mm)"
    r"|aten::_?(scaled_dot_product|flash_attention|efficient_attention).*"
    r"|titanbench::.*|(gloo|nccl|xccl|ucc|mpi):.*|c10d::.*|_c10d_functional::.*)"
)


class Builder:
    """Collects the columns of one file."""

    def __init__(self, problems: Problems) -> None:
        self.problems = problems
        self.names = Numbering()
        self.identifiers = Numbering()
        self.dims = Numbering()
        self.labels: dict[tuple[Identifier, Identifier], str] = {}
        self.collectives: list[CollectiveArgs] = []
        self._categories = Numbering()
        self._wants_dims: Bools = np.empty(0, dtype=np.bool_)
        self._chunks: list[Events] = []
        self._memory: list[Ints] = []
        self._open: dict[tuple[Identifier, Identifier], list[Begin]] = {}
        self._num_rows = 0

    def add(self, events: Sequence[Event], piece: bytes) -> None:
        """Add the events of one piece; `piece` is their text, read again for exact times."""
        complete = [event for event in events if type(event) is Complete]
        if len(complete) < len(events):
            self._add_memory([event for event in events if type(event) is Instant])
            for event in [event for event in events if type(event) in _PAIRED]:
                self._add_other(event, complete)
        if complete:
            self._add_complete(complete, piece)

    def _add_other(self, event: Event, complete: list[Complete]) -> None:
        if isinstance(event, Label):
            self._add_label(event)
        elif isinstance(event, Begin):
            self._open.setdefault((event.pid, event.tid), []).append(event)
        elif isinstance(event, End):
            self._close(event, complete)

    def _close(self, end: End, complete: list[Complete]) -> None:
        stack = self._open.get((end.pid, end.tid))
        if not stack:
            self.problems.add("unpaired")
            return
        begin = stack.pop()
        start, stop = numbers([begin.ts, end.ts])
        duration = (to_ns(np.array([stop])) - to_ns(np.array([start])))[0] / 1000
        fields = {name: getattr(begin, name) for name in Begin.__struct_fields__}
        complete.append(Complete(dur=float(duration), **fields))

    def _add_label(self, label: Label) -> None:
        if label.name not in ("process_name", "thread_name") or label.args is None:
            return
        name = _text(label.args.name)
        if name is not None:
            tid = label.tid if label.name == "thread_name" else None
            self.labels[label.pid, tid] = name

    def _add_memory(self, events: list[Instant]) -> None:
        kept = [event for event in events if event.name == "[memory]" and _is_whole(event.args)]
        if not kept:
            return
        rows = np.empty((len(kept), len(MemoryEvents.__struct_fields__)), dtype=np.int64)
        rows[:, 0] = to_ns(np.nan_to_num(numbers([event.ts for event in kept])))
        rows[:, 1] = [self.identifiers[event.tid] for event in kept]
        for column, name in enumerate(MemoryEvents.__struct_fields__[2:], 2):
            rows[:, column] = self._integers([getattr(event.args, name) for event in kept])
        self._memory.append(rows)

    def _add_complete(self, events: list[Complete], piece: bytes) -> None:
        start, duration = self._times(events, piece)
        sound = start != np.iinfo(np.int64).min
        if not sound.all():
            self.problems.add("no_time", int((~sound).sum()))
            events = [event for event, good in zip(events, sound, strict=True) if good]
            start, duration = start[sound], duration[sound]
        names, identifiers, categories = self.names, self.identifiers, self._categories
        args = [_NO_ARGS if event.args is None else event.args for event in events]
        name = np.array([names[event.name] for event in events], dtype=np.int32)
        spelling = np.array([categories[event.cat] for event in events], dtype=np.int32)
        numbering = np.array([category_number(str(cat)) for cat in categories], dtype=np.int8)
        if b'"Collective name"' in piece:
            self._add_collectives(args)
        in_graph = b'"graph node id"' in piece
        sizes = (
            [a.bytes if a.size is None else a.size for a in args] if b'"size"' in piece else None
        )
        self._chunks.append(
            Events(
                start=start,
                duration=duration,
                name=name,
                category=numbering[spelling],
                process=np.array([identifiers[e.pid] for e in events], dtype=np.int32),
                thread=np.array([identifiers[e.tid] for e in events], dtype=np.int32),
                device=self._integers([a.device for a in args]).astype(np.int16),
                stream=self._integers([a.stream for a in args]).astype(np.int32),
                correlation=self._integers([a.correlation for a in args]),
                external_id=self._integers([a.external_id for a in args]),
                bytes=self._integers(sizes or [a.bytes for a in args]),
                sequence=self._integers([a.sequence for a in args]).astype(np.int32),
                forward_thread=self._integers([a.forward_thread for a in args]).astype(np.int32),
                in_graph=np.array(
                    [in_graph and a.graph_node is not None for a in args], dtype=bool
                ),
                dims=self._dims(args, name),
            )
        )
        self._num_rows += len(events)

    def _times(self, events: list[Complete], piece: bytes) -> tuple[Ints, Ints]:
        """Start and duration in ns; a start that is no number becomes the least int64."""
        stamps = [event.ts for event in events]
        durations = [event.dur for event in events]
        missing = durations.count(None)
        self.problems.add("no_duration", missing)
        start_us = numbers(stamps)
        if not is_exact(start_us, stamps):
            exact = exact_ns(piece)
            if exact is not None and len(exact[0]) == len(events):
                return exact
            self.problems.add("inexact_times", len(events))
        duration_us = numbers([0 if value is None else value for value in durations])
        bad = ~np.isfinite(start_us)
        start = to_ns(np.where(bad, 0.0, start_us))
        start[bad] = np.iinfo(np.int64).min
        return start, np.maximum(to_ns(np.nan_to_num(duration_us)), 0)

    def _integers(self, values: Sequence[Identifier]) -> Ints:
        """Identifiers as int64; None and text that is no number become -1."""
        try:
            return np.array(values, dtype=np.int64)
        except (ValueError, TypeError, OverflowError):
            return np.array([self._integer(value) for value in values], dtype=np.int64)

    def _integer(self, value: Identifier) -> int:
        try:
            number = int(value, 0) if isinstance(value, str) else int(value or 0)
        except (ValueError, OverflowError):
            return NONE
        if value is None:
            return NONE
        if not -(2**63) <= number < 2**63:
            self.problems.add("too_large")
            return NONE
        return number

    def _dims(self, args: list[Args], name: NDArray[np.int32]) -> NDArray[np.int32]:
        dims = np.full(len(args), NONE, dtype=np.int32)
        known = len(self._wants_dims)
        if known < len(self.names):
            texts = islice(self.names, known, None)
            wanted = [_WANTS_DIMS.match(str(text)) is not None for text in texts]
            self._wants_dims = np.append(self._wants_dims, wanted)
        for row in np.flatnonzero(self._wants_dims[name]).tolist():
            if args[row].input_dims:
                shapes = bytes(args[row].input_dims) + b" " + bytes(args[row].input_type)
                dims[row] = self.dims[shapes]
        return dims

    def _add_collectives(self, args: Iterable[Args]) -> None:
        for row, given in enumerate(args, self._num_rows):
            kind = _text(given.collective) if given.collective else None
            if kind:
                self.collectives.append(_collective(row, kind, given))

    def finish(self, base_ns: int) -> tuple[Events, MemoryEvents]:
        """All columns in one piece, times moved by the base of the file."""
        for stack in self._open.values():
            self.problems.add("unpaired", len(stack))
        if not self._chunks:
            self._add_complete([], b"")
        columns = {}
        for name in Events.__struct_fields__:
            columns[name] = np.concatenate([getattr(chunk, name) for chunk in self._chunks])
        self._chunks.clear()
        columns["start"] += base_ns
        width = len(MemoryEvents.__struct_fields__)
        memory = np.concatenate([*self._memory, np.empty((0, width), dtype=np.int64)])
        memory[:, 0] += base_ns
        names = MemoryEvents.__struct_fields__
        fields: dict[str, Any] = {name: memory[:, k].copy() for k, name in enumerate(names)}
        fields["thread"] = fields["thread"].astype(np.int32)
        return Events(**columns), MemoryEvents(**fields)


def _is_whole(args: MemoryArgs | None) -> bool:
    return args is not None and args.bytes is not None and args.address is not None


def _text(raw: msgspec.Raw) -> str | None:
    """A raw value as text: a string without its quotes, a list as Python writes it."""
    if not raw:
        return None
    value = msgspec.json.decode(raw)
    return None if value is None else str(value)


def _count(raw: msgspec.Raw) -> int | None:
    text = _text(raw)
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def _collective(row: int, kind: str, args: Args) -> CollectiveArgs:
    return CollectiveArgs(
        row=row,
        kind=kind,
        input_elements=_count(args.input_elements),
        output_elements=_count(args.output_elements),
        group_size=_count(args.group_size),
        dtype=_text(args.dtype),
        group_name=_text(args.group_name),
        group_description=_text(args.group_description),
        group_ranks=_text(args.group_ranks),
        sequence=_count(args.collective_sequence),
    )
