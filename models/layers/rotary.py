"""Rotary position embedding (RoFormer, arXiv:2104.09864) with YaRN scaling (arXiv:2309.00071).

B batch, S sequence, H heads, R rotary pairs: 2R dimensions are rotated.
"""

import math

import msgspec
import torch
from torch import Tensor

from models.batch import Context


class Yarn(msgspec.Struct, frozen=True, kw_only=True):
    """Stretching of the slow frequencies to contexts `factor` times the original."""

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


def yarn_scale(factor: float, mscale: float) -> float:
    """The factor on queries and keys alike that YaRN derives for a stretched context."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotary_context(positions_BS: Tensor, dim: int, theta: float, yarn: Yarn | None) -> Context:
    """The context of a forward pass, with the tables of cosines and sines of its positions."""
    frequencies = _frequencies(dim, theta, yarn, positions_BS.device)
    angles_BSR = positions_BS[..., None].float() * frequencies
    return Context(positions_BS, angles_BSR.cos(), angles_BSR.sin())


def rotate_adjacent(x_BSHD: Tensor, context: Context) -> Tensor:
    """Rotate the pairs (0, 1), (2, 3), ... of the last dimension, D = 2R."""
    cos, sin = _tables(x_BSHD, context)
    even, odd = x_BSHD.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


def rotate_halves(x_BSHD: Tensor, context: Context) -> Tensor:
    """Rotate the pairs (i, i + R) of the last dimension, D = 2R."""
    cos, sin = _tables(x_BSHD, context)
    first, second = x_BSHD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _tables(x_BSHD: Tensor, context: Context) -> tuple[Tensor, Tensor]:
    """Cosines and sines (B,S,1,R) in the dtype of x: angles are exact, products need not be."""
    dtype = x_BSHD.dtype
    return context.cos_BSR[:, :, None].to(dtype), context.sin_BSR[:, :, None].to(dtype)


def _frequencies(dim: int, theta: float, yarn: Yarn | None, device: torch.device) -> Tensor:
    """(R,) float32 radians per position."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    frequencies = 1.0 / theta**exponents
    if yarn is None or yarn.factor <= 1:
        return frequencies
    low = max(math.floor(_dimension_of(yarn.beta_fast, dim, theta, yarn.original_context)), 0)
    high = min(math.ceil(_dimension_of(yarn.beta_slow, dim, theta, yarn.original_context)), dim - 1)
    pairs = torch.arange(dim // 2, dtype=torch.float32, device=device)
    stretched = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies * (1 - stretched) + frequencies / yarn.factor * stretched


def _dimension_of(rotations: float, dim: int, theta: float, context: int) -> float:
    """The (fractional) pair that turns `rotations` times over the original context."""
    return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))
