"""The gated delta rule over a whole sequence: spans of chunks, one after the other.

A span is what is in memory at once. The state before each is kept for backward, which computes
every span again from it: what is kept grows by H D Dv values per span, beside the inputs.

B batch, S sequence, T tokens of a span, H value heads, Hk heads of queries and keys, D and Dv their
widths, N chunks, C tokens of a chunk.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from models.ops import delta_rule_chunks as chunked

CHUNK_TOKENS = 64
SPAN_CHUNKS = 16
UNIT_EPS = 1e-6
"""Added to the sum of squares by which queries and keys are brought to length 1."""


class Inputs(NamedTuple):
    """Tokens of packed documents, as all operators of the gated delta rule take them."""

    q: Tensor
    """(B,S,Hk,D); brought to length 1 by the operators, then scaled."""
    k: Tensor
    """(B,S,Hk,D); brought to length 1 by the operators."""
    v: Tensor
    """(B,S,H,Dv)."""
    log_decay: Tensor
    """(B,S,H,G), at most 0."""
    beta: Tensor
    """(B,S,H)."""
    positions: Tensor
    """(B,S) int64: the state is zero where they are 0."""
    scale: float
    chunk_tokens: int = CHUNK_TOKENS
    """A power of two."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states and of all that is computed."""
    return torch.promote_types(dtype, torch.float32)


def zero_state(q: Tensor, v: Tensor) -> Tensor:
    """A state (B,H,D,Dv) of zeros."""
    B, _, H, width = v.shape
    return q.new_zeros(B, H, q.shape[-1], width, dtype=compute_dtype(q.dtype))


def num_spans(num_tokens: int, chunk_tokens: int) -> int:
    """Spans of a sequence."""
    return -(-num_tokens // (chunk_tokens * SPAN_CHUNKS))


def forward(inputs: Inputs, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(out (B,S,H,Dv), last state, states before each span) from the state before the sequence."""
    v = inputs.v
    state = zero_state(inputs.q, v) if state is None else state
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    starts = []
    for tokens in _spans(inputs):
        starts.append(state)
        out_BHNCV, state = chunked.forward(_cut(inputs, tokens), state)
        out[:, tokens] = _from_chunks(out_BHNCV, out[:, tokens].shape[1])
    return out, state, torch.stack(starts)


def backward(
    inputs: Inputs, starts: Tensor, dout: Tensor, dstate: Tensor | None
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, log_decay, beta and of the state before the sequence."""
    dstate = zero_state(inputs.q, inputs.v) if dstate is None else dstate
    gradients = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs[:5]]
    spans = list(_spans(inputs))
    for index in reversed(range(len(spans))):
        tokens = spans[index]
        dchunks = _to_chunks(dout[:, tokens].to(dstate.dtype), inputs.chunk_tokens)
        span = _cut(inputs, tokens)
        found, dstate = chunked.backward(span, starts[index], dchunks, dstate)
        dq, dk, dv, dlog_decay, dbeta = (_from_chunks(x, tokens.stop - tokens.start) for x in found)
        dq = _unit_gradient(inputs.q[:, tokens], dq * inputs.scale)
        dk = _unit_gradient(inputs.k[:, tokens], dk)
        parts = (dq, dk, dv, dlog_decay, dbeta.squeeze(-1))
        for whole, part in zip(gradients, parts, strict=True):
            whole[:, tokens] = part
    return *gradients, dstate


def transition(inputs: Inputs) -> Tensor:
    """[M | b] (B,H,D,D+Dv): the state after the tokens is M times the one before them plus b."""
    zero = zero_state(inputs.q, inputs.v)
    identity = torch.eye(zero.shape[-2], dtype=zero.dtype, device=zero.device)
    both = torch.cat((identity.expand(*zero.shape[:2], -1, -1), zero), dim=-1)
    for tokens in _spans(inputs):
        both = chunked.transition(_cut(inputs, tokens), both)
    return both


def state_gradient(inputs: Inputs, dout: Tensor) -> Tensor:
    """Gradient of the state before the sequence, through the outputs alone."""
    dstate = zero_state(inputs.q, inputs.v)
    for tokens in reversed(list(_spans(inputs))):
        dchunks = _to_chunks(dout[:, tokens].to(dstate.dtype), inputs.chunk_tokens)
        dstate = chunked.state_gradient(_cut(inputs, tokens), dchunks, dstate)
    return dstate


def _spans(inputs: Inputs) -> Iterator[slice]:
    S, step = inputs.v.shape[1], inputs.chunk_tokens * SPAN_CHUNKS
    for start in range(0, S, step):
        yield slice(start, min(start + step, S))


def _cut(inputs: Inputs, tokens: slice) -> chunked.Span:
    """The chunks of these tokens, with a unit query and key for each value head."""
    dtype, C = compute_dtype(inputs.q.dtype), inputs.chunk_tokens
    q, k, v, log_decay, beta = (x[:, tokens].to(dtype) for x in inputs[:5])
    groups = v.shape[2] // k.shape[2]
    q, k = (_unit(x).repeat_interleave(groups, dim=2) for x in (q, k))
    begins = (inputs.positions[:, tokens] == 0).long()[..., None, None]
    return chunked.Span(
        q=_to_chunks(q * inputs.scale, C),
        k=_to_chunks(k, C),
        v=_to_chunks(v, C),
        log_decay=_to_chunks(log_decay, C),
        beta=_to_chunks(beta[..., None], C),
        documents=_to_chunks(begins, C).squeeze(-1).cumsum(-1),
    )


def _to_chunks(x_BTHX: Tensor, chunk_tokens: int) -> Tensor:
    """(B,T,H,X) to (B,H,N,C,X); tokens of zeros, which leave the state alone, fill the last."""
    missing = -x_BTHX.shape[1] % chunk_tokens
    return F.pad(x_BTHX.transpose(1, 2), (0, 0, 0, missing)).unflatten(2, (-1, chunk_tokens))


def _from_chunks(x_BHNCX: Tensor, num_tokens: int) -> Tensor:
    """(B,H,N,C,X) to (B,T,H,X)."""
    return x_BHNCX.flatten(2, 3)[:, :, :num_tokens].transpose(1, 2)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS)


def _unit_gradient(x_BTKD: Tensor, dunit_BTHD: Tensor) -> Tensor:
    """The gradient of x from that of its unit vectors, of which several heads have one."""
    x_BTKD = x_BTKD.to(dunit_BTHD.dtype)
    dunit = dunit_BTHD.unflatten(2, (x_BTKD.shape[2], -1)).sum(3)
    inverse_length = torch.rsqrt(x_BTKD.square().sum(-1, keepdim=True) + UNIT_EPS)
    unit = x_BTKD * inverse_length
    return inverse_length * (dunit - unit * (unit * dunit).sum(-1, keepdim=True))
