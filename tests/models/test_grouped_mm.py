"""The grouped product against a loop over the groups."""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from models.ops.grouped_mm import grouped_mm
from tests.models.helpers import relative_error

ENDS = {
    "all_alike": [5, 10, 15, 20],
    "an_empty_group": [5, 5, 12, 20],
    "an_empty_first_group": [0, 9, 12, 20],
    "rows_of_no_group": [5, 5, 12, 17],
    "nothing_routed": [0, 0, 0, 0],
}


def make_inputs(ends: list[int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(4, 8, 16, generator=generator).to(dtype).requires_grad_()
    return [x, weight, torch.tensor(ends, dtype=torch.int32)]


def loop(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    ends = offsets.tolist()
    parts = [
        x[start:end] @ matrix.t()
        for matrix, start, end in zip(weight, [0, *ends], ends, strict=False)
    ]
    return torch.cat([*parts, x.new_zeros(len(x) - ends[-1], weight.shape[1])])


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS.keys())
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_product_and_gradients_equal_a_loop(
    ends: list[int], dtype: torch.dtype, tolerance: float
) -> None:
    x, weight, offsets = make_inputs(ends, dtype)
    ours, expected = grouped_mm(x, weight, offsets), loop(x, weight, offsets)
    grad = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1)).to(dtype)

    gradients = torch.autograd.grad(ours, (x, weight), grad)
    expected_gradients = torch.autograd.grad(expected, (x, weight), grad)

    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
    for mine, other in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)


def test_an_expanded_gradient_is_accepted() -> None:
    """The gradient of a plain sum has strides of zero."""
    x, weight, offsets = make_inputs(ENDS["all_alike"])

    grouped_mm(x, weight, offsets).sum().backward()

    expected = torch.autograd.grad(loop(x, weight, offsets).sum(), (x, weight))
    assert relative_error(x.grad, expected[0]) < 1e-5
    assert relative_error(weight.grad, expected[1]) < 1e-5


def test_the_operator_keeps_the_rules_of_custom_operators() -> None:
    torch.library.opcheck(
        torch.ops.titanbench.grouped_mm.default, make_inputs(ENDS["an_empty_group"])
    )


def test_flops_are_three_products_of_all_rows() -> None:
    x, weight, offsets = make_inputs(ENDS["an_empty_group"])
    with FlopCounterMode(display=False) as counter:
        grouped_mm(x, weight, offsets).sum().backward()

    assert counter.get_total_flops() == 3 * 2 * 20 * 16 * 8
