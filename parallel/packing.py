"""Packing tensors of one batch and sequence into one, so that they travel together.

B batch, S sequence, C channels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors (B, S, ...) as one (B, S, C)."""
    return torch.cat([tensor.flatten(2) for tensor in tensors], dim=-1)


def unpack(packed_BSC: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the tensors in ``packed_BSC``, of the shapes of ``like`` beyond B and S."""
    parts = packed_BSC.split([tensor.shape[2:].numel() for tensor in like], dim=-1)
    return tuple(
        part.unflatten(2, tensor.shape[2:]) for part, tensor in zip(parts, like, strict=True)
    )
