"""Attention in tiles of queries: plain batched products that run on any device.

Tiles of a few queries and heads meet the keys that they may see, so memory is linear in the
sequence, a window costs only its own keys, and query heads share their key without a copy of it.
On a CPU this beats the flash kernel of ATen for the widths of MLA and for short sequences, and it
takes different widths of keys and values as they are.

B batch, S sequence, H query heads, N = B times key/value heads, G query heads per key head,
L length of a segment, D head width.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

TILE_QUERIES = 128
TILE_SCORES = 1 << 19
"""Scores of one tile: 2 MiB in float32, about what a core's cache holds."""


class Segment(NamedTuple):
    """A document, in one row of the batch or at the same place in all rows."""

    rows: slice
    start: int
    stop: int


class Tile(NamedTuple):
    """Queries [start, stop) of the folded heads `heads`, which see keys of [first_key, stop_key).

    Query `start` stands at key `first_query`, which may lie beyond the keys.
    """

    heads: slice
    start: int
    stop: int
    first_key: int
    stop_key: int
    first_query: int


def find_segments(positions_BS: Tensor, first_query: int, num_keys: int) -> list[Segment]:
    """The documents of a packed batch; rows with the same boundaries are taken together.

    Those without queries, which end before token `first_query`, are left out, and those without
    keys, which begin behind the first `num_keys` tokens.
    """
    B, S = positions_BS.shape
    starts: list[list[int]] = [[0] for _ in range(B)]
    for row, column in torch.nonzero(positions_BS == 0).tolist():
        if column:
            starts[row].append(column)
    if all(row == starts[0] for row in starts):
        starts, rows = starts[:1], [slice(0, B)]
    else:
        rows = [slice(row, row + 1) for row in range(B)]
    return [
        Segment(row, start, stop)
        for row, cuts in zip(rows, starts, strict=True)
        for start, stop in zip(cuts, [*cuts[1:], S], strict=True)
        if stop > first_query and start < num_keys
    ]


