"""Packing: documents as one endless stream of byte tokens, cut into sequences.

Logical dimensions: S sequence length.

A token is a byte (0..255); every document is followed by END_OF_DOCUMENT. The stream starts again
with the first document after the last one. Sequence ``g`` is the stream's tokens
``[g * S, (g + 1) * S)``, so nothing is padded or dropped, and any rank can read any sequence
without the ones before it.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.batch import IGNORE
from workloads.data import documents as files
from workloads.data.documents import Document

END_OF_DOCUMENT = 256
PADDING = 257
TEXT_VOCAB_SIZE = 258

Tokens = NDArray[np.int64]


class TokenSequence(NamedTuple):
    """One training sequence; each field int64 of shape (S,)."""

    tokens_S: Tokens
    labels_S: Tokens
    positions_S: Tokens


class PackedText:
    """Documents as an endless stream; holds only their offsets, never their content."""

    def __init__(self, documents: list[Document], *, sequence_length: int) -> None:
        self.documents = documents
        self.sequence_length = sequence_length
        self.ends = np.cumsum([document.size + 1 for document in documents])

    @property
    def num_tokens(self) -> int:
        """Tokens in one pass over the documents, ends of documents included."""
        return int(self.ends[-1])

    def sequence(self, index: int) -> TokenSequence:
        """Return sequence ``index``; one of padded length if the whole text is shorter than S."""
        S = self.sequence_length
        if self.num_tokens < S:
            return pad(pack(self.stream(0, self.num_tokens + 1)), S)
        return pack(self.stream(index * S, S + 1))

    def stream(self, start: int, length: int) -> Tokens:
        """Return ``length`` tokens of the endless stream from ``start`` on.

        Raises:
            ValueError: if a file cannot be read any more.
        """
        pieces = []
        position = start % self.num_tokens
        while length > 0:
            number = int(np.searchsorted(self.ends, position, side="right"))
            document = self.documents[number]
            begin = position - (int(self.ends[number]) - document.size - 1)
            size = min(document.size + 1 - begin, length)
            pieces.append(document_tokens(document, begin, size))
            length -= size
            position = (position + size) % self.num_tokens
        return np.concatenate(pieces)


def document_tokens(document: Document, start: int, size: int) -> Tokens:
    """Return ``size`` tokens of one document from ``start`` on; the last may be its end."""
    text = files.read(document, start, min(size, document.size - start))
    tokens = np.full(size, END_OF_DOCUMENT)
    tokens[: len(text)] = np.frombuffer(text, dtype=np.uint8)
    return tokens


def pack(window: Tokens) -> TokenSequence:
    """Return the sequence of a window of S + 1 tokens, the last of which is only a label.

    Positions restart at each document and at the start of the sequence. A label is the next token
    of the same document, IGNORE where the document ends.
    """
    tokens = window[:-1]
    ends = tokens == END_OF_DOCUMENT
    index = np.arange(len(tokens))
    starts = np.zeros_like(index)
    starts[1:] = np.where(ends[:-1], index[1:], 0)
    return TokenSequence(
        tokens_S=tokens,
        labels_S=np.where(ends, IGNORE, window[1:]),
        positions_S=index - np.maximum.accumulate(starts),
    )


def pad(sequence: TokenSequence, length: int) -> TokenSequence:
    """Return the sequence with PADDING up to ``length``, like a document without any label."""
    missing = length - len(sequence.tokens_S)
    return TokenSequence(
        tokens_S=np.concatenate([sequence.tokens_S, np.full(missing, PADDING)]),
        labels_S=np.concatenate([sequence.labels_S, np.full(missing, IGNORE)]),
        positions_S=np.concatenate([sequence.positions_S, np.arange(missing)]),
    )
