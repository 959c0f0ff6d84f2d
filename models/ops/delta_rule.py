"""The gated delta rule operators: linear attention whose state forgets, and corrects itself.

With one log decay per head it is that of Gated DeltaNet (arXiv:2412.06464), with one per channel
that of Kimi Delta Attention (arXiv:2510.26692). For each token of a head, S the state (D,Dv):

    S <- diag(exp(g)) S;    u = beta (v - S^T k);    S <- S + k u^T;    out = S^T q

`titanbench::delta_rule` is one operator on every device, as `titanbench::attention` is. Over any
tokens the state after them is M times the state before them plus b, for a matrix M: with that,
ranks that hold parts of a sequence find the states between the parts (parallel.states).

B batch, S sequence, H value heads, Hk heads of queries and keys (each serves H / Hk value heads in
a row), D width of queries and keys, Dv of values, G log decays of a token and head: D or 1.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op
from torch.utils.flop_counter import register_flop_formula

from models.ops import delta_rule_spans as spans
from models.ops import gym_delta_rule
from models.ops.delta_rule_spans import Inputs
from models.ops.kernels import delta_rule_kernel, find_machine

INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor beta, Tensor positions, float scale, "
    "SymInt chunk_tokens"
)
"""An `Inputs` in a schema: the last arguments of every operator."""


def delta_rule(inputs: Inputs, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Linear attention of packed documents, computed in float32 (float64 for float64 inputs).

    From the state (B,H,D,Dv) before the first token, None for zero. Returns out (B,S,H,Dv), the
    state after the last token, and the state before each span of chunks (spans,B,H,D,Dv), which is
    for backward alone.
    """
    return _forward(state, *inputs)


