"""The adapters to Attention Gym, with its reference implementations in place of its kernels.

They share the kernels' functions, layouts, offsets of documents and states; that the fused kernels
compute the same is for a machine with CUDA.
"""

import inspect

import pytest
import torch
from torch import Tensor

from models.layers.compression import map_entries
from models.ops import choose_entries as choosing
from models.ops import delta_rule_spans as spans
from models.ops import gym_delta_rule, gym_sparse
from models.ops.delta_rule_spans import Inputs
from models.ops.gym_sparse import gathered_attention
from models.ops.joint_attention import Seen, joint_attention
from tests.models.helpers import pack, relative_error

pytest.importorskip("attn_gym")

DOCUMENTS = [[50, 3, 47], [20, 8, 72]]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def delta_inputs(num_decays: int, positions: Tensor) -> Inputs:
    B, S, H, Hk, D, Dv = 2, 70, 4, 2 if num_decays == 1 else 4, 16, 16
    q, k, v = random(B, S, Hk, D), random(B, S, Hk, D, seed=1), random(B, S, H, Dv, seed=2)
    log_decay = -random(B, S, H, num_decays, seed=3).abs()
    beta = random(B, S, H, seed=4).sigmoid()
    return Inputs(q, k, v, log_decay, beta, positions, D**-0.5, 64)


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("num_decays", [1, 16])
def test_the_delta_rule_equals_the_chunks(num_decays: int, goes_on: bool) -> None:
    """Outputs, last states and all gradients; rows that begin a document or go on with one."""
    positions = pack([[30, 40], [70]], 8).positions_BS
    if goes_on:
        positions[0, :30] += 7
    inputs = delta_inputs(num_decays, positions)
    state = random(2, 4, 16, 16, seed=5)
    out, after, starts = gym_delta_rule.forward(inputs, state, impl="reference")
    expected, expected_after, expected_starts = spans.forward(inputs, state)
    dout, dstate = random(*out.shape, seed=6), random(*state.shape, seed=7)

    ours = gym_delta_rule.backward(inputs, starts, dout, dstate, impl="reference")
    theirs = spans.backward(inputs, expected_starts, dout, dstate)

    assert starts.shape == expected_starts.shape
    assert relative_error(out, expected) < 1e-4
    assert relative_error(after, expected_after) < 1e-4
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.shape == other.shape
        # No gradient reaches a state where all rows begin a document.
        assert (mine - other).abs().max() <= 1e-4 * other.abs().max()


@pytest.mark.parametrize("documents", [DOCUMENTS, [[100], [100]]])
def test_a_window_chosen_entries_and_sinks_equal_the_two_kernels(
    documents: list[list[int]],
) -> None:
    """Output and all gradients, for queries with all, some or none of their places filled."""
    block, window, H, D = 8, 30, 3, 16
    positions = pack(documents, 8).positions_BS
    entries = map_entries(positions, block, 8, 10_000.0, None)
    number = torch.arange(12)
    first, last = entries.first_BS[..., None], entries.last_BS[..., None]
    kept = (number >= first) & (number < last) & (random(2, 100, 12, seed=5) > 0)
    chosen = number.where(kept, torch.tensor(-1)).sort(-1, descending=True).values[..., :4].int()
    shapes = ((2, 100, H, D), (2, 100, D), (2, 12, D), (H,))
    inputs = [random(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    rest = (positions, entries.first_BS, chosen, block, D**-0.5, window, "reference")
    grad = random(2, 100, H, D, seed=9)

    out = gathered_attention(*inputs, *rest)
    seen = Seen(entries.first_BS, entries.last_BS, block, chosen)
    expected = joint_attention(*inputs, positions, seen, scale=D**-0.5, window=window)
    ours = torch.autograd.grad(out, inputs, grad)
    theirs = torch.autograd.grad(expected, inputs, grad)

    assert relative_error(out, expected) < 1e-5
    for mine, other in zip(ours, theirs, strict=True):
        assert relative_error(mine, other) < 1e-5
    checks = ("test_schema", "test_faketensor")
    operator = torch.ops.titanbench.gathered_attention.default
    torch.library.opcheck(operator, (*inputs, *rest), test_utils=checks)


def test_the_indexer_chooses_what_the_tiles_choose() -> None:
    positions = pack(DOCUMENTS, 8).positions_BS
    entries = map_entries(positions, 8, 8, 10_000.0, None)
    q, keys, weights = random(2, 100, 4, 16), random(2, 12, 16, seed=1), random(2, 100, 4, seed=2)
    first, last = entries.first_BS, entries.last_BS

    mine = gym_sparse.choose_entries(q, keys, weights, positions, first, 8, 3, impl="reference")
    theirs = choosing.choose_entries(q, keys, weights, positions, first, last, 8, 3)

    assert mine.dtype == theirs.dtype == torch.int32
    assert mine.sort(-1).values.equal(theirs.sort(-1).values)


def test_the_installed_version_takes_the_arguments_that_the_adapters_pass() -> None:
    """The fused kernels are asked for by the same functions, with these names."""
    import attn_gym.linear
    import attn_gym.sparse

    passed = {
        attn_gym.linear.chunk_gdn: ["initial_state", "cu_seqlens", "scale", "output_final_state"],
        attn_gym.linear.chunk_kda: ["initial_state", "cu_seqlens", "scale", "output_final_state"],
        attn_gym.sparse.gather_attn: ["sliding_window_size", "cu_seqlens", "cu_seqlens_k", "scale"],
        attn_gym.sparse.lightning_indexer: ["causal", "compress_ratio", "cu_seqlens_k"],
    }
    for function, names in passed.items():
        parameters = inspect.signature(function).parameters
        assert set(names) <= parameters.keys()
        assert parameters["impl"].default == "fused"
