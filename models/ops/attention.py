"""The attention operator: causal, within documents, optionally within a window.

`titanbench::attention` is one operator on every device, so a trace, a prediction and a count see
what a GPU would launch and not the pieces that a CPU makes of it.

B batch, S sequence, H query heads, Hkv key/value heads, D width of queries and keys, Dv of values.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from models.ops import attention_flash, attention_flex, attention_tiles
from models.ops.kernels import attention_kernel

KERNELS = {"flash_varlen": attention_flash, "flex": attention_flex, "tiles": attention_tiles}


def _kernel(q: Tensor) -> ModuleType:
    return KERNELS[attention_kernel(q.device.type, q.dtype, q.shape[-1])]


@torch.library.custom_op("titanbench::attention", mutates_args=())
def attention(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Softmax attention of packed documents.

    q (B,S,H,D), k (B,Sk,Hkv,D), v (B,Sk,Hkv,Dv); positions (B,Sk) int64, 0 where a document starts.
    The queries are those of the last S of the Sk tokens: context parallelism has more keys.
    A query sees itself and the keys before it in its document, the last `window` of them at most
    (0: all). Returns out (B,S,H,Dv) and the log-sum-exp of the scores (B,H,S) in float32.

    Positions of more than Sk tokens, S more at least, say that the keys are those of the first Sk:
    a part of what the queries see, without a window. A query that sees none of it has an output
    of zero and a log-sum-exp of minus infinity.
    """
    beyond = positions.shape[1] - k.shape[1]
    assert beyond == 0 or (beyond >= q.shape[1] and not window), "keys end amid the queries"
    if not q.shape[0]:  # a batch without images, say: kernels expect a row
        return _empty(q, v)
    return _kernel(q).forward(q, k, v, positions, scale, window)


def _empty(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """What `attention` returns, without values."""
    B, S, H, _ = q.shape
    return q.new_empty(B, S, H, v.shape[-1]), q.new_empty(B, H, S, dtype=torch.float32)


@attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    return _empty(q, v)


@torch.library.custom_op("titanbench::attention_backward", mutates_args=())
def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    positions: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attention` with respect to q, k and v, from the saved log-sum-exp.

    With keys that are a part of what the queries saw, and output and log-sum-exp of all of them,
    dk and dv are those of this part and dq its share.
    """
    if not q.shape[0]:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    return _kernel(q).backward(dout, q, k, v, out, lse, positions, scale, window)


@attention_backward.register_fake
def _(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    positions: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, positions, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(q, k, v, positions, *output)


def _backward(ctx: Any, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    # The log-sum-exp is for backward only: no gradient flows through it.
    q, k, v, positions, out, lse = ctx.saved_tensors
    dq, dk, dv = attention_backward(dout, q, k, v, out, lse, positions, ctx.scale, ctx.window)
    return dq, dk, dv, None, None, None


attention.register_autograd(_backward, setup_context=_setup_context)


def _num_scores(q_shape: torch.Size, k_shape: torch.Size, window: int) -> int:
    B, S, H, _ = q_shape
    keys = k_shape[1]
    return B * H * S * (min(keys, window) if window else keys)


@register_flop_formula(torch.ops.titanbench.attention)
def attention_flops(
    q_shape: torch.Size,
    k_shape: torch.Size,
    v_shape: torch.Size,
    positions_shape: torch.Size,
    scale: float,
    window: int,
    **_: Any,
) -> int:
    """Two products, counted over the whole window (the `full` convention of models.counts)."""
    return 2 * _num_scores(q_shape, k_shape, window) * (q_shape[-1] + v_shape[-1])


@register_flop_formula(torch.ops.titanbench.attention_backward)
def attention_backward_flops(
    dout_shape: torch.Size,
    q_shape: torch.Size,
    k_shape: torch.Size,
    v_shape: torch.Size,
    out_shape_: torch.Size,
    lse_shape: torch.Size,
    positions_shape: torch.Size,
    scale: float,
    window: int,
    **_: Any,
) -> int:
    """Five products as flash executes them: the scores again, dV, dP, dQ and dK.

    That is 2.5 times the forward for heads of one width. The repeated product belongs to no model
    FLOPs: take it off (2 * scores * D) before comparing with models.counts.
    """
    return 2 * _num_scores(q_shape, k_shape, window) * (3 * q_shape[-1] + 2 * v_shape[-1])
