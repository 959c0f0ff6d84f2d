"""Attention without causality, between the patches of one image: softmax(q k^T) v in tiles.

Plain products on every device: an image has a thousand patches or so, whatever the sequence. Tiles
are of heads and images; the peak is 2^22 scores, or those of one head of one image.

`titanbench::bidirectional_attention` is one operator on every device, as `titanbench::attention`.

I images, P patches, H heads, D head width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

TILE_SCORES = 1 << 22


@torch.library.custom_op("titanbench::bidirectional_attention", mutates_args=())
def bidirectional_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(out (I,P,H,D), log-sum-exp of the scores (I,H,P) float32) for q, k and v (I,P,H,D)."""
    I, P, H, D = q.shape  # noqa: E741
    out = q.new_empty(I, H, P, D)
    lse = q.new_empty(I, H, P, dtype=torch.float32)
    q3, k3, v3 = (_by_head(x) for x in (q, k, v))
    out3, lse2 = out.flatten(0, 1), lse.flatten(0, 1)
    for start in range(0, I * H, _step(P)):
        tile = slice(start, start + _step(P))
        scores = _scores(q3[tile], k3[tile], scale)
        lse2[tile] = torch.logsumexp(scores, dim=-1)
        weights = scores.sub_(lse2[tile, :, None]).exp_().to(v.dtype)
        out3[tile] = torch.bmm(weights, v3[tile])
    return out.transpose(1, 2).contiguous(), lse


@bidirectional_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    I, P, H, _ = q.shape  # noqa: E741
    return q.new_empty(q.shape), q.new_empty(I, H, P, dtype=torch.float32)


@torch.library.custom_op("titanbench::bidirectional_attention_backward", mutates_args=())
def bidirectional_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from the saved log-sum-exp."""
    I, P, H, _ = q.shape  # noqa: E741
    delta = torch.linalg.vecdot(dout.float(), out.float()).transpose(1, 2).flatten(0, 1)
    dout3, q3, k3, v3 = (_by_head(x) for x in (dout, q, k, v))
    dq, dk, dv = (torch.empty_like(x) for x in (q3, k3, v3))
    lse2 = lse.flatten(0, 1)
    for start in range(0, I * H, _step(P)):
        tile = slice(start, start + _step(P))
        weights = _scores(q3[tile], k3[tile], scale).sub_(lse2[tile, :, None]).exp_()
        products = torch.bmm(dout3[tile], v3[tile].mT).float()
        dscores = products.sub_(delta[tile, :, None]).mul_(weights).mul_(scale).to(q.dtype)
        dv[tile] = torch.bmm(weights.to(q.dtype).mT, dout3[tile])
        dq[tile] = torch.bmm(dscores, k3[tile])
        dk[tile] = torch.bmm(dscores.mT, q3[tile])
    dq, dk, dv = (x.unflatten(0, (I, H)).transpose(1, 2).contiguous() for x in (dq, dk, dv))
    return dq, dk, dv


@bidirectional_attention_backward.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx: Any, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    # The log-sum-exp is for backward only: no gradient flows through it.
    q, k, v, out, lse = ctx.saved_tensors
    return *bidirectional_attention_backward(dout, q, k, v, out, lse, ctx.scale), None


bidirectional_attention.register_autograd(_backward, setup_context=_setup_context)


def _by_head(x_IPHD: Tensor) -> Tensor:
    """(I H, P, D)."""
    return x_IPHD.transpose(1, 2).flatten(0, 1)


def _step(num_patches: int) -> int:
    return max(1, TILE_SCORES // num_patches**2)


def _scores(q3: Tensor, k3: Tensor, scale: float) -> Tensor:
    return torch.baddbmm(q3.new_zeros(()), q3, k3.mT, beta=0, alpha=scale).float()


@register_flop_formula(torch.ops.titanbench.bidirectional_attention)
def bidirectional_attention_flops(q_shape: torch.Size, *_: Any, **__: Any) -> int:
    """Two products."""
    return 4 * q_shape.numel() * q_shape[1]


@register_flop_formula(torch.ops.titanbench.bidirectional_attention_backward)
def bidirectional_attention_backward_flops(dout_shape: torch.Size, *_: Any, **__: Any) -> int:
    """Five products: the scores again (in no model FLOPs), dV, dP, dQ and dK."""
    return 10 * dout_shape.numel() * dout_shape[1]
