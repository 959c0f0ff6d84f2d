"""The chunks of a sequence under context parallelism, two to a rank.

A sequence is cut into 2 N chunks and rank r holds chunks r and 2 N - 1 - r: under a causal mask an
early chunk sees few keys and its partner many, so that every rank has the same work.

N ranks, B batch, S sequence, c = S / 2N tokens of a chunk.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Chunks(NamedTuple):
    """Who holds which chunks of a sequence."""

    num_ranks: int
    rank: int

    def of(self, rank: int) -> tuple[int, int]:
        """Return the chunks of a rank, in order."""
        return rank, 2 * self.num_ranks - 1 - rank

    @property
    def own(self) -> tuple[int, int]:
        """The chunks of this rank, in order."""
        return self.of(self.rank)

    def owner(self, chunk: int) -> tuple[int, int]:
        """Return who holds a chunk, and whether as the first (0) or the second (1) of its two."""
        last = 2 * self.num_ranks - 1
        return (chunk, 0) if chunk < self.num_ranks else (last - chunk, 1)

    def take(self, x_BS: Tensor) -> Tensor:
        """Return this rank's tokens (B, 2c, ...) of whole sequences (B, S, ...)."""
        chunks = x_BS.chunk(2 * self.num_ranks, dim=1)
        return torch.cat([chunks[index] for index in self.own], dim=1)

    def join(self, parts: Tensor) -> Tensor:
        """Return whole sequences (B, S, ...) from every rank's tokens (N, B, 2c, ...)."""
        early, late = parts.chunk(2, dim=2)
        return torch.cat((early, late.flip(0))).transpose(0, 1).flatten(1, 2)

    def split(self, x_BS: Tensor) -> Tensor:
        """Return every rank's tokens (N, B, 2c, ...) of whole sequences: undoes ``join``."""
        early, late = x_BS.unflatten(1, (2 * self.num_ranks, -1)).transpose(0, 1).chunk(2)
        return torch.cat((early, late.flip(0)), dim=2)
