"""The choice of an indexer: the compressed entries that each query will attend to.

A query's score of an entry is a weighted sum over index heads of the positive parts of their
products. The order of scores is all that matters: positive factors common to them are left out.
Queries come in tiles: the peak is one tile's products, 2^22 or those of one query per row.

B batch, S sequence, H index heads, D their width, E entries of a row, K chosen per query.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from models.ops import gym_sparse
from models.ops.kernels import find_machine, indexer_kernel

TILE_PRODUCTS = 1 << 22


@torch.library.custom_op("titanbench::choose_entries", mutates_args=())
def choose_entries(
    q: Tensor,
    keys: Tensor,
    weights: Tensor,
    positions: Tensor,
    first: Tensor,
    last: Tensor,
    block: int,
    num_chosen: int,
) -> Tensor:
    """The entries of highest score, (B,S,K) int32 with K = min(num_chosen, E); -1 where fewer.

    q (B,S,H,D), keys (B,E,D), weights (B,S,H), positions (B,S) int64, 0 where a document starts; a
    query chooses among entries [first, last), int64 (B,S) both, of which last is at most
    (t + 1) / block for query t of a row. Not differentiable.
    """
    if kernel_of(q) != "tiles":
        return gym_sparse.choose_entries(q, keys, weights, positions, first, block, num_chosen)
    return _choose_in_tiles(q, keys, weights, first, last, block, num_chosen)


@choose_entries.register_fake
def _(
    q: Tensor,
    keys: Tensor,
    weights: Tensor,
    positions: Tensor,
    first: Tensor,
    last: Tensor,
    block: int,
    num_chosen: int,
) -> Tensor:
    shape = (*q.shape[:2], min(num_chosen, keys.shape[1]))
    return q.new_empty(shape, dtype=torch.int32)


def kernel_of(q: Tensor) -> str:
    """The name of the kernel that serves queries like these."""
    return indexer_kernel(find_machine(q.device.type), q.dtype, *q.shape[2:])


def _choose_in_tiles(
    q: Tensor,
    keys: Tensor,
    weights: Tensor,
    first: Tensor,
    last: Tensor,
    block: int,
    num_chosen: int,
) -> Tensor:
    B, S, H, _ = q.shape
    chosen = q.new_full((B, S, min(num_chosen, keys.shape[1])), -1, dtype=torch.int32)
    step = max(1, TILE_PRODUCTS // max(1, B * H * keys.shape[1]))
    for start in range(block - 1, S, step):
        tile = slice(start, min(start + step, S))
        seen = min(tile.stop // block, keys.shape[1])
        products = torch.bmm(q[:, tile].flatten(1, 2), keys[:, :seen].mT).relu_()
        products = products.float().view(-1, H, seen)
        scores = torch.bmm(weights[:, tile].float().reshape(-1, 1, H), products)
        scores = scores.view(B, -1, seen)
        number = torch.arange(seen, device=q.device)
        unseen = (number < first[:, tile, None]) | (number >= last[:, tile, None])
        best = scores.masked_fill_(unseen, float("-inf")).topk(min(seen, chosen.shape[2]))
        numbers = best.indices.masked_fill_(best.values == float("-inf"), -1)
        chosen[:, tile, : numbers.shape[2]] = numbers.int()
    return chosen


@register_flop_formula(torch.ops.titanbench.choose_entries)
def choose_entries_flops(q_shape: torch.Size, keys_shape: torch.Size, *_: Any, **__: Any) -> int:
    """One product with all entries of the row; the sum over heads is in no convention."""
    return 2 * q_shape.numel() * keys_shape[1]
