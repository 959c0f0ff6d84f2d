"""Broken JSON text into events: faults that real profilers write are mended and counted."""

import re

import msgspec
from msgspec import Struct

from reports.traces.pieces import BOUNDARY, end_of_objects
from reports.traces.problems import Problems
from reports.traces.wire import Event, decode_events

_CONTROL = bytes(range(0x20))
_BLANKS = bytes.maketrans(_CONTROL, b" " * len(_CONTROL))
_STRING_VALUE = re.compile(rb':\s*("(?:[^"\\]|\\.)*")(?=\s*[,}\]])', re.DOTALL)
_NOT_A_NUMBER = re.compile(rb"(?<=[:\[,\s])-?(?:NaN|nan|Infinity|inf)(?=\s*[,\]}])")
_BAD_ESCAPE = re.compile(rb'\\(\\|["/bfnrt]|u[0-9a-fA-F]{4})|\\')
_TRAILING_COMMA = re.compile(rb",(?=\s*[}\]])")
# A string value up to the quote that a following key or a closing bracket makes plausible.
_VALUE = re.compile(
    rb'("(?:[\w .%()/]+)"\s*:\s*")(.*?)("\s*(?=,\s*"[\w .%()/]+"\s*:|\}))', re.DOTALL
)
_MAX_JOINED = 8


class Leftover(Struct, frozen=True, kw_only=True):
    """Text of a piece that is no event of it.

    unfinished: an event that the next piece goes on with. tail: what follows the list of events.
    """

    unfinished: bytes = b""
    tail: bytes | None = None


def decode_piece(
    piece: bytes, problems: Problems, *, is_last: bool
) -> tuple[list[Event], Leftover]:
    """Events of one piece, and what else it holds.

    A sound piece takes the fast path; only a piece that does not decode is looked at closely.
    """
    try:
        return decode_events(piece), Leftover()
    except msgspec.DecodeError:
        pass
    piece = _mended(piece, problems)
    try:
        return decode_events(piece), Leftover()
    except msgspec.DecodeError:
        return _one_by_one(piece, problems, is_last=is_last)


def _mended(piece: bytes, problems: Problems) -> bytes:
    """Mend the faults that can be mended without knowing where an event ends."""
    text = piece.decode("utf-8", errors="replace")
    num_replaced = text.count("\ufffd") - piece.count("\ufffd".encode())
    problems.add("invalid_utf8", num_replaced)
    piece = text.encode() if num_replaced else piece
    problems.add("control_characters", _count_strings_with_control(piece))
    piece = piece.translate(_BLANKS)
    piece, count = _NOT_A_NUMBER.subn(b"null", piece)
    problems.add("not_a_number", count)
    num_bad = sum(1 for match in _BAD_ESCAPE.finditer(piece) if match.group(1) is None)
    problems.add("bad_escapes", num_bad)
    return _BAD_ESCAPE.sub(_double_backslash, piece) if num_bad else piece


def _double_backslash(match: re.Match[bytes]) -> bytes:
    return match.group() if match.group(1) is not None else rb"\\"


def _count_strings_with_control(piece: bytes) -> int:
    """String values with a raw control character; line breaks between values are none."""
    return sum(1 for match in _STRING_VALUE.finditer(piece) if min(match.group(1)) < 0x20)


def _one_by_one(piece: bytes, problems: Problems, *, is_last: bool) -> tuple[list[Event], Leftover]:
    """Decode event by event; join neighbours where a boundary stood inside an event."""
    fragments = _split(piece)
    events: list[Event] = []
    position = 0
    while position < len(fragments):
        event, tail, width = _decode_joined(fragments, position, problems)
        if event is not None:
            events.append(event)
            position += width
            if tail is not None:
                return events, Leftover(tail=b",".join([tail, *fragments[position:]]))
        elif 0 < len(fragments) - position < _MAX_JOINED and position > 0 and not is_last:
            return events, Leftover(unfinished=b",".join(fragments[position:]))
        else:
            problems.add("dropped")
            position += 1
    return events, Leftover()


def _decode_joined(
    fragments: list[bytes], position: int, problems: Problems
) -> tuple[Event | None, bytes | None, int]:
    """An event from the fewest fragments that make one, what follows the list, and how many."""
    for width in range(1, min(_MAX_JOINED, len(fragments) - position) + 1):
        event, tail = _decode_one(b",".join(fragments[position : position + width]), problems)
        if event is not None:
            return event, tail, width
    return None, None, 0


def _split(piece: bytes) -> list[bytes]:
    fragments, start = [], 0
    for match in BOUNDARY.finditer(piece):
        fragments.append(piece[start : match.start() + 1])
        start = match.end()
    if piece[start:].strip():
        fragments.append(piece[start:])
    return fragments


def _decode_one(fragment: bytes, problems: Problems) -> tuple[Event | None, bytes | None]:
    """The event that a fragment holds, and what follows the list if it ends in the fragment."""
    event = _decoded(fragment, problems)
    if event is not None:
        return event, None
    mended = _VALUE.sub(_escape_inner, _TRAILING_COMMA.sub(b"", fragment))
    event = _decoded(mended, problems)
    if event is not None:
        problems.add("quotes")
        return event, None
    for text in (fragment, mended):
        end, closed = end_of_objects(text)
        event = _decoded(text[:end], problems) if closed is not None else None
        if event is not None:
            problems.add("quotes", int(text is mended))
            return event, text[closed + 1 :] if closed is not None else None
    return None, None


def _decoded(text: bytes, problems: Problems) -> Event | None:
    try:
        return decode_events(text)[0]
    except (msgspec.DecodeError, IndexError):
        pass
    try:
        return _converted(msgspec.json.decode(text), problems)
    except msgspec.DecodeError:
        return None


def _escape_inner(match: re.Match[bytes]) -> bytes:
    opening, value, closing = match.groups()
    return opening + re.sub(rb'(?<!\\)"', rb"\"", value) + closing


def _converted(value: object, problems: Problems) -> Event | None:
    """An event from valid JSON with values of types that Kineto does not write."""
    if not isinstance(value, dict):
        return None
    try:
        ts = float(value["ts"])
    except (KeyError, TypeError, ValueError):
        return None
    args = value.get("args")
    cleaned = {key: item for key, item in value.items() if item is not None} | {"ts": ts}
    cleaned["args"] = args if isinstance(args, dict) else {}
    try:
        event = decode_events(msgspec.json.encode(cleaned))[0]
    except msgspec.DecodeError:
        cleaned["args"] = {}
        try:
            event = decode_events(msgspec.json.encode(cleaned))[0]
        except msgspec.DecodeError:
            return None
    problems.add("odd_types")
    return event
