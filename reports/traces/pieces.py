"""A trace file as a stream: the text before its events, pieces of whole events, the text after."""

import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

BLOCK_BYTES = 1 << 18  # its events fit in a cache of the second level
GZIP_MAGIC = b"\x1f\x8b"

# Where one event ends and the next begins: an object that starts with a key only events have first.
BOUNDARY = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|name|cat|ts|pid|tid|args|dur|bp|s)"\s*:)')
_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
_LIST_END = re.compile(rb"\}\s*\]\s*(?:,\s*\"[^{}]*)?\}?\s*$")
_SEARCH_BYTES = 1 << 11


class PieceReader:
    """Reads one file in order; `header` and `tail` are complete once `pieces` is exhausted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = b""
        self.tail = b""
        self.num_bytes = 0
        self.truncated = False
        self.has_events = False
        self.is_last = False
        self._closed = False
        self._unfinished = b""

    def pieces(self) -> Iterator[bytes]:
        """Yield text of whole events, separated by commas, without the list's brackets.

        The caller hands back with `give_back` what turns out to be no whole event of the piece.
        """
        with self.path.open("rb") as file:
            blocks = self._blocks(file)
            buffer = self._skip_header(blocks)
            if not self.has_events:
                self.tail = buffer
                return
            for block in blocks:
                if self._closed:
                    self.tail += block
                    continue
                buffer += block
                cut = last_boundary(buffer)
                if cut is not None:
                    yield buffer[: cut[0]]
                    buffer = self._rest(buffer[cut[1] :])
            if not self._closed:
                yield from self._last_pieces(buffer)

    def give_back(self, unfinished: bytes, tail: bytes | None) -> None:
        """Return text of the last piece: an event that goes on, or what follows the list's end."""
        self._unfinished = unfinished
        if tail is not None:
            self._closed = True
            self.truncated = False
            self.tail = tail

    def _rest(self, rest: bytes) -> bytes:
        """What follows a piece: more events, or a part of the tail if the list has ended."""
        if self._closed:
            self.tail += b"," + rest
            return b""
        return self._unfinished + b"," + rest if self._unfinished else rest

    def _last_pieces(self, buffer: bytes) -> Iterator[bytes]:
        cut = last_boundary(buffer)
        if cut is not None:
            yield buffer[: cut[0]]
            buffer = self._rest(buffer[cut[1] :])
            if self._closed:
                return
        self.is_last = True
        end, closed = end_of_objects(buffer)
        if closed is not None:
            self.tail = buffer[closed + 1 :]
            if end:
                yield buffer[:end]
            return
        self.truncated = True
        if _LIST_END.search(buffer):
            yield buffer  # the end is there, but a fault in a string hides it
        elif end:
            yield buffer[:end]

    def _blocks(self, file: IO[bytes]) -> Iterator[bytes]:
        first = file.read(2)
        file.seek(0)
        blocks = self._inflate(file) if first == GZIP_MAGIC else iter(lambda: _read(file), b"")
        for block in blocks:
            self.num_bytes += len(block)
            yield block

    def _inflate(self, file: IO[bytes]) -> Iterator[bytes]:
        """Inflate gzip members one after another; a damaged or cut stream ends early."""
        inflater = zlib.decompressobj(wbits=31)
        pending = _read(file)
        while pending:
            try:
                block = inflater.decompress(pending, BLOCK_BYTES)
            except zlib.error:
                self.truncated = True
                return
            if block:
                yield block
            pending = inflater.unconsumed_tail
            if inflater.eof:
                pending = inflater.unused_data.lstrip(b"\0") or _read(file)
                inflater = zlib.decompressobj(wbits=31)
                if pending[:2] != GZIP_MAGIC:
                    return
            elif not pending:
                pending = _read(file)
        yield inflater.flush()
        self.truncated = True

    def _skip_header(self, blocks: Iterator[bytes]) -> bytes:
        """Collect the header; return what was read beyond it."""
        buffer = b""
        for block in blocks:
            buffer += block
            if buffer.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"[":
                self.has_events = True
                return buffer[buffer.index(b"[") + 1 :]
            match = _EVENTS_KEY.search(buffer)
            if match:
                self.has_events = True
                self.header = buffer[: match.start()]
                return buffer[match.end() :]
        return buffer


def _read(file: IO[bytes]) -> bytes:
    return file.read(BLOCK_BYTES)


def last_boundary(buffer: bytes) -> tuple[int, int] | None:
    """End of the last event that another follows, and the start of that other; None without."""
    reach = _SEARCH_BYTES
    while True:
        start = max(0, len(buffer) - reach)
        last = None
        for match in BOUNDARY.finditer(buffer, start):
            last = match
        if last is not None:
            return last.start() + 1, last.end()
        if start == 0:
            return None
        reach *= 8


def end_of_objects(text: bytes) -> tuple[int, int | None]:
    """End of the last whole object at the top of `text`, and where a closing `]` stands (or None).

    Strings are respected, so a bracket in a name does not count.
    """
    depth, end = 0, 0
    for match in _TOKEN.finditer(text):
        token = match.group()
        if token in (b"{", b"["):
            depth += 1
        elif token in (b"}", b"]"):
            if depth == 0:
                return end, match.start()
            depth -= 1
            if depth == 0:
                end = match.end()
    return end, None
