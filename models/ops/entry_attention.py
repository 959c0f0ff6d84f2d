"""Attention to compressed entries: every entry of the document that closed before the query.

An entry stands for a block of tokens and is key and value in one; all heads share it. Queries come
in tiles, so that scores never exist for all of them at once: the peak is one tile's, 2^20 scores or
those of one query per row, and what is kept for backward is linear in the sequence.

`titanbench::entry_attention` is one operator on every device, as `titanbench::attention` is.

B batch, S sequence, H heads, D width, E entries of a row (S over the tokens of an entry).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

TILE_SCORES = 1 << 20


@torch.library.custom_op("titanbench::entry_attention", mutates_args=())
def entry_attention(
    q: Tensor, entries: Tensor, first: Tensor, last: Tensor, block: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Softmax attention of q (B,S,H,D) to entries (B,E,D), numbered by row as their blocks close.

    Query t of a row sees entries [first, last), int64 (B,S) both; `block` tokens make an entry, so
    last is at most (t + 1) / block. Returns out (B,S,H,D) and the log-sum-exp of the scores (B,H,S)
    in float32: zeros and minus infinity for a query that sees none.
    """
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), float("-inf"), dtype=torch.float32)
    for queries, seen in _tiles(q, entries, block):
        keys = entries[:, :seen]
        scores = _scores(q[:, queries], keys, first[:, queries], last[:, queries], scale)
        tile_lse = torch.logsumexp(scores, dim=-1)
        weights = scores.sub_(_finite(tile_lse)[..., None]).exp_()
        product = torch.bmm(weights.to(q.dtype).flatten(1, 2), keys)
        out[:, queries] = product.view(out[:, queries].shape)
        lse[:, :, queries] = tile_lse.transpose(1, 2)
    return out, lse


@entry_attention.register_fake
def _(
    q: Tensor, entries: Tensor, first: Tensor, last: Tensor, block: int, scale: float
) -> tuple[Tensor, Tensor]:
    B, S, H, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(B, H, S, dtype=torch.float32)


@torch.library.custom_op("titanbench::entry_attention_backward", mutates_args=())
def entry_attention_backward(
    dout: Tensor,
    q: Tensor,
    entries: Tensor,
    out: Tensor,
    lse: Tensor,
    first: Tensor,
    last: Tensor,
    block: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Gradients of q and of the entries, from an output and its log-sum-exp.

    Both may be those of a softmax over more keys than these entries: see joint_attention.
    """
    dq = torch.zeros_like(q, memory_format=torch.contiguous_format)
    dentries = torch.zeros(entries.shape, dtype=torch.float32, device=entries.device)
    delta_BSH = torch.linalg.vecdot(dout.float(), out.float())
    for queries, seen in _tiles(q, entries, block):
        keys, q_tile = entries[:, :seen], q[:, queries]
        scores = _scores(q_tile, keys, first[:, queries], last[:, queries], scale)
        weights = scores.sub_(lse[:, :, queries].transpose(1, 2)[..., None]).exp_()
        dout_tile = dout[:, queries].flatten(1, 2)
        products = torch.bmm(dout_tile, keys.transpose(1, 2)).view(weights.shape)
        dscores = products.float().sub_(delta_BSH[:, queries, :, None]).mul_(weights)
        weights, dscores = (x.to(q.dtype).flatten(1, 2) for x in (weights, dscores.mul_(scale)))
        dentries[:, :seen] += torch.bmm(weights.transpose(1, 2), dout_tile)
        dentries[:, :seen] += torch.bmm(dscores.transpose(1, 2), q_tile.flatten(1, 2))
        dq[:, queries] = torch.bmm(dscores, keys).view(q_tile.shape)
    return dq, dentries.to(entries.dtype)


@entry_attention_backward.register_fake
def _(
    dout: Tensor,
    q: Tensor,
    entries: Tensor,
    out: Tensor,
    lse: Tensor,
    first: Tensor,
    last: Tensor,
    block: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), entries.new_empty(entries.shape)


def _tiles(q: Tensor, entries: Tensor, block: int) -> Iterator[tuple[slice, int]]:
    """Queries, and how many entries of a row the last of them can see; without tiles that see none.

    From their place in the row alone: on a GPU nobody waits for the documents' boundaries.
    """
    B, S, H, _ = q.shape
    step = max(1, TILE_SCORES // max(1, B * H * entries.shape[1]))
    for start in range(block - 1, S, step):
        stop = min(start + step, S)
        yield slice(start, stop), min(stop // block, entries.shape[1])


def _scores(q: Tensor, keys: Tensor, first: Tensor, last: Tensor, scale: float) -> Tensor:
    """float32 scores (B, queries, H, entries), minus infinity where an entry is not seen."""
    raw = torch.baddbmm(q.new_zeros(()), q.flatten(1, 2), keys.transpose(1, 2), beta=0, alpha=scale)
    scores = raw.float().view(*q.shape[:3], keys.shape[1])
    number = torch.arange(keys.shape[1], device=q.device)
    unseen = (number < first[..., None]) | (number >= last[..., None])
    return scores.masked_fill_(unseen[:, :, None], float("-inf"))


def _finite(lse: Tensor) -> Tensor:
    """The log-sum-exp, 0 where it is that of nothing: exp(-inf - 0) is the weight 0."""
    return lse.masked_fill(lse == float("-inf"), 0.0)


@register_flop_formula(torch.ops.titanbench.entry_attention)
def entry_attention_flops(
    q_shape: torch.Size, entries_shape: torch.Size, *_: Any, **__: Any
) -> int:
    """Two products with all entries of the row (the `full` convention of models.counts)."""
    return 4 * q_shape.numel() * entries_shape[1]


@register_flop_formula(torch.ops.titanbench.entry_attention_backward)
def entry_attention_backward_flops(
    dout_shape: torch.Size,
    q_shape: torch.Size,
    entries_shape: torch.Size,
    *_: Any,
    **__: Any,
) -> int:
    """Five products: the scores again (in no model FLOPs), dV, dP, dQ and dK."""
    return 10 * q_shape.numel() * entries_shape[1]
