"""Events as Kineto writes them: typed structs that the JSON decoder fills, unknown keys skipped."""

import math
from decimal import Decimal
from typing import Any

import msgspec
from msgspec import Raw, Struct, field

Number = int | float | str
Identifier = int | float | str | None

ABSENT = Raw()
NONE = -1

# Phases of the Chrome trace format that no analysis reads; they are decoded as empty structs.
IGNORED_PHASES = "IstfbneCSTpFNODPRcvVa(),"


class Args(Struct, frozen=True, gc=False):
    """Arguments that nearly every event may have; all integers in a sound file."""

    stream: Identifier = NONE
    correlation: Identifier = NONE
    external_id: Identifier = field(name="External id", default=NONE)
    bytes: Identifier = NONE
    sequence: Identifier = field(name="Sequence number", default=NONE)
    forward_thread: Identifier = field(name="Fwd thread id", default=NONE)


class FullArgs(Args, frozen=True, gc=False):
    """All arguments that analyses read; those of collectives stay raw, as their types vary."""

    graph_node: Identifier = field(name="graph node id", default=None)
    input_dims: Raw = field(name="Input Dims", default=ABSENT)
    input_type: Raw = field(name="Input type", default=ABSENT)
    collective: Raw = field(name="Collective name", default=ABSENT)
    input_elements: Raw = field(name="In msg nelems", default=ABSENT)
    output_elements: Raw = field(name="Out msg nelems", default=ABSENT)
    group_size: Raw = field(name="Group size", default=ABSENT)
    dtype: Raw = ABSENT
    group_name: Raw = field(name="Process Group Name", default=ABSENT)
    group_description: Raw = field(name="Process Group Description", default=ABSENT)
    group_ranks: Raw = field(name="Process Group Ranks", default=ABSENT)
    collective_sequence: Raw = field(name="Seq", default=ABSENT)
    source: Raw = field(name="Src Rank", default=ABSENT)
    destination: Raw = field(name="Dst Rank", default=ABSENT)


class LeanArgs(Args, frozen=True, gc=False):
    """The common arguments alone; keys that only FullArgs reads are refused as of a wrong type."""

    graph_node: None = field(name="graph node id", default=None)
    input_dims: None = field(name="Input Dims", default=None)
    collective: None = field(name="Collective name", default=None)


NO_ARGS = LeanArgs()
NO_FULL_ARGS = FullArgs()


class Complete(Struct, frozen=True, gc=False, tag_field="ph", tag="X"):
    """A finished event; ts and dur in microseconds (dur is NaN when the file has none)."""

    ts: Number
    name: str = ""
    cat: str = ""
    pid: Identifier = 0
    tid: Identifier = 0
    dur: Number = math.nan
    args: FullArgs = NO_FULL_ARGS


class LeanComplete(Struct, frozen=True, gc=False, tag_field="ph", tag="X"):
    """A finished event of a piece in which no event needs FullArgs."""

    ts: Number
    name: str = ""
    cat: str = ""
    pid: Identifier = 0
    tid: Identifier = 0
    dur: Number = math.nan
    args: LeanArgs = NO_ARGS


class Begin(Struct, frozen=True, gc=False, tag_field="ph", tag="B"):
    """The start of an event of a file that uses begin and end pairs."""

    ts: Number
    name: str = ""
    cat: str = ""
    pid: Identifier = 0
    tid: Identifier = 0
    args: FullArgs = NO_FULL_ARGS


class End(Struct, frozen=True, gc=False, tag_field="ph", tag="E"):
    """The end of the last event begun on the same thread."""

    ts: Number
    pid: Identifier = 0
    tid: Identifier = 0


class MemoryArgs(Struct, frozen=True, gc=False):
    """Arguments of a `[memory]` event: an allocation (bytes > 0) or a free (bytes < 0)."""

    address: int = field(name="Addr", default=NONE)
    bytes: int = field(name="Bytes", default=0)
    total_allocated: int = field(name="Total Allocated", default=NONE)
    total_reserved: int = field(name="Total Reserved", default=NONE)
    device_type: int = field(name="Device Type", default=NONE)
    device_id: int = field(name="Device Id", default=NONE)


class Instant(Struct, frozen=True, gc=False, tag_field="ph", tag="i"):
    """A point in time; only those called `[memory]` are kept."""

    ts: Number
    name: str = ""
    pid: Identifier = 0
    tid: Identifier = 0
    args: MemoryArgs = MemoryArgs()


class LabelArgs(Struct, frozen=True, gc=False):
    """Arguments of a metadata event that names a process or a thread."""

    name: Raw = ABSENT


class Label(Struct, frozen=True, gc=False, tag_field="ph", tag="M"):
    """A metadata event: names of processes and threads."""

    name: str = ""
    pid: Identifier = 0
    tid: Identifier = 0
    args: LabelArgs | None = None


def _ignored(phase: str) -> type[Struct]:
    return msgspec.defstruct(
        f"Ignored{ord(phase)}", [], frozen=True, gc=False, tag_field="ph", tag=phase
    )


def _union(members: tuple[Any, ...]) -> Any:
    result = members[0]
    for member in members[1:]:
        result |= member
    return result


_IGNORED = tuple(_ignored(phase) for phase in IGNORED_PHASES)

Event = Complete | LeanComplete | Begin | End | Instant | Label
_full: Any = _union((Complete, Begin, End, Instant, Label, *_IGNORED))
_lean: Any = _union((LeanComplete, Begin, End, Instant, Label, *_IGNORED))
_full_decoder = msgspec.json.Decoder(list[_full])
_lean_decoder = msgspec.json.Decoder(list[_lean])


def decode_events(text: bytes) -> list[Event]:
    """Events of a text of whole events separated by commas; raises msgspec.DecodeError.

    Most pieces need few arguments, and are decoded faster for it; the others are refused early.
    """
    events: list[Event]
    text = b"[" + text + b"]"
    try:
        events = _lean_decoder.decode(text)
    except msgspec.ValidationError:
        events = _full_decoder.decode(text)
    return events


class ExactComplete(Struct, frozen=True, gc=False, tag_field="ph", tag="X"):
    """Only the two times of a finished event, as exact decimals."""

    ts: Decimal
    dur: Decimal | None = None


_OTHERS = tuple(_ignored(phase) for phase in IGNORED_PHASES + "BEiM")
exact_decoder = msgspec.json.Decoder(list[_union((ExactComplete, *_OTHERS))])  # type: ignore[misc]
