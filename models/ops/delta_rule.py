"""The gated delta rule operator: linear attention whose state forgets, and corrects itself.

With one log decay per head it is that of Gated DeltaNet (arXiv:2412.06464), with one per channel
that of Kimi Delta Attention (arXiv:2510.26692). For each token of a head, S the state (D,Dv):

    S <- diag(exp(g)) S;    u = beta (v - S^T k);    S <- S + k u^T;    out = S^T q

`titanbench::delta_rule` is one operator on every device, as `titanbench::attention` is.

B batch, S sequence, H value heads, Hk heads of queries and keys (each serves H / Hk value heads in
a row), D width of queries and keys, Dv of values, G log decays of a token and head: D or 1.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from models.ops import delta_rule_spans as spans
from models.ops.delta_rule_spans import Inputs

CHUNK_TOKENS = 64


@torch.library.custom_op("titanbench::delta_rule", mutates_args=())
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    positions: Tensor,
    state: Tensor | None,
    scale: float,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Linear attention of packed documents, computed in float32 (float64 for float64 inputs).

    q and k (B,S,Hk,D) are brought to length 1 here, queries then scaled; v (B,S,H,Dv); log_decay
    (B,S,H,G), at most 0; beta (B,S,H); positions (B,S) int64, the state is zero where they are 0;
    state (B,H,D,Dv) before the first token, None for zero; chunk_tokens a power of two.

    Returns out (B,S,H,Dv), the state after the last token, and the state before each span of
    chunks (spans,B,H,D,Dv), which is for backward alone.
    """
    assert chunk_tokens & (chunk_tokens - 1) == 0, f"a chunk of {chunk_tokens} tokens"
    inputs = Inputs(q, k, v, log_decay, beta, positions, scale, chunk_tokens)
    return spans.forward(inputs, state)


@delta_rule.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    positions: Tensor,
    state: Tensor | None,
    scale: float,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor, Tensor]:
    after = spans.zero_state(q, v)
    starts = after.new_empty(spans.num_spans(v.shape[1], chunk_tokens), *after.shape)
    return v.new_empty(v.shape), after, starts


@torch.library.custom_op("titanbench::delta_rule_backward", mutates_args=())
def delta_rule_backward(
    dout: Tensor,
    dstate: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    positions: Tensor,
    starts: Tensor,
    scale: float,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, log_decay, beta and of the state before the first token."""
    inputs = Inputs(q, k, v, log_decay, beta, positions, scale, chunk_tokens)
    dq, dk, dv, dlog_decay, dbeta, dstate = spans.backward(inputs, starts, dout, dstate)
    return dq, dk, dv, dlog_decay, dbeta, dstate


@delta_rule_backward.register_fake
def _(
    dout: Tensor,
    dstate: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    positions: Tensor,
    starts: Tensor,
    scale: float,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dlog_decay, dbeta = (x.new_empty(x.shape) for x in (q, k, v, log_decay, beta))
    return dq, dk, dv, dlog_decay, dbeta, spans.zero_state(q, v)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, state, ctx.scale, ctx.chunk_tokens = inputs
    ctx.has_state = state is not None
    ctx.save_for_backward(*tensors, output[2])
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, dout: Tensor | None, dstate: Tensor | None, dstarts: Tensor | None
) -> tuple[Tensor | None, ...]:
    # The states between spans are for backward only: no gradient flows through them.
    q, k, v, log_decay, beta, positions, starts = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(v)
    *gradients, dbefore = delta_rule_backward(
        dout, dstate, q, k, v, log_decay, beta, positions, starts, ctx.scale, ctx.chunk_tokens
    )
    return *gradients, None, dbefore if ctx.has_state else None, None, None


delta_rule.register_autograd(_backward, setup_context=_setup_context)


def _recurrence_flops(q_shape: torch.Size, v_shape: torch.Size) -> int:
    """Four products of a state's size for each token and head: decay, S^T k, k u^T and S^T q.

    Chunks of 64 tokens with heads of width 128 execute an eighth more: three such products, and
    those within the chunk.
    """
    B, S, H, width = v_shape
    return 2 * B * S * H * 4 * q_shape[-1] * width


@register_flop_formula(torch.ops.titanbench.delta_rule)
def delta_rule_flops(
    q_shape: torch.Size, k_shape: torch.Size, v_shape: torch.Size, *_: Any, **__: Any
) -> int:
    """As the recurrence, whatever the chunks; see models.counts."""
    return _recurrence_flops(q_shape, v_shape)


@register_flop_formula(torch.ops.titanbench.delta_rule_backward)
def delta_rule_backward_flops(
    dout_shape: torch.Size,
    dstate_shape: torch.Size | None,
    q_shape: torch.Size,
    k_shape: torch.Size,
    v_shape: torch.Size,
    *_: Any,
    **__: Any,
) -> int:
    """Twice the forward, and the forward again: the states of each span are recomputed.

    The recomputed part belongs to no model FLOPs.
    """
    return 3 * _recurrence_flops(q_shape, v_shape)
