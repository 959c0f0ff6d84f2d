"""The gated delta rule in chunks against the recurrence token by token, in float64."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from models.batch import Context
from models.initialization import collect_inits, initialize
from models.layers.gated_delta_net import GatedDeltaNet
from models.layers.kimi_delta_attention import KimiDeltaAttention
from models.ops import delta_rule_chunks, delta_rule_spans
from models.ops.delta_rule import (
    Inputs,
    delta_rule,
    delta_rule_state_gradient,
    delta_rule_transition,
)
from models.ops.short_convolution import short_convolution
from tests.models.helpers import pack, relative_error
from tests.models.recurrences import convolution_by_token, delta_rule_by_token

DOCUMENTS = [[33, 4, 1, 37], [75]]


def make_inputs(
    channels: str, *, documents: list[list[int]] = DOCUMENTS, strength: float = 3.0, seed: int = 0
) -> tuple[list[Tensor], Tensor]:
    """(q, k, v, log_decay, beta, state) in float64 with two value heads per key head; positions.

    The second row goes on with a document from before, so that it sees the state.
    """
    generator = torch.Generator().manual_seed(seed)
    positions = pack(documents, 8).positions_BS
    positions[1] += 5
    (B, S), Hk, H, D, Dv = positions.shape, 2, 4, 8, 6
    G = {"one decay": 1, "decay per channel": D}[channels]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    log_decay = -strength * normal(B, S, H, G).square()
    tensors = [normal(B, S, Hk, D), normal(B, S, Hk, D), normal(B, S, H, Dv), log_decay]
    tensors += [normal(B, S, H).sigmoid(), normal(B, H, D, Dv)]
    return [x.requires_grad_() for x in tensors], positions


def outputs_and_gradients(
    inputs: list[Tensor], positions: Tensor, *, chunk_tokens: int | None
) -> list[Tensor]:
    """out, last state and all gradients: by the operator, or by token if there are no chunks."""
    *tensors, state = inputs
    if chunk_tokens is None:
        out, last = delta_rule_by_token(*tensors, positions, state, 0.3)
    else:
        out, last, _ = delta_rule(Inputs(*tensors, positions, 0.3, chunk_tokens), state)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in (out, last)]
    total = (out * weights[0]).sum() + (last * weights[1]).sum()
    return [out, last, *torch.autograd.grad(total, inputs)]


@pytest.mark.parametrize("channels", ["one decay", "decay per channel"])
@pytest.mark.parametrize("chunk_tokens", [1, 2, 4, 16, 64, 128])
def test_chunks_of_any_size_equal_the_recurrence(channels: str, chunk_tokens: int) -> None:
    """Forward, last state and every gradient: several spans, documents, an incomplete chunk."""
    inputs, positions = make_inputs(channels)
    ours = outputs_and_gradients(inputs, positions, chunk_tokens=chunk_tokens)
    theirs = outputs_and_gradients(inputs, positions, chunk_tokens=None)

    assert max(relative_error(a, b) for a, b in zip(ours, theirs, strict=True)) < 1e-12


@pytest.mark.parametrize("channels", ["one decay", "decay per channel"])
@pytest.mark.parametrize("strength", [1e-3, 50.0, 1e4])
def test_weak_and_strong_decays_are_safe_in_float32(channels: str, strength: float) -> None:
    """Decays of up to exp(-1e5) a token: over a chunk their product is below any float."""
    inputs, positions = make_inputs(channels, strength=strength)
    single = [x.detach().float().requires_grad_() for x in inputs]
    ours = outputs_and_gradients(single, positions, chunk_tokens=64)
    theirs = outputs_and_gradients(inputs, positions, chunk_tokens=None)

    for mine, other in zip(ours, theirs, strict=True):
        assert mine.isfinite().all()
        assert (mine - other).abs().max() < 2e-5 * max(1.0, other.abs().max())


def test_a_mild_decay_after_a_strong_one_keeps_its_digits() -> None:
    """Differences of running sums would lose them: 1e6 + 1e-3 is 1e6 in float32."""
    inputs, positions = make_inputs("one decay", documents=[[75], [75]], strength=1e-3)
    with torch.no_grad():
        inputs[3][:, 10] = -1e6
    single = [x.detach().float().requires_grad_() for x in inputs]
    ours = outputs_and_gradients(single, positions, chunk_tokens=64)
    theirs = outputs_and_gradients(inputs, positions, chunk_tokens=None)

    assert max(relative_error(a, b) for a, b in zip(ours, theirs, strict=True)) < 1e-5


def test_a_sequence_in_two_parts_with_the_state_handed_on_is_the_sequence() -> None:
    (*tensors, state), positions = make_inputs("decay per channel")
    whole, last, _ = delta_rule(Inputs(*tensors, positions, 0.3, 16), state)
    first = [x[:, :40] for x in tensors]
    second = [x[:, 40:] for x in tensors]

    out1, between, _ = delta_rule(Inputs(*first, positions[:, :40], 0.3, 16), state)
    out2, after, _ = delta_rule(Inputs(*second, positions[:, 40:], 0.3, 16), between)

    assert relative_error(torch.cat((out1, out2), dim=1), whole) < 1e-12
    assert relative_error(after, last) < 1e-12


def test_bfloat16_is_as_near_as_its_rounding() -> None:
    (*tensors, _), positions = make_inputs("one decay")
    half = [x.detach().bfloat16() if i != 3 else x.float() for i, x in enumerate(tensors)]
    out, state, _ = delta_rule(Inputs(*half, positions, 0.3), None)
    expected, last = delta_rule_by_token(*(x.double() for x in half), positions, None, 0.3)

    assert (out.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert relative_error(out, expected) < 5e-3
    assert relative_error(state, last) < 1e-5


@pytest.mark.parametrize("with_state", [True, False])
def test_the_operator_keeps_the_rules_of_custom_operators(with_state: bool) -> None:
    (*tensors, state), positions = make_inputs("one decay")
    args = (state if with_state else None, *tensors, positions, 0.3, 16)

    torch.library.opcheck(torch.ops.titanbench.delta_rule.default, args)


@pytest.mark.parametrize("channels", ["one decay", "decay per channel"])
@pytest.mark.parametrize("chunk_tokens", [1, 16, 128])
def test_the_transition_makes_the_last_state_of_any_state(channels: str, chunk_tokens: int) -> None:
    """M S + b, token by token; M is zero where a document begins: that state is forgotten."""
    (*tensors, state), positions = make_inputs(channels, strength=0.1)
    transition = delta_rule_transition(Inputs(*tensors, positions, 0.3, chunk_tokens))
    matrix, increment = transition.split([8, 6], dim=-1)

    # Enlarged: 75 tokens overwrite a state of width 8 up to some 1e-5 of it.
    for before in (state, -1e6 * state, torch.zeros_like(state)):
        _, last = delta_rule_by_token(*tensors, positions, before, 0.3)
        assert relative_error(matrix @ before + increment, last) < 1e-12
    assert not matrix[0].any()


@pytest.mark.parametrize("channels", ["one decay", "decay per channel"])
@pytest.mark.parametrize("chunk_tokens", [1, 16, 128])
def test_the_gradient_of_the_state_alone_is_that_of_backward(
    channels: str, chunk_tokens: int
) -> None:
    (*tensors, state), positions = make_inputs(channels, strength=0.1)
    out, _ = delta_rule_by_token(*tensors, positions, state, 0.3)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).double()
    (expected,) = torch.autograd.grad(out, state, dout)

    inputs = Inputs(*tensors, positions, 0.3, chunk_tokens)
    assert relative_error(delta_rule_state_gradient(inputs, dout), expected) < 1e-12


def test_the_operators_of_the_state_keep_the_rules_of_custom_operators() -> None:
    (*tensors, _), positions = make_inputs("one decay")
    args = (*(x.detach() for x in tensors), positions, 0.3, 16)

    torch.library.opcheck(torch.ops.titanbench.delta_rule_transition.default, args)
    dout = torch.ones_like(args[2])
    torch.library.opcheck(torch.ops.titanbench.delta_rule_state_gradient.default, (dout, *args))


class _LargestTensor(TorchDispatchMode):
    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


def test_memory_is_that_of_a_span_beside_inputs_and_states() -> None:
    """No tensor is larger than the inputs once the sequence has several spans."""
    largest = {}
    for S in (4096, 8192):
        q, k, v = (torch.randn(1, S, 1, 8) for _ in range(3))
        positions, decay = torch.arange(S)[None], torch.zeros(1, S, 1, 1)
        inputs = Inputs(q, k, v, decay, decay[..., 0], positions, 1.0, 16)
        with _LargestTensor() as mode:
            out, _, starts = delta_rule_spans.forward(inputs, None)
            delta_rule_spans.backward(inputs, starts, out, None)
        largest[S] = mode.largest

    assert largest == {4096: 4096 * 8, 8192: 8192 * 8}


def test_what_is_kept_for_backward_grows_linearly() -> None:
    def kept(S: int) -> int:
        tensors = [torch.randn(1, S, 2, 8, requires_grad=True) for _ in range(3)]
        tensors += [torch.zeros(1, S, 2, 1), torch.zeros(1, S, 2)]
        sizes: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            sizes[tensor.data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            delta_rule(Inputs(*tensors, torch.arange(S)[None], 1.0, 16), None)
        return sum(sizes.values())

    # Inputs, the position, and a state of 2 x 8 x 8 for each span of 16 chunks.
    assert kept(256) == 256 * (3 * 16 + 2 + 2 + 1) + 128
    assert kept(4096) == 16 * kept(256)


def test_flops_are_those_of_the_recurrence_and_backward_repeats_them() -> None:
    q, k = (torch.randn(2, 64, 2, 16, requires_grad=True) for _ in range(2))
    v = torch.randn(2, 64, 4, 8, requires_grad=True)
    decay = torch.zeros(2, 64, 4, 1)
    with FlopCounterMode(display=False) as counter:
        positions = torch.arange(64).repeat(2, 1)
        out, _, _ = delta_rule(Inputs(q, k, v, decay, decay[..., 0], positions, 1.0), None)
        forward = counter.get_total_flops()
        out.sum().backward()

    assert forward == 2 * 64 * 4 * (2 * 4 * 16 * 8)
    assert counter.get_total_flops() == 4 * forward


def test_flops_of_the_state_are_those_of_its_recurrences() -> None:
    """Three products of D (D + Dv), from first to last token; four of D Dv, from last to first."""
    q, k = (torch.randn(2, 64, 2, 16) for _ in range(2))
    v, decay = torch.randn(2, 64, 4, 8), torch.zeros(2, 64, 4, 1)
    inputs = Inputs(q, k, v, decay, decay[..., 0], torch.arange(64).repeat(2, 1), 1.0)
    with FlopCounterMode(display=False) as counter:
        delta_rule_transition(inputs)
        transition = counter.get_total_flops()
        delta_rule_state_gradient(inputs, v)

    assert transition == 2 * 64 * 4 * (2 * 3 * 16 * (16 + 8))
    assert counter.get_total_flops() - transition == 2 * 64 * 4 * (2 * 4 * 16 * 8)


def test_a_chunk_of_64_executes_an_eighth_more_than_is_counted() -> None:
    """For heads of 128: three products of a state's size, not four, and those within the chunk."""
    C, D = 64, 128
    x = torch.randn(1, 1, 1, C, D)
    zeros = torch.zeros(1, 1, 1, C, 1)
    span = delta_rule_chunks.Span(x, x, x, zeros, zeros, zeros[..., 0].long())
    with FlopCounterMode(display=False) as counter:
        delta_rule_chunks.forward(span, torch.zeros(1, 1, D, D))

    products = 2 * 3 * C * D * D + 2 * C * (C - 1) * D + 2 * C * C * D
    assert counter.get_total_flops() == products
    solve = C * C * 2 * D
    assert (products + solve) / (C * 2 * 4 * D * D) == pytest.approx(9 / 8, abs=0.01)


