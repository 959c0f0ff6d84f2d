"""Attention with sinks against the softmax written out, forward and gradients."""

import pytest
import torch
from torch import Tensor

from models.ops.attention import attention
from models.ops.attention_sinks import attention_with_sinks
from tests.models.helpers import relative_error

B, H, D = 2, 4, 16
POSITIONS = torch.stack(
    [
        torch.cat([torch.arange(70), torch.arange(90)]),
        torch.cat([torch.arange(133), torch.arange(27)]),
    ]
)
S = POSITIONS.shape[1]


def inputs(num_kv_heads: int, v_dim: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, S, H, D), (B, S, num_kv_heads, D), (B, S, num_kv_heads, v_dim), (H,)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def written_out(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, scale: float, window: int):
    """Scores, a column for the sink, softmax, without the sink's column, values; in float64."""
    q, k, v, sinks = (x.double() for x in (q, k, v, sinks))
    k, v = (x.repeat_interleave(H // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    documents = (POSITIONS == 0).cumsum(1)
    distance = torch.arange(S)[:, None] - torch.arange(S)
    seen = (documents[:, :, None] == documents[:, None]) & (distance >= 0)
    if window:
        seen &= distance < window
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    column = sinks[None, :, None, None].expand(B, H, S, 1)
    weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


@pytest.mark.parametrize("window", [0, 24])
@pytest.mark.parametrize(("num_kv_heads", "v_dim"), [(4, 16), (2, 16), (1, 8)])
def test_output_and_gradients_are_those_of_a_softmax_with_one_more_logit(
    num_kv_heads: int, v_dim: int, window: int
) -> None:
    arguments = inputs(num_kv_heads, v_dim)
    grad = torch.randn(B, S, H, v_dim, generator=torch.Generator().manual_seed(1))

    ours = attention_with_sinks(*arguments, POSITIONS, 0.3, window)
    expected = written_out(*arguments, 0.3, window)
    gradients = torch.autograd.grad(ours, arguments, grad)
    expected_gradients = torch.autograd.grad(expected, arguments, grad.double())

    assert relative_error(ours.double(), expected) < 1e-5
    for mine, other in zip(gradients, expected_gradients, strict=True):
        assert relative_error(mine.double(), other.double()) < 1e-5


def test_a_sink_of_minus_infinity_is_none() -> None:
    q, k, v, _ = inputs(2, 16)
    out, _ = attention(q, k, v, POSITIONS, 0.3, 0)

    assert torch.equal(
        attention_with_sinks(q, k, v, torch.full((H,), float("-inf")), POSITIONS, 0.3, 0), out
    )


def test_in_bfloat16_gradients_are_near_those_in_float32() -> None:
    arguments = inputs(2, 16)
    halves = [x.detach().bfloat16().requires_grad_() for x in arguments]
    grad = torch.randn(B, S, H, 16, generator=torch.Generator().manual_seed(1))

    exact = torch.autograd.grad(
        attention_with_sinks(*arguments, POSITIONS, 0.3, 24), arguments, grad
    )
    rounded = torch.autograd.grad(
        attention_with_sinks(*halves, POSITIONS, 0.3, 24), halves, grad.bfloat16()
    )

    for mine, other in zip(rounded, exact, strict=True):
        assert mine.dtype == torch.bfloat16
        assert relative_error(mine.float(), other) < 0.03