def forward(
    q: Tensor, k: Tensor, v: Tensor, positions_BS: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """(out (B,S,H,Dv), log-sum-exp (B,H,S) float32) for q (B,S,H,D), k (B,Sk,Hkv,D), v."""
    B, S, H, _ = q.shape
    first_query, num_keys = positions_BS.shape[1] - S, k.shape[1]
    # What a query without keys has; the others overwrite it.
    out = q.new_zeros(B, S, H, v.shape[-1])
    lse = q.new_full((B, H, S), float("-inf"), dtype=torch.float32)
    for segment in find_segments(positions_BS, first_query, num_keys):
        shift = max(first_query - segment.start, 0)
        outputs = _segment_forward(*_fold_all(segment, q, k, v, first_query), shift, scale, window)
        where = _queries(segment, first_query)
        out[where] = _unfold(outputs[0], out[where])
        lse[segment.rows, :, where[1]] = outputs[1].view_as(lse[segment.rows, :, where[1]])
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    positions_BS: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv), contiguous, of the shapes of q, k and v."""
    first_query, num_keys = positions_BS.shape[1] - q.shape[1], k.shape[1]
    # Zeros where a key may have no query, or a query no key.
    make = torch.zeros if first_query else torch.empty
    gradients = tuple(make(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    for segment in find_segments(positions_BS, first_query, num_keys):
        shift = max(first_query - segment.start, 0)
        where = _queries(segment, first_query)
        q4, k3, v3 = _fold_all(segment, q, k, v, first_query)
        heads = k.shape[2]
        do4, o4 = (_fold(x[where], heads) for x in (dout, out))
        delta = torch.linalg.vecdot(do4.float(), o4.float())
        lse3 = lse[segment.rows, :, where[1]].reshape(delta.shape)
        parts = _segment_backward(do4, q4, k3, v3, lse3, delta, shift, scale, window)
        for whole, part, at in zip(gradients, parts, (where, *[_keys(segment)] * 2), strict=True):
            whole[at] = _unfold(part, whole[at])
    return gradients[0], gradients[1], gradients[2]


def _keys(segment: Segment) -> tuple[slice, slice]:
    return segment.rows, slice(segment.start, segment.stop)


def _queries(segment: Segment, first_query: int) -> tuple[slice, slice]:
    start = max(segment.start - first_query, 0)
    return segment.rows, slice(start, segment.stop - first_query)


def _fold(x_BLHD: Tensor, num_kv_heads: int) -> Tensor:
    """(b, L, H, D) to (N, G, L, D), a view where the memory allows."""
    b, L, H, D = x_BLHD.shape
    return x_BLHD.transpose(1, 2).reshape(b * num_kv_heads, H // num_kv_heads, L, D)


def _unfold(x: Tensor, like_BLHD: Tensor) -> Tensor:
    """(N, G, L, D) or (N, L, D) back to (b, L, H, D)."""
    b, L, H, D = like_BLHD.shape
    return x.view(b, H, L, D).transpose(1, 2)


def _fold_all(
    segment: Segment, q: Tensor, k: Tensor, v: Tensor, first_query: int
) -> tuple[Tensor, Tensor, Tensor]:
    keys, heads = _keys(segment), k.shape[2]
    k4, v4 = _fold(k[keys], heads), _fold(v[keys], heads)
    q4 = _fold(q[_queries(segment, first_query)], heads)
    return q4, k4.squeeze(1), v4.squeeze(1)


def _tiles(q4: Tensor, k3: Tensor, shift: int, window: int) -> Iterator[Tile]:
    """Yield the tiles of a segment whose first query stands at key `shift`."""
    N, G, L, _ = q4.shape
    for start in range(0, L, TILE_QUERIES):
        stop = min(start + TILE_QUERIES, L)
        first_key = max(0, start + shift - window + 1) if window else 0
        stop_key = min(stop + shift, k3.shape[1])
        step = max(1, TILE_SCORES // (G * (stop - start) * (stop_key - first_key)))
        for head in range(0, N, step):
            heads = slice(head, min(head + step, N))
            yield Tile(heads, start, stop, first_key, stop_key, start + shift)


def _scores(q4: Tensor, k3: Tensor, tile: Tile, scale: float, window: int) -> Tensor:
    """float32 scores (n, G, queries, keys) of a tile, minus infinity where a key is not seen."""
    heads, start, stop, first, last, first_query = tile
    q3 = q4[heads, :, start:stop].flatten(1, 2)
    raw = torch.baddbmm(
        q3.new_zeros(()), q3, k3[heads, first:last].transpose(1, 2), beta=0, alpha=scale
    )
    scores = raw.float().view(q3.shape[0], -1, stop - start, last - first)
    queries = torch.arange(first_query, first_query + stop - start, device=q3.device)[:, None]
    # Only the last keys of a full tile lie after some query; a window also has a left edge.
    masked_from = first if window else min(first_query, last)
    keys = torch.arange(masked_from, last, device=q3.device)
    unseen = keys > queries
    if window:
        unseen |= keys <= queries - window
    scores[..., masked_from - first :].masked_fill_(unseen, float("-inf"))
    return scores


def _segment_forward(
    q4: Tensor, k3: Tensor, v3: Tensor, shift: int, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    N, G, L, _ = q4.shape
    out = q4.new_empty(N, G, L, v3.shape[-1])
    lse = q4.new_empty(N, G, L, dtype=torch.float32)
    for tile in _tiles(q4, k3, shift, window):
        heads, start, stop, first, last, _ = tile
        scores = _scores(q4, k3, tile, scale, window)
        weights = torch.softmax(scores, dim=-1)
        # The largest weight is exp(largest score - lse): one fused pass less than logsumexp.
        lse[heads, :, start:stop] = scores.amax(-1) - weights.amax(-1).log()
        product = torch.bmm(weights.to(v3.dtype).flatten(1, 2), v3[heads, first:last])
        out[heads, :, start:stop] = product.view(out[heads, :, start:stop].shape)
    return out, lse


def _segment_backward(
    do4: Tensor,
    q4: Tensor,
    k3: Tensor,
    v3: Tensor,
    lse: Tensor,
    delta: Tensor,
    shift: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    dq = torch.empty_like(q4)
    # Keys meet several tiles: their gradients are summed in float32.
    dk = torch.zeros(k3.shape, dtype=torch.float32, device=k3.device)
    dv = torch.zeros(v3.shape, dtype=torch.float32, device=v3.device)
    for tile in _tiles(q4, k3, shift, window):
        heads, start, stop, first, last, _ = tile
        do3 = do4[heads, :, start:stop].flatten(1, 2)
        q3 = q4[heads, :, start:stop].flatten(1, 2)
        keys, values = k3[heads, first:last], v3[heads, first:last]
        scores = _scores(q4, k3, tile, scale, window)
        weights = scores.sub_(lse[heads, :, start:stop, None]).exp_()
        products = torch.bmm(do3, values.transpose(1, 2)).view(weights.shape)
        dscores = products.float().sub_(delta[heads, :, start:stop, None]).mul_(weights)
        weights, dscores = (x.to(q3.dtype).flatten(1, 2) for x in (weights, dscores))
        _accumulate(dv[heads, first:last], weights.transpose(1, 2), do3, 1.0)
        _accumulate(dk[heads, first:last], dscores.transpose(1, 2), q3, scale)
        product = torch.baddbmm(q3.new_zeros(()), dscores, keys, beta=0, alpha=scale)
        dq[heads, :, start:stop] = product.view(dq[heads, :, start:stop].shape)
    return dq, dk.to(k3.dtype), dv.to(v3.dtype)


def _accumulate(total: Tensor, a: Tensor, b: Tensor, alpha: float) -> None:
    """total += alpha * a @ b, in the dtype of the total."""
    if a.dtype == total.dtype:
        total.baddbmm_(a, b, alpha=alpha)
    else:
        total.add_(torch.bmm(a, b), alpha=alpha)
