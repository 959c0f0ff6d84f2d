"""Attention to chosen entries: each query gathers its own few of a row's compressed entries.

An entry is key and value in one, shared by all heads. Queries come in tiles: the peak is what one
tile gathers, 2^22 values or those of one query, and what is kept for backward is linear in the
sequence.

`titanbench::chosen_attention` is one operator on every device, as `titanbench::attention` is.

B batch, S sequence, T their product, H heads, D width, E entries of a row, K chosen per query.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

TILE_VALUES = 1 << 22


@torch.library.custom_op("titanbench::chosen_attention", mutates_args=())
def chosen_attention(
    q: Tensor, entries: Tensor, chosen: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Softmax attention of q (B,S,H,D) to the entries (B,E,D) that each query has chosen.

    chosen (B,S,K) int32 numbers of entries in the row, -1 for none. Returns out (B,S,H,D) and the
    log-sum-exp of the scores (B,H,S) in float32: zeros and minus infinity where nothing is chosen.
    """
    B, S, H, _ = q.shape
    out = q.new_empty(q.shape)
    lse = q.new_empty(B, S, H, dtype=torch.float32)
    q_THD, out_THD, lse_TH = q.flatten(0, 1), out.flatten(0, 1), lse.flatten(0, 1)
    rows_TK, table = _rows(entries, chosen), entries.flatten(0, 1)
    for tile in _tiles(rows_TK, table):
        keys = _gather(table, rows_TK[tile])
        scores = _scores(q_THD[tile], keys, rows_TK[tile], scale)
        tile_lse = torch.logsumexp(scores, dim=-1)
        finite = tile_lse.masked_fill(tile_lse == float("-inf"), 0.0)
        weights = scores.sub_(finite[..., None]).exp_()
        out_THD[tile] = torch.bmm(weights.to(q.dtype), keys)
        lse_TH[tile] = tile_lse
    return out, lse.transpose(1, 2).contiguous()


@chosen_attention.register_fake
def _(q: Tensor, entries: Tensor, chosen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    B, S, H, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(B, H, S, dtype=torch.float32)


@torch.library.custom_op("titanbench::chosen_attention_backward", mutates_args=())
def chosen_attention_backward(
    dout: Tensor,
    q: Tensor,
    entries: Tensor,
    out: Tensor,
    lse: Tensor,
    chosen: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Gradients of q and of the entries, from an output and its log-sum-exp.

    Both may be those of a softmax over more keys than these entries: see joint_attention.
    """
    dq = q.new_empty(q.shape)
    q_THD, dout_THD, dq_THD = q.flatten(0, 1), dout.flatten(0, 1), dq.flatten(0, 1)
    lse_TH = lse.transpose(1, 2).flatten(0, 1)
    delta_TH = torch.linalg.vecdot(dout.float(), out.float()).flatten(0, 1)
    rows_TK, table = _rows(entries, chosen), entries.flatten(0, 1)
    # An entry meets many queries: its gradient is summed in float32.
    dtable = torch.zeros(table.shape, dtype=torch.float32, device=table.device)
    for tile in _tiles(rows_TK, table):
        keys, q_tile, dout_tile = _gather(table, rows_TK[tile]), q_THD[tile], dout_THD[tile]
        scores = _scores(q_tile, keys, rows_TK[tile], scale)
        weights = scores.sub_(lse_TH[tile][..., None]).exp_()
        products = torch.bmm(dout_tile, keys.transpose(1, 2)).float()
        dscores = products.sub_(delta_TH[tile][..., None]).mul_(weights).mul_(scale)
        weights, dscores = weights.to(q.dtype), dscores.to(q.dtype)
        dq_THD[tile] = torch.bmm(dscores, keys)
        dkeys = torch.bmm(weights.transpose(1, 2), dout_tile)
        dkeys += torch.bmm(dscores.transpose(1, 2), q_tile)
        dtable.index_add_(0, rows_TK[tile].clamp_min(0).flatten(), dkeys.flatten(0, 1).float())
    return dq, dtable.to(entries.dtype).view(entries.shape)


@chosen_attention_backward.register_fake
def _(
    dout: Tensor,
    q: Tensor,
    entries: Tensor,
    out: Tensor,
    lse: Tensor,
    chosen: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), entries.new_empty(entries.shape)


def _rows(entries: Tensor, chosen: Tensor) -> Tensor:
    """(T,K) the rows of the batch's table of entries that are chosen, negative for none."""
    B, E, _ = entries.shape
    offsets_B11 = torch.arange(B, dtype=chosen.dtype, device=chosen.device)[:, None, None] * E
    return torch.where(chosen < 0, -1, chosen + offsets_B11).flatten(0, 1)


def _tiles(rows_TK: Tensor, table: Tensor) -> Iterator[slice]:
    T, K = rows_TK.shape
    step = max(1, TILE_VALUES // max(1, K * table.shape[1]))
    return (slice(start, start + step) for start in range(0, T, step))


def _gather(table: Tensor, rows_tK: Tensor) -> Tensor:
    """(t,K,D): the first entry stands where nothing is chosen."""
    return table.index_select(0, rows_tK.clamp_min(0).flatten()).unflatten(0, rows_tK.shape)


def _scores(q_tHD: Tensor, keys_tKD: Tensor, rows_tK: Tensor, scale: float) -> Tensor:
    """float32 scores (t,H,K), minus infinity where nothing is chosen."""
    raw = torch.baddbmm(q_tHD.new_zeros(()), q_tHD, keys_tKD.mT, beta=0, alpha=scale)
    return raw.float().masked_fill_((rows_tK < 0)[:, None], float("-inf"))


@register_flop_formula(torch.ops.titanbench.chosen_attention)
def chosen_attention_flops(
    q_shape: torch.Size, entries_shape: torch.Size, chosen_shape: torch.Size, *_: Any, **__: Any
) -> int:
    """Two products with the chosen entries."""
    return 4 * q_shape.numel() * chosen_shape[2]


@register_flop_formula(torch.ops.titanbench.chosen_attention_backward)
def chosen_attention_backward_flops(
    dout_shape: torch.Size,
    q_shape: torch.Size,
    entries_shape: torch.Size,
    out_shape_: torch.Size,
    lse_shape: torch.Size,
    chosen_shape: torch.Size,
    *_: Any,
    **__: Any,
) -> int:
    """Five products: the scores again (in no model FLOPs), dV, dP, dQ and dK."""
    return 10 * q_shape.numel() * chosen_shape[2]