def delta_rule_backward(
    inputs: Inputs, starts: Tensor, dout: Tensor, dstate: Tensor | None
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, log_decay, beta and of the state before the first token.

    From those of out and of the state after the last one (None for zero), and the states before
    spans.
    """
    return _backward(dstate, dout, starts, *inputs)


def delta_rule_transition(inputs: Inputs) -> Tensor:
    """[M | b] (B,H,D,D+Dv): the state after the tokens is M times the one before them plus b.

    M is zero where a document begins. Has no gradient: see `delta_rule_state_gradient`.
    """
    return _transition(*inputs)


def delta_rule_state_gradient(inputs: Inputs, dout: Tensor) -> Tensor:
    """Gradient of the state before the first token, through the outputs alone.

    M^T times the gradient of the state after the last token is what that one adds.
    """
    return _state_gradient(dout, *inputs)


def kernel_of(inputs: Inputs) -> str:
    """The name of the kernel that serves forward and backward of inputs like these."""
    q, v = inputs.q, inputs.v
    return delta_rule_kernel(
        find_machine(q.device.type),
        q.dtype,
        qk_head_dim=q.shape[-1],
        v_head_dim=v.shape[-1],
        num_decays=inputs.log_decay.shape[-1],
        grouped=q.shape[2] != v.shape[2],
    )


def _kernel(inputs: Inputs) -> ModuleType:
    return spans if kernel_of(inputs) == "chunks" else gym_delta_rule


@custom_op(
    "titanbench::delta_rule",
    mutates_args=(),
    schema=f"(Tensor? state, {INPUTS}) -> (Tensor, Tensor, Tensor)",
)
def _forward(state: Tensor | None, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _kernel(Inputs(*inputs)).forward(Inputs(*inputs), state)


@_forward.register_fake
def _(state: Tensor | None, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, _, v, *_, chunk_tokens = inputs
    after = spans.zero_state(q, v)
    starts = after.new_empty(spans.num_spans(v.shape[1], chunk_tokens), *after.shape)
    return v.new_empty(v.shape), after, starts


@custom_op(
    "titanbench::delta_rule_backward",
    mutates_args=(),
    schema=f"(Tensor? dstate, Tensor dout, Tensor starts, {INPUTS}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward(
    dstate: Tensor | None, dout: Tensor, starts: Tensor, *inputs: Any
) -> tuple[Tensor, ...]:
    return _kernel(Inputs(*inputs)).backward(Inputs(*inputs), starts, dout, dstate)


@_backward.register_fake
def _(dstate: Tensor | None, dout: Tensor, starts: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    q, _, v, *_ = inputs
    return *(x.new_empty(x.shape) for x in inputs[:5]), spans.zero_state(q, v)


@custom_op("titanbench::delta_rule_transition", mutates_args=(), schema=f"({INPUTS}) -> Tensor")
def _transition(*inputs: Any) -> Tensor:
    return spans.transition(Inputs(*inputs))


@_transition.register_fake
def _(*inputs: Any) -> Tensor:
    q, _, v, *_ = inputs
    state = spans.zero_state(q, v)
    return state.new_empty(*state.shape[:-1], q.shape[-1] + v.shape[-1])


@custom_op(
    "titanbench::delta_rule_state_gradient",
    mutates_args=(),
    schema=f"(Tensor dout, {INPUTS}) -> Tensor",
)
def _state_gradient(dout: Tensor, *inputs: Any) -> Tensor:
    return spans.state_gradient(Inputs(*inputs), dout)


@_state_gradient.register_fake
def _(dout: Tensor, *inputs: Any) -> Tensor:
    q, _, v, *_ = inputs
    return spans.zero_state(q, v)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    state, *tensors, scale, chunk_tokens = inputs
    ctx.settings = scale, chunk_tokens
    ctx.has_state = state is not None
    ctx.save_for_backward(*tensors, output[2])
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, dout: Tensor | None, dstate: Tensor | None, dstarts: Tensor | None
) -> tuple[Tensor | None, ...]:
    # The states between spans are for backward only: no gradient flows through them.
    *tensors, starts = ctx.saved_tensors
    inputs = Inputs(*tensors, *ctx.settings)
    dout = torch.zeros_like(inputs.v) if dout is None else dout
    *gradients, dbefore = delta_rule_backward(inputs, starts, dout, dstate)
    return dbefore if ctx.has_state else None, *gradients, None, None, None


_forward.register_autograd(_gradients, setup_context=_setup_context)


def _recurrence_flops(shapes: tuple[Any, ...]) -> int:
    """Four products of a state's size for each token and head: decay, S^T k, k u^T and S^T q.

    Chunks of 64 tokens with heads of width 128 execute an eighth more: three such products, and
    those within the chunk.
    """
    q, _, (B, S, H, width), *_ = shapes[-len(Inputs._fields) :]
    return 2 * B * S * H * 4 * q[-1] * width


@register_flop_formula(torch.ops.titanbench.delta_rule)
def delta_rule_flops(*shapes: Any, **_: Any) -> int:
    """As the recurrence, whatever the chunks; see models.counts."""
    return _recurrence_flops(shapes)


@register_flop_formula(torch.ops.titanbench.delta_rule_backward)
def delta_rule_backward_flops(*shapes: Any, **_: Any) -> int:
    """Twice the forward, and the forward again: the states of each span are recomputed.

    The recomputed part belongs to no model FLOPs.
    """
    return 3 * _recurrence_flops(shapes)


@register_flop_formula(torch.ops.titanbench.delta_rule_transition)
def delta_rule_transition_flops(*shapes: Any, **_: Any) -> int:
    """Three products, without that of queries, for a state of width D + Dv: no model FLOPs."""
    D, Dv = (shapes[Inputs._fields.index(name)][-1] for name in ("q", "v"))
    return 3 * _recurrence_flops(shapes) * (D + Dv) // (4 * Dv)


@register_flop_formula(torch.ops.titanbench.delta_rule_state_gradient)
def delta_rule_state_gradient_flops(*shapes: Any, **_: Any) -> int:
    """The recurrence from the last token to the first: no model FLOPs."""
    return _recurrence_flops(shapes)
