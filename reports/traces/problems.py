"""What was odd about a file: one counted warning per kind, never one per event."""

from collections.abc import Iterator

from msgspec import Struct

MESSAGES = {
    "truncated": "the file ends early; its complete events are used",
    "control_characters": "names with raw control characters; each became a blank",
    "invalid_utf8": "byte sequences that are not UTF-8; each became a replacement character",
    "not_a_number": "NaN or Infinity, which JSON does not have; each became null",
    "bad_escapes": "backslashes that escape nothing; each is taken as itself",
    "quotes": "events with an unescaped quote or another fault in a string; repaired",
    "odd_types": "events with a value of an unexpected type; converted",
    "dropped": "events that are not readable even after repair; left out",
    "no_time": "events whose time is no number; left out",
    "no_duration": "complete events without a duration; counted as 0 ns",
    "unpaired": "begin or end events without a partner; left out",
    "too_large": "ids outside 64 bits; left out of the links",
    "metadata": "the file's metadata are not valid JSON; read field by field",
    "zero_kernels": "device events at time 0 or with no time; left out of span and idle",
    "impossible_kernels": "kernels that outlast a later kernel of their stream; cut at its start",
    "no_kernels": "no device events although the host has an accelerator; operators are used",
    "missing_kernels": "kernel launches without a kernel in the trace",
    "missing_communication": "communication calls, but no communication kernels in the trace",
    "unlinked_collectives": "communication kernels without metadata; matched by name and order",
    "dominant_collective": "a single collective covers more than half of the window",
    "no_steps": "no ProfilerStep in the trace; the whole window is analysed as one",
    "unknown_rank": "no rank in the file or its name; taken as rank 0",
    "inexact_times": "times with more digits than a double holds; rounded",
    "cache": "the cache beside the trace could not be written",
}


class Warning(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of oddity of one file and how often it occurred."""

    file: str
    kind: str
    count: int
    message: str


class Problems:
    """Counts oddities while one file is read."""

    def __init__(self, file: str) -> None:
        self.file = file
        self._counts: dict[str, int] = {}

    def add(self, kind: str, count: int = 1) -> None:
        """Count `count` more oddities of a kind that MESSAGES knows."""
        assert kind in MESSAGES, kind
        if count:
            self._counts[kind] = self._counts.get(kind, 0) + count

    def warnings(self) -> tuple[Warning, ...]:
        """One warning per kind, in the order of first occurrence."""
        return tuple(self._each())

    def _each(self) -> Iterator[Warning]:
        for kind, count in self._counts.items():
            yield Warning(file=self.file, kind=kind, count=count, message=MESSAGES[kind])


class TraceError(ValueError):
    """A trace cannot be analysed; the text says which file, why, and what to do."""
