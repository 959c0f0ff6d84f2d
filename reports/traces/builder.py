"""Decoded events into columns, piece by piece, so that only one piece is ever held as objects."""

import re
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
from msgspec.structs import astuple
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
from reports.traces.extract import (
    ARGUMENTS,
    argument_columns,
    collective_args,
    integer_table,
    numbered,
    text_of,
    widened,
)
from reports.traces.growth import Column, narrowed
from reports.traces.problems import Problems
from reports.traces.times import exact_ns, is_exact, numbers, to_ns
from reports.traces.wire import (
    ABSENT,
    Begin,
    Complete,
    End,
    Event,
    FullArgs,
    Identifier,
    Instant,
    Label,
    LeanComplete,
)

_FINISHED = frozenset((Complete, LeanComplete))
_OTHERS = frozenset((Label, Begin, End, Instant))
# Types that the columns begin with; integers of 32 bits widen where a value needs it.
_COLUMNS = {"start": np.int64, "in_graph": np.bool_} | dict.fromkeys(
    ("duration", "name", "place", "dims", *ARGUMENTS), np.int32
)
_NO_TIME = np.iinfo(np.int64).min
_WANTS_DIMS = re.compile(
    r"^(aten::(addmm|mm|bmm|baddbmm|linear|matmul|_scaled_mm|_grouped_mm|_scaled_grouped_mm)"
    r"|aten::_?(scaled_dot_product|flash_attention|efficient_attention).*"
    r"|titanbench::.*|(gloo|nccl|xccl|ucc|mpi):.*|c10d::.*|_c10d_functional::.*)"
)


