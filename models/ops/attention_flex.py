"""Attention by FlexAttention: a generated kernel for any dtype and any width of heads.

It serves where flash does not. The keys that a query sees are an interval: from the start of its
document, or of its window, to itself. Backward runs the kernel again, as its gradients are known to
autograd alone; with output and log-sum-exp of more keys than these, what the other keys change in
the scores' gradient goes in as a gradient of this part's log-sum-exp.

B batch, S sequence, Sk keys, H query heads, Hkv key/value heads, D and Dv widths.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from models.ops.recorded import leaves, recorded


def forward(
    q: Tensor, k: Tensor, v: Tensor, positions_BS: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """(out (B,S,H,Dv), log-sum-exp (B,H,S) float32) for q (B,S,H,D), k (B,Sk,Hkv,D), v."""
    mask = block_mask(q, k, positions_BS, window)
    out, lse = _attend(q, k, v, mask=mask, scale=scale)
    return out.contiguous(), lse


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
    """Gradients (dq, dk, dv), contiguous, of the shapes of q, k and v.

    With P the weights of these keys alone, s = exp(their log-sum-exp - lse) their share of the
    softmax and delta = rowsum(dout * out), the scores' gradient is s P (dout v^T - delta). The
    kernel makes P (d v^T - rowsum(d * its out) + dlse) of gradients d and dlse: d = s dout, and
    dlse = rowsum(d * its out) - s delta.
    """
    mask = block_mask(q, k, positions_BS, window)
    with recorded():
        inputs = leaves(q, k, v)
        part, part_lse = _attend(*inputs, mask=mask, scale=scale)
    with torch.no_grad():
        # 0 for a query that sees none of these keys, even if it sees no others either.
        share_BHS = torch.exp(part_lse - lse).masked_fill_(part_lse == float("-inf"), 0.0)
        dpart = dout * share_BHS.transpose(1, 2)[..., None].to(dout.dtype)
        dlse = torch.linalg.vecdot(dpart.float(), part.float()).transpose(1, 2)
        dlse -= torch.linalg.vecdot(dout.float(), out.float()).transpose(1, 2) * share_BHS
    dq, dk, dv = torch.autograd.grad((part, part_lse), inputs, (dpart, dlse))
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


def block_mask(q: Tensor, k: Tensor, positions_BS: Tensor, window: int) -> BlockMask:
    """The blocks of keys that blocks of queries see, and which keys within them.

    The queries are those of the last tokens, the keys those of the first.
    """
    B, num_tokens = positions_BS.shape
    place = torch.arange(num_tokens, device=q.device)
    first = torch.where(positions_BS == 0, place, 0).cummax(dim=1).values
    if window:
        first = torch.maximum(first, place - window + 1)
    first_BQ, place_Q = first[:, -q.shape[1] :].contiguous(), place[-q.shape[1] :]

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (first_BQ[row, query] <= key) & (key <= place_Q[query])

    create = _fused(create_block_mask, q.device.type)
    return create(sees, B, None, q.shape[1], k.shape[1], device=q.device)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, *, mask: BlockMask, scale: float
) -> tuple[Tensor, Tensor]:
    """(out (B,S,H,Dv), log-sum-exp (B,H,S) float32)."""
    out, aux = _fused(flex_attention, q.device.type)(
        *(x.transpose(1, 2) for x in (q, k, v)),
        block_mask=mask,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
        return_aux=AuxRequest(lse=True),
    )
    return out.transpose(1, 2), aux.lse


def _fused(function: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """The function as one generated kernel; on a CPU, which has none with gradients, as it is."""
    return function if device_type == "cpu" else _compiled(function)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)
