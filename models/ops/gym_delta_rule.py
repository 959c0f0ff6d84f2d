"""The gated delta rule by Attention Gym: its chunk_gdn and chunk_kda in place of our chunks.

Written and tested against Attention Gym 0.0.17 on a CPU, with its reference implementation behind
the same two functions; the fused kernels, which need CUDA, have not run here. Those of chunk_kda
take log decays down to about -5.9: Kimi K3 bounds them at -5.

All rows of the batch become one stream of documents. Backward runs the kernel again, recorded, as
our own chunks are also computed again.

B batch, S sequence, H value heads, D width of queries and keys, Dv of values, N documents.
"""

from typing import Any

import torch
from torch import Tensor

from models.ops.attention_flash import cumulative_lengths
from models.ops.delta_rule_spans import UNIT_EPS, Inputs, num_spans
from models.ops.recorded import leaves, recorded


def forward(
    inputs: Inputs, state: Tensor | None, *, impl: str = "fused"
) -> tuple[Tensor, Tensor, Tensor]:
    """As `models.ops.delta_rule_spans.forward`; of the states before spans only the first is set.

    `impl` is Attention Gym's: "fused" or "reference".
    """
    B, S, H, Dv = inputs.v.shape
    if state is None:
        state = inputs.v.new_zeros(B, H, inputs.q.shape[-1], Dv, dtype=torch.float32)
    out, after = _run(inputs, state, impl)
    starts = state.new_empty(num_spans(S, inputs.chunk_tokens), *state.shape)
    starts[0] = state
    return out, after, starts


def backward(
    inputs: Inputs, starts: Tensor, dout: Tensor, dstate: Tensor | None, *, impl: str = "fused"
) -> tuple[Tensor, ...]:
    """As `models.ops.delta_rule_spans.backward`, from the first of the states before spans."""
    with recorded():
        differentiated = leaves(*inputs[:5], starts[0])
        q, k, v, log_decay, beta, state = differentiated
        inputs = inputs._replace(q=q, k=k, v=v, log_decay=log_decay, beta=beta)
        results = _run(inputs, state, impl)
        given = (dout, torch.zeros_like(starts[0]) if dstate is None else dstate)
        return torch.autograd.grad(results, differentiated, given)


def _run(inputs: Inputs, state: Tensor, impl: str) -> tuple[Tensor, Tensor]:
    """(out (B,S,H,Dv), state after the last token (B,H,D,Dv)), differentiable."""
    import attn_gym.linear

    B, S = inputs.positions.shape
    ends, _ = cumulative_lengths(inputs.positions)
    rows = torch.arange(B + 1, device=ends.device, dtype=ends.dtype) * S
    documents = torch.searchsorted(ends, rows)
    # Of a row's first document alone a part may lie before the row; the last leaves the state.
    first_B, last_B = documents[:-1], documents[1:] - 1
    goes_on = (inputs.positions[:, 0] != 0)[:, None, None, None]
    before = torch.where(goes_on, state, 0.0).mT.contiguous()
    initial = before.new_zeros(len(ends) - 1, *before.shape[1:]).index_copy(0, first_B, before)
    q, k, v, log_decay, beta = _streams(inputs)
    # One decay per head has no dimension of its own there.
    per_head = log_decay.shape[-1] == 1
    kernel = attn_gym.linear.chunk_gdn if per_head else attn_gym.linear.chunk_kda
    out, final = kernel(
        *(q, k, v, log_decay.squeeze(-1) if per_head else log_decay, beta),
        initial_state=initial,
        cu_seqlens=ends,
        scale=inputs.scale,
        output_final_state=True,
        impl=impl,
    )
    return out.view(inputs.v.shape), final.index_select(0, last_B).mT.contiguous()


def _streams(inputs: Inputs) -> tuple[Any, ...]:
    """q and k of length 1, v, log decays and beta in float32: (1, B S, ...) each."""
    q, k, v, log_decay, beta = (x.flatten(0, 1)[None] for x in inputs[:5])
    q, k = (_unit(x).contiguous() for x in (q, k))
    return q, k, v.contiguous(), log_decay.float().contiguous(), beta.float().contiguous()


def _unit(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + UNIT_EPS)).to(x.dtype)
