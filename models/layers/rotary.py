"""Rotary position embedding (RoFormer, arXiv:2104.09864), stretched by YaRN or as in Llama 3.1.

B batch, S sequence, H heads, R rotary pairs: 2R dimensions are rotated.
"""

import math

import msgspec
import torch
from torch import Tensor

from models.batch import Context


class Yarn(msgspec.Struct, frozen=True, kw_only=True):
    """Stretching of the slow frequencies (arXiv:2309.00071), in proportion by pair."""

    factor: float
    original_context: int
    beta_fast: float = 32.0
    """Pairs that turn this often or more over the original context keep their frequency."""
    beta_slow: float = 1.0
    """Pairs that turn this often or less are stretched by the whole factor."""
    whole_pairs: bool = True
    """Whether both bounds are rounded outwards to whole pairs."""


class Llama3Scaling(msgspec.Struct, frozen=True, kw_only=True):
    """Stretching of the slow frequencies as in Llama 3.1, in proportion by frequency."""

    factor: float
    original_context: int
    low_frequency_factor: float = 1.0
    """Frequencies of this many turns or fewer over the original context are divided by `factor`."""
    high_frequency_factor: float = 4.0
    """Frequencies of this many turns or more stay."""


RotaryScaling = Yarn | Llama3Scaling


def yarn_scale(factor: float, mscale: float) -> float:
    """The factor on queries and keys alike that YaRN derives for a stretched context."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotary_context(
    positions_BS: Tensor, dim: int, theta: float, scaling: RotaryScaling | None
) -> Context:
    """The context of a forward pass, with the tables of cosines and sines of its positions."""
    frequencies = rotary_frequencies(dim, theta, scaling, positions_BS.device)
    angles_BSR = positions_BS[..., None].float() * frequencies
    return Context(positions_BS, angles_BSR.cos(), angles_BSR.sin())


def interleaved_context(
    positions_BS: Tensor, axes_ABS: Tensor, theta: float, sections: tuple[int, ...]
) -> Context:
    """The context where pairs turn by positions on several axes (interleaved MRoPE of Qwen3-VL).

    sections (A,): the number of pairs of each axis; axis a > 0 has every A-th pair from the a-th
    on, as many as its section says, the first axis all others.
    """
    pairs = torch.arange(sum(sections), device=positions_BS.device)
    turn = pairs % len(sections)
    limits = torch.tensor(sections, device=positions_BS.device)[turn] * len(sections)
    axis_R = turn.where(pairs < limits, 0)
    frequencies = rotary_frequencies(2 * sum(sections), theta, None, positions_BS.device)
    angles_BSR = axes_ABS.float()[axis_R].movedim(0, -1) * frequencies
    return Context(positions_BS, angles_BSR.cos(), angles_BSR.sin())


def rotate_adjacent(x_BSHD: Tensor, context: Context) -> Tensor:
    """Rotate the pairs (0, 1), (2, 3), ... of the last dimension, D = 2R.

    As complex numbers: products of pairs at a stride of two are several times slower on a CPU.
    """
    turns_BS1R = torch.complex(context.cos_BSR, context.sin_BSR)[:, :, None]
    pairs = torch.view_as_complex(x_BSHD.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns_BS1R).flatten(-2).to(x_BSHD.dtype)


def rotate_halves(x_BSHD: Tensor, context: Context) -> Tensor:
    """Rotate the pairs (i, i + R) of the first 2R of the last dimension; the rest stays."""
    cos = context.cos_BSR[:, :, None].to(x_BSHD.dtype)
    sin = context.sin_BSR[:, :, None].to(x_BSHD.dtype)
    R, D = cos.shape[-1], x_BSHD.shape[-1]
    first, second, rest = x_BSHD.split((R, R, D - 2 * R), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def rotary_frequencies(
    dim: int, theta: float, scaling: RotaryScaling | None, device: torch.device
) -> Tensor:
    """(R,) float32 radians per position."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    frequencies = 1.0 / theta**exponents
    if scaling is None or scaling.factor <= 1:
        return frequencies
    if isinstance(scaling, Yarn):
        stretched = _yarn_share(scaling, dim, theta, device)
    else:
        stretched = _llama3_share(scaling, frequencies)
    return frequencies * (1 - stretched) + frequencies / scaling.factor * stretched


def _yarn_share(yarn: Yarn, dim: int, theta: float, device: torch.device) -> Tensor:
    """(R,) from 0 for a pair that keeps its frequency to 1 for one that is stretched."""
    low = _dimension_of(yarn.beta_fast, dim, theta, yarn.original_context)
    high = _dimension_of(yarn.beta_slow, dim, theta, yarn.original_context)
    if yarn.whole_pairs:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    pairs = torch.arange(dim // 2, dtype=torch.float32, device=device)
    return ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)


def _llama3_share(scaling: Llama3Scaling, frequencies: Tensor) -> Tensor:
    """(R,) from 0 for a frequency that stays to 1 for one that is stretched."""
    turns = scaling.original_context * frequencies / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    return ((high - turns) / (high - low)).clamp(0, 1)


def _dimension_of(rotations: float, dim: int, theta: float, context: int) -> float:
    """The (fractional) pair that turns `rotations` times over the original context."""
    return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))
