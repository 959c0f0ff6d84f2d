"""The states of linear attention between the chunks of a sequence, passed from rank to rank.

A chunk makes M S + b of any state S before it. Every rank finds M and b of its two chunks, gathers
those of all, and finds the states before its chunks, from which they go on. Backward is the same
from the other end: a chunk makes M^T G + d of the gradient G of the state after it, d through its
own outputs. What travels does not grow with the sequence: D (D + Dv) values per head and chunk,
once forward and once backward. The price is a second scan in each: the states and their gradients.

N ranks, B batch, c tokens of a chunk (see parallel.chunks), H heads, D width of keys, Dv of values.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from models.ops.delta_rule import (
    Inputs,
    delta_rule,
    delta_rule_backward,
    delta_rule_state_gradient,
    delta_rule_transition,
)
from parallel.chunks import Chunks
from parallel.collectives import stack_ranks


def carry(maps: Tensor) -> Tensor:
    """Return the states (B, 2N, H, D, Dv) before each of the maps [M | b] (B, 2N, H, D, D + Dv).

    The first is zero; each map makes M S + b of the state S before it.
    """
    D = maps.shape[-2]
    matrices, increments = maps[:, :-1].split([D, maps.shape[-1] - D], dim=-1)
    states = [torch.zeros_like(maps[:, 0, ..., D:])]
    for M, b in zip(matrices.unbind(1), increments.unbind(1), strict=True):
        states.append(M @ states[-1] + b)
    return torch.stack(states, dim=1)


def gather_chunks(x: Tensor, chunks: Chunks, group: dist.ProcessGroup) -> Tensor:
    """Return (B, 2N, ...) in order of the chunks from (2B, ...) of each rank's own."""
    return chunks.join(stack_ranks(x.unflatten(0, (-1, 2)), group))


class _PassStates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        positions: Tensor,
        scale: float,
        chunk_tokens: int,
        chunks: Chunks,
        group: dist.ProcessGroup,
    ) -> Tensor:
        inputs = Inputs(q, k, v, log_decay, beta, positions, scale, chunk_tokens)
        own = delta_rule_transition(inputs)
        before = chunks.take(carry(gather_chunks(own, chunks, group))).flatten(0, 1)
        out, _, starts = delta_rule(inputs, before)
        matrices = own[..., : q.shape[-1]].contiguous()
        ctx.save_for_backward(q, k, v, log_decay, beta, positions, starts, matrices)
        ctx.settings, ctx.chunks, ctx.group = (scale, chunk_tokens), chunks, group
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, starts, matrices = ctx.saved_tensors
        inputs = Inputs(*tensors, *ctx.settings)
        own = torch.cat((matrices.mT, delta_rule_state_gradient(inputs, dout)), dim=-1)
        from_the_end = gather_chunks(own, ctx.chunks, ctx.group).flip(1)
        dafter = ctx.chunks.take(carry(from_the_end).flip(1)).flatten(0, 1)
        *gradients, _ = delta_rule_backward(inputs, starts, dout, dafter)
        return *gradients, None, None, None, None, None


def pass_states(inputs: Inputs, chunks: Chunks, group: dist.ProcessGroup) -> Tensor:
    """Return the outputs (2B, c, H, Dv) of this rank's chunks, each a row of ``inputs``.

    The two chunks of a sequence are neighbours.
    """
    return _PassStates.apply(*inputs, chunks, group)
