"""The halo: the tokens before a chunk that its queries see through a window, sent by who has them.

c tokens of a chunk, B batch, C channels.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.chunks import Chunks
from parallel.collectives import exchange


class Piece(NamedTuple):
    """Neighbouring tokens of a halo, by their owner and their place among its 2c tokens."""

    owner: int
    start: int
    stop: int


class Halo:
    """What this rank sends to others, what it receives, and where it goes."""

    def __init__(self, chunks: Chunks, reach: int, group: dist.ProcessGroup) -> None:
        """Describe the halos of ``reach`` tokens before every chunk."""
        self.chunks = chunks
        self.reach = reach
        self.group = group

    def spans(self, c: int) -> list[tuple[int, int]]:
        """Return the tokens (start, stop) of each chunk of this rank with its halo."""
        return [(max(chunk * c - self.reach, 0), (chunk + 1) * c) for chunk in self.chunks.own]

    def pieces(self, chunk: int, c: int) -> list[Piece]:
        """Return the halo of a chunk in order of its tokens."""
        start = max(chunk * c - self.reach, 0)
        pieces = []
        for source in range(start // c, chunk):
            owner, place = self.chunks.owner(source)
            first = max(start - source * c, 0)
            pieces.append(Piece(owner, place * c + first, place * c + c))
        return pieces

    def exchange(self, x_BLC: Tensor) -> Tensor:
        """Return halo and tokens of the first chunk, then of the second, from the 2c tokens here.

        Shape (B, tokens of both spans, C); backward adds each token's gradients where it lives.
        """
        tokens = x_BLC.transpose(0, 1)
        c = len(tokens) // 2
        rank, ranks = self.chunks.rank, range(self.chunks.num_ranks)
        sent = [self._travelling(rank, other, c) for other in ranks]
        rows = [tokens[piece.start : piece.stop] for pieces in sent for piece in pieces]
        num_sent = [sum(map(_length, pieces)) for pieces in sent]
        num_received = [sum(map(_length, self._travelling(other, rank, c))) for other in ranks]
        outgoing = torch.cat(rows) if rows else tokens[:0]
        incoming = exchange(outgoing, self.group, num_received, num_sent)
        return self._assemble(tokens, list(incoming.split(num_received))).transpose(0, 1)

    def _travelling(self, source: int, destination: int, c: int) -> list[Piece]:
        """Return what one rank sends another, in the order in which that one needs it."""
        if source == destination:
            return []
        wanted = [p for chunk in self.chunks.of(destination) for p in self.pieces(chunk, c)]
        return [piece for piece in wanted if piece.owner == source]

    def _assemble(self, tokens: Tensor, incoming: list[Tensor]) -> Tensor:
        """Return halos and chunks in order; each owner's rows came in the order of the pieces."""
        c = len(tokens) // 2
        parts = []
        for chunk, own in zip(self.chunks.own, tokens.split(c), strict=True):
            for piece in self.pieces(chunk, c):
                if piece.owner == self.chunks.rank:
                    parts.append(tokens[piece.start : piece.stop])
                    continue
                rows = incoming[piece.owner]
                parts.append(rows[: _length(piece)])
                incoming[piece.owner] = rows[_length(piece) :]
            parts.append(own)
        return torch.cat(parts)


def _length(piece: Piece) -> int:
    return piece.stop - piece.start