class Builder:
    """Collects the columns of one file."""

    def __init__(self, problems: Problems) -> None:
        self.problems = problems
        self.names: Numbering[str] = Numbering()
        self.identifiers: Numbering[Identifier] = Numbering()
        self.dims: Numbering[bytes] = Numbering()
        self.labels: dict[tuple[Identifier, Identifier], str] = {}
        self.collectives: list[CollectiveArgs] = []
        self._places: Numbering[tuple[str, Identifier, Identifier]] = Numbering()
        self._wants_dims: Bools = np.empty(0, dtype=np.bool_)
        self._columns = {name: Column(dtype) for name, dtype in _COLUMNS.items()}
        self._memory: list[Ints] = []
        self._open: dict[tuple[Identifier, Identifier], list[Begin]] = {}
        self._num_rows = 0

    def add(self, events: Sequence[Event], piece: bytes) -> None:
        """Add the events of one piece; `piece` is their text, read again for exact times."""
        kinds = set(map(type, events))
        finished: list[Any] = [event for event in events if type(event) in _FINISHED]
        if not _OTHERS.isdisjoint(kinds):
            self._add_memory([event for event in events if type(event) is Instant])
            for event in events:
                if type(event) in _OTHERS:
                    self._add_other(event, finished)
        if len({*kinds & _FINISHED, *map(type, finished[-1:])}) > 1:
            finished = [widened(event) for event in finished]
        if finished:
            self._add_finished(finished, piece)

    def _add_other(self, event: Event, finished: list[Any]) -> None:
        if isinstance(event, Label):
            self._add_label(event)
        elif isinstance(event, Begin):
            self._open.setdefault((event.pid, event.tid), []).append(event)
        elif isinstance(event, End):
            self._close(event, finished)

    def _close(self, end: End, finished: list[Any]) -> None:
        stack = self._open.get((end.pid, end.tid))
        if not stack:
            self.problems.add("unpaired")
            return
        begin = stack.pop()
        start, stop = to_ns(numbers([begin.ts, end.ts])).tolist()
        fields = {name: getattr(begin, name) for name in Begin.__struct_fields__}
        finished.append(Complete(dur=(stop - start) / 1000, **fields))

    def _add_label(self, label: Label) -> None:
        if label.name not in ("process_name", "thread_name") or label.args is None:
            return
        name = text_of(label.args.name)
        if name is not None:
            tid = label.tid if label.name == "thread_name" else None
            self.labels[label.pid, tid] = name

    def _add_memory(self, events: list[Instant]) -> None:
        kept = [event for event in events if event.name == "[memory]"]
        args = (astuple(event.args) for event in kept)
        table = integer_table(args, len(kept), len(MemoryEvents.__struct_fields__) - 2)
        if table is None or not kept:
            return
        time = to_ns(np.nan_to_num(numbers([event.ts for event in kept])))
        thread = numbered((event.tid for event in kept), self.identifiers, len(kept))
        rows = np.column_stack([time, thread, table])
        self._memory.append(rows[table[:, 0] != NONE])

    def _add_finished(self, events: list[Any], piece: bytes) -> None:
        start, duration = self._times(events, piece)
        sound = start != _NO_TIME
        if not sound.all():
            self.problems.add("no_time", int((~sound).sum()))
            events = [event for event, good in zip(events, sound, strict=True) if good]
            start, duration = start[sound], duration[sound]
        count = len(events)
        args = [event.args for event in events]
        name = numbered([event.name for event in events], self.names, count)
        places = [(event.cat, event.pid, event.tid) for event in events]
        self._append(
            start=start,
            duration=narrowed(duration),
            name=name,
            place=numbered(places, self._places, count),
            **self._rare_columns(args, name),
            **argument_columns(args, self.problems),
        )
        self._num_rows += count

    def _append(self, **values: NDArray[Any]) -> None:
        for name, own in values.items():
            self._columns[name].append(own)

    def _rare_columns(self, args: list[Any], name: NDArray[np.int32]) -> dict[str, NDArray[Any]]:
        """What only full arguments hold; of collectives the metadata are set apart."""
        if not args or not isinstance(args[0], FullArgs):
            in_graph = np.zeros(len(args), dtype=np.bool_)
            return {"in_graph": in_graph, "dims": np.full(len(args), NONE, dtype=np.int32)}
        for row, one in enumerate(args, self._num_rows):
            if one.collective is not ABSENT:
                found = collective_args(row, one)
                self.collectives += [found] if found is not None else []
        in_graph = np.array([one.graph_node is not None for one in args])
        return {"in_graph": in_graph, "dims": self._dims(args, name)}

    def _times(self, events: list[Any], piece: bytes) -> tuple[Ints, Ints]:
        """Start and duration in ns; a start that is no number becomes the least int64."""
        stamps = [event.ts for event in events]
        start_us = numbers(stamps)
        duration_us = numbers([event.dur for event in events])
        missing = np.isnan(duration_us)
        self.problems.add("no_duration", int(missing.sum()))
        if not is_exact(start_us, stamps):
            exact = exact_ns(piece)
            if exact is not None and len(exact[0]) == len(events):
                return exact
            self.problems.add("inexact_times", len(events))
        bad = ~np.isfinite(start_us)
        start = to_ns(np.where(bad, 0.0, start_us))
        start[bad] = _NO_TIME
        return start, np.maximum(to_ns(np.where(missing, 0.0, duration_us)), 0)

    def _dims(self, args: list[Any], name: NDArray[np.int32]) -> NDArray[np.int32]:
        dims = np.full(len(args), NONE, dtype=np.int32)
        known = len(self._wants_dims)
        texts = islice(self.names, known, None)
        wanted = [_WANTS_DIMS.match(text) is not None for text in texts]
        self._wants_dims = np.append(self._wants_dims, np.array(wanted, dtype=np.bool_))
        for row in np.flatnonzero(self._wants_dims[name]).tolist():
            if args[row].input_dims:
                shapes = bytes(args[row].input_dims) + b" " + bytes(args[row].input_type)
                dims[row] = self.dims[shapes]
        return dims

    def finish(self, base_ns: int) -> tuple[Events, MemoryEvents]:
        """All columns, times moved by the base of the file; the builder is used up."""
        for stack in self._open.values():
            self.problems.add("unpaired", len(stack))
        place = self._columns.pop("place").array()
        table = [
            (category_number(cat), self.identifiers[pid], self.identifiers[tid])
            for cat, pid, tid in self._places
        ]
        numbers_of = np.array(table, dtype=np.int32).reshape(-1, 3)
        columns: dict[str, Any] = {
            "category": numbers_of[:, 0].astype(np.int8)[place],
            "process": numbers_of[:, 1][place],
            "thread": numbers_of[:, 2][place],
            **{name: column.array() for name, column in self._columns.items()},
        }
        columns["start"] += base_ns
        return Events(**columns), self._memory_columns(base_ns)

    def _memory_columns(self, base_ns: int) -> MemoryEvents:
        names = MemoryEvents.__struct_fields__
        memory = np.concatenate([*self._memory, np.empty((0, len(names)), dtype=np.int64)])
        memory[:, 0] += base_ns
        fields: dict[str, Any] = {name: memory[:, k].copy() for k, name in enumerate(names)}
        return MemoryEvents(**fields | {"thread": fields["thread"].astype(np.int32)})
