"""Initial values that do not depend on how the parameters are laid out.

The value of an element is a function of (seed, parameter name, index) alone: values come in blocks
of rows, each from a generator of its own, and a shard draws only the blocks that its rows overlap.
A run on one device and a run on 512 therefore start from the same network.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

ROWS_PER_BLOCK = 128


@dataclass(frozen=True)
class Normal:
    """Independent normal values of mean 0."""

    std: float


@dataclass(frozen=True)
class Constant:
    """The same value everywhere."""

    value: float


@dataclass(frozen=True)
class LogUniform:
    """Logarithms of independent values that are uniform between `low` and `high`."""

    low: float
    high: float


Init = Normal | Constant | LogUniform


def Ones() -> Constant:  # noqa: N802 (reads as one of the initializers)
    """The gain of a plain norm."""
    return Constant(1.0)


def Zeros() -> Constant:  # noqa: N802
    """The gain of a centred norm."""
    return Constant(0.0)


def fan_in(num_inputs: int, *, scale: float = 1.0) -> Normal:
    """Normal values that keep the variance of `num_inputs` summed inputs, times scale squared."""
    return Normal(scale / math.sqrt(num_inputs))


def make_parameter(*shape: int, init: Init) -> nn.Parameter:
    """A parameter without values on the default device; `init` says what to fill it with."""
    parameter = nn.Parameter(torch.empty(*shape))
    parameter.init = init  # type: ignore[attr-defined]
    return parameter


def collect_inits(model: nn.Module) -> dict[str, Init]:
    """The initializer of every parameter by name; call it before sharding replaces them.

    Raises ValueError for a parameter that did not come from `make_parameter`.
    """
    inits: dict[str, Init] = {}
    for name, parameter in model.named_parameters():
        init = getattr(parameter, "init", None)
        if init is None:
            raise ValueError(f"parameter {name} has no initializer: create it by make_parameter")
        inits[name] = init
    return inits


def initialize(model: nn.Module, inits: Mapping[str, Init], seed: int) -> None:
    """Fill the parameters (plain or DTensor) in place, and set every buffer to zero."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _fill(parameter, name.replace("_orig_mod.", ""), inits, seed)
        for buffer in model.buffers():
            buffer.zero_()


def generate_rows(
    name: str, shape: tuple[int, ...], init: Init, seed: int, *, start: int, stop: int
) -> Tensor:
    """Rows [start, stop) of parameter `name` of global shape `shape`, float32 on the CPU."""
    pieces = [block for _, block in _overlapping_blocks(name, shape, init, seed, start, stop)]
    return torch.cat(pieces) if pieces else torch.empty(0, *shape[1:])


def _fill(parameter: Tensor, name: str, inits: Mapping[str, Init], seed: int) -> None:
    shape = tuple(parameter.shape)
    local, offsets = parameter, (0,) * parameter.dim()
    if isinstance(parameter, DTensor):
        local = parameter.to_local()
        _, offsets = compute_local_shape_and_global_offset(
            shape, parameter.device_mesh, parameter.placements
        )
    init = inits[name]
    if isinstance(init, Constant):
        local.fill_(init.value)
    elif local.numel():
        _fill_random(local, offsets, name, shape, init, seed)


def _fill_random(
    local: Tensor,
    offsets: tuple[int, ...],
    name: str,
    shape: tuple[int, ...],
    init: Init,
    seed: int,
) -> None:
    columns = tuple(
        slice(offset, offset + size)
        for offset, size in zip(offsets[1:], local.shape[1:], strict=True)
    )
    start, stop = offsets[0], offsets[0] + local.shape[0]
    for first, block in _overlapping_blocks(name, shape, init, seed, start, stop):
        row = first - start
        local[row : row + len(block)].copy_(block[(slice(None), *columns)])


def _overlapping_blocks(
    name: str, shape: tuple[int, ...], init: Init, seed: int, start: int, stop: int
) -> Iterator[tuple[int, Tensor]]:
    """(first row, rows) of each block, cut to [start, stop); an expert's matrix is a block."""
    rows = 1 if len(shape) > 2 else ROWS_PER_BLOCK
    for index in range(start // rows, -(-stop // rows)):
        first, last = index * rows, min((index + 1) * rows, shape[0])
        block = _generate_block(f"{seed}/{name}/{index}", (last - first, *shape[1:]), init)
        low, high = max(first, start), min(last, stop)
        yield low, block[low - first : high - first]


def _generate_block(key: str, shape: tuple[int, ...], init: Init) -> Tensor:
    if isinstance(init, Constant):
        return torch.full(shape, init.value)
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    values = torch.empty(shape, device="cpu")
    if isinstance(init, LogUniform):
        return values.uniform_(init.low, init.high, generator=generator).log_()
    return values.normal_(0.0, init.std, generator=generator)