def make_convolution(dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    positions = pack([[20, 2, 1, 9], [32]], 8).positions_BS
    positions[1] += 2
    shapes = ((2, 32, 6), (6, 4), (2, 3, 6))
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [x.requires_grad_() for x in tensors], positions


def test_the_short_convolution_stays_in_its_document() -> None:
    """Forward and gradients equal the sum over taps, token by token; preceding tokens too."""
    tensors, positions = make_convolution(torch.float64)
    x, weight, preceding = tensors
    ours = short_convolution(x, weight, positions, preceding)
    theirs = convolution_by_token(x, weight, positions, preceding)
    grad = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1)).double()

    assert relative_error(ours, theirs) < 1e-12
    pairs = (torch.autograd.grad(out, tensors, grad) for out in (ours, theirs))
    for mine, other in zip(*pairs, strict=True):
        assert relative_error(mine, other) < 1e-12


def test_the_short_convolution_keeps_the_rules_of_custom_operators() -> None:
    (x, weight, preceding), positions = make_convolution(torch.float32)
    operator = torch.ops.titanbench.short_convolution.default
    for before in (preceding, None):
        torch.library.opcheck(operator, (x, weight, positions, before))


def test_the_short_convolution_counts_its_taps() -> None:
    (x, weight, _), positions = make_convolution(torch.float32)
    with FlopCounterMode(display=False) as counter:
        out = short_convolution(x, weight, positions, None)
        forward = counter.get_total_flops()
        out.sum().backward()

    assert forward == 2 * 4 * 2 * 32 * 6
    assert counter.get_total_flops() == 4 * forward


@pytest.mark.parametrize("kind", ["gated_delta_net", "kimi_delta_attention"])
def test_what_a_layer_keeps_for_backward_grows_linearly(kind: str) -> None:
    """From 4,096 to 32,768 tokens, every activation of the layer counted once."""
    common = {"head_dim": 4, "convolution_width": 4, "norm_eps": 1e-6, "output_scale": 1.0}
    layer = (
        GatedDeltaNet(8, 2, num_qk_heads=1, **common)
        if kind == "gated_delta_net"
        else KimiDeltaAttention(8, 2, decay_rank=4, decay_bound=-5.0, **common)
    )
    initialize(layer, collect_inits(layer), 0)
    weights = {parameter.data_ptr() for parameter in layer.parameters()}

    def kept_bytes(S: int) -> int:
        sizes: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            if tensor.data_ptr() not in weights:
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        positions = torch.arange(S)[None]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = layer(torch.randn(1, S, 8), Context(positions, positions, positions))
        assert out.requires_grad
        return sum(sizes.values())

    short = kept_bytes(4096)
    # A few values per head beside: rates, and weights in another form.
    assert kept_bytes(32768) == pytest.approx(8 * short, rel=1e-3)
