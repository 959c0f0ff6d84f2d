"""Attention of chunks on four ranks equals attention of the whole sequence, layer by layer."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from models.batch import Context
from models.layers.attention import AttentionCore
from parallel.chunks import Chunks
from parallel.context import divide_attention
from parallel.halo import Halo
from parallel.plan import ContextMethod
from tests.models.helpers import pack
from tests.rank_pool import RankPool

pytestmark = pytest.mark.distributed
B, S, H, HKV, D, DV = 2, 64, 8, 4, 16, 8
DOCUMENTS = [[3, 20, 41], [30, 1, 33]]


def attend_both_ways(method: ContextMethod, window: int) -> list[float]:
    """Return this rank's largest errors of the output and of the gradients of q, k and v."""
    group = torch.distributed.group.WORLD
    chunks = Chunks(group.size(), group.rank())
    core, divided = (
        AttentionCore(scale=D**-0.5, window=window, width=H * (D + DV)) for _ in range(2)
    )
    divide_attention(divided, chunks, group, method)
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, S, H, D), (B, S, HKV, D), (B, S, HKV, DV))
    whole = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    weights = torch.randn(B, S, H, DV, generator=generator)
    positions = pack(DOCUMENTS, 8).positions_BS
    mine = [chunks.take(x).detach().requires_grad_() for x in whole]
    empty = torch.empty(0)

    expected = core.attend(*whole, positions)
    out = divided.mix(mine[0], (mine[1], mine[2]), Context(positions, empty, empty))
    theirs = torch.autograd.grad(expected, whole, weights)
    ours = torch.autograd.grad(out, mine, chunks.take(weights))

    pairs: list[tuple[Tensor, Tensor]] = [(out, expected), *zip(ours, theirs, strict=True)]
    # Absolute: a query that sees itself alone has gradients of zero to both q and k.
    return [float((a - chunks.take(b)).abs().max()) for a, b in pairs]


def errors_by_window(method: ContextMethod, windows: Sequence[int]) -> dict[int, list[float]]:
    """Return them for each window; 0 is none."""
    return {window: attend_both_ways(method, window) for window in windows}


@pytest.mark.parametrize(
    ("method", "windows"),
    # Chunks of 8 tokens: windows of a token, within a chunk, of a chunk, over several, over all.
    [("gather", [0]), ("gather", [1, 2, 8, 9, 20, 63, 200]), ("ring", [0]), ("ulysses", [0, 12])],
)
def test_chunks_attend_as_the_whole_sequence(
    four_ranks: RankPool, method: ContextMethod, windows: list[int]
) -> None:
    for by_window in four_ranks.run(errors_by_window, method, windows):
        for window, errors in by_window.items():
            assert errors == pytest.approx([0] * 4, abs=1e-5), window


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_chunks_are_a_partition_and_balance_causal_work(num_ranks: int) -> None:
    """Every token has one rank; the keys that a rank's queries see are as many on each."""
    tokens = torch.arange(4 * num_ranks)[None]
    parts = [Chunks(num_ranks, rank).take(tokens) for rank in range(num_ranks)]

    assert sorted(torch.cat(parts).flatten().tolist()) == tokens[0].tolist()
    assert len({int((part + 1).sum()) for part in parts}) == 1


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_joining_undoes_splitting(num_ranks: int) -> None:
    whole = torch.randn(B, 12, 5)
    chunks = Chunks(num_ranks, 0)
    parts = chunks.split(whole)

    for rank, part in enumerate(parts):
        assert part.equal(Chunks(num_ranks, rank).take(whole))
    assert chunks.join(parts).equal(whole)


def test_a_halo_is_the_tokens_before_its_chunk() -> None:
    """Two ranks, chunks of 10 tokens: owners and their places, across chunks and at the start."""
    halo = Halo(Chunks(2, 1), 12, None)  # type: ignore[arg-type]

    assert halo.spans(10) == [(0, 20), (8, 30)]
    assert halo.pieces(0, 10) == []
    assert halo.pieces(1, 10) == [(0, 0, 10)]
    assert halo.pieces(2, 10) == [(0, 8, 10), (1, 0, 10)]
    assert halo.pieces(3, 10) == [(1, 8, 10), (1, 10, 20)]
