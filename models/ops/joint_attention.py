"""Attention to a window and to compressed entries by one softmax, with sinks, from two kernels.

Each kernel gives its output and the log-sum-exp of its scores; weighted by them, the outputs add up
to that of the joint softmax, in whose denominator the sink logit of a head stands as well. Both
kernels' backward passes take an output and a log-sum-exp to make weights and their gradients from:
given the joint ones they compute their part of the joint gradient.

Where Attention Gym has one kernel for all of it, that one serves; see models.ops.kernels.

B batch, S sequence, H heads, D width, E entries of a row.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.ops.attention import attention, attention_backward
from models.ops.chosen_attention import chosen_attention, chosen_attention_backward
from models.ops.entry_attention import entry_attention, entry_attention_backward
from models.ops.gym_sparse import gathered_attention
from models.ops.kernels import find_machine, joint_attention_kernel


class Seen(NamedTuple):
    """Which compressed entries a query sees: [first, last) of its row, or its chosen ones."""

    first_BS: Tensor
    last_BS: Tensor
    block: int
    """Tokens of an entry."""
    chosen_BSK: Tensor | None = None


class _JointAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        entries: Tensor,
        sinks_H: Tensor,
        positions: Tensor,
        first: Tensor,
        last: Tensor,
        block: int,
        chosen: Tensor | None,
        scale: float,
        window: int,
    ) -> Tensor:
        keys = kv[:, :, None]
        near, near_lse = attention(q, keys, keys, positions, scale, window)
        if chosen is None:
            far, far_lse = entry_attention(q, entries, first, last, block, scale)
        else:
            far, far_lse = chosen_attention(q, entries, chosen, scale)
        lse = torch.logaddexp(near_lse, far_lse)
        lse = torch.logaddexp(lse, sinks_H.float()[:, None])
        out = near * _share(near_lse, lse, q.dtype)
        out.addcmul_(far, _share(far_lse, lse, q.dtype))
        ctx.save_for_backward(q, kv, entries, sinks_H, positions, first, last, chosen, out, lse)
        ctx.block, ctx.scale, ctx.window = block, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, entries, sinks_H, positions, first, last, chosen, out, lse = ctx.saved_tensors
        dout, keys, scale = dout.contiguous(), kv[:, :, None], ctx.scale
        dq, dk, dv = attention_backward(dout, q, keys, keys, out, lse, positions, scale, ctx.window)
        if chosen is None:
            far_dq, dentries = entry_attention_backward(
                dout, q, entries, out, lse, first, last, ctx.block, scale
            )
        else:
            far_dq, dentries = chosen_attention_backward(dout, q, entries, out, lse, chosen, scale)
        sink_BHS = torch.exp(sinks_H.float()[:, None] - lse)
        delta_BSH = torch.linalg.vecdot(dout.float(), out.float())
        dsinks_H = -(sink_BHS * delta_BSH.transpose(1, 2)).sum((0, 2)).to(sinks_H.dtype)
        return dq + far_dq, (dk + dv).squeeze(2), dentries, dsinks_H, *(None,) * 7


def kernel_of(q: Tensor, *, chosen: bool) -> str:
    """The name of the kernel, or kernels, that serve queries like these."""
    machine = find_machine(q.device.type)
    return joint_attention_kernel(machine, q.dtype, q.shape[-1], chosen=chosen)


def _share(part_lse: Tensor, lse: Tensor, dtype: torch.dtype) -> Tensor:
    """(B,S,H,1): the part of the joint softmax's weight that goes to these keys."""
    return torch.exp(part_lse - lse).transpose(1, 2)[..., None].to(dtype)


def joint_attention(
    q: Tensor,
    kv: Tensor,
    entries: Tensor,
    sinks_H: Tensor,
    positions: Tensor,
    seen: Seen,
    *,
    scale: float,
    window: int,
) -> Tensor:
    """Attention of q (B,S,H,D) to a window of kv (B,S,D) and to entries (B,E,D), (B,S,H,D).

    Both are key and value in one and shared by all heads. positions (B,S) as in
    models.ops.attention: the window ends at the document's start; sinks (H,) logits.
    """
    first, last, block, chosen = seen
    if chosen is not None and kernel_of(q, chosen=True) == "attn_gym.gather_attn":
        return gathered_attention(
            q, kv, entries, sinks_H, positions, first, chosen, block, scale, window, "fused"
        )
    return _JointAttention.apply(
        q, kv, entries, sinks_H, positions, first, last, block, chosen, scale, window
    )
