"""The exchange of heads for tokens (Ulysses, arXiv:2309.14509), by all-to-all and back.

N ranks, B batch, S sequence, s = S / N tokens of a rank, H heads.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.chunks import Chunks
from parallel.collectives import exchange
from parallel.packing import unpack


class HeadExchange:
    """Brings every rank all tokens of its share of the heads, and results back to the tokens."""

    def __init__(self, chunks: Chunks, group: dist.ProcessGroup) -> None:
        self.chunks = chunks
        self.group = group

    def leave(self, *tensors: Tensor) -> list[Tensor]:
        """Return (B, S, H / N, ...) of this rank's share of heads from (B, s, H, ...) of each.

        One exchange for all tensors of a dtype.
        """
        N = self.chunks.num_ranks
        received: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            mine = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
            # (B, s, N, H / N, ...): the heads of each rank stand together.
            shares = [tensors[index].unflatten(2, (N, -1)) for index in mine]
            packed = torch.cat([share.flatten(3) for share in shares], dim=-1)
            whole = self.chunks.join(exchange(packed.permute(2, 0, 1, 3), self.group))
            parts = unpack(whole, [share[:, :, 0] for share in shares])
            received.update(zip(mine, parts, strict=True))
        return [received[index] for index in range(len(tensors))]

    def come_home(self, out: Tensor) -> Tensor:
        """Return (B, s, H, D) of this rank's tokens from (B, S, H / N, D) of its heads."""
        home = exchange(self.chunks.split(out), self.group)
        return home.permute(1, 2, 0, 3, 4).flatten(2, 3)
