"""A product computes the gradients that a backward pass asks for, and no others."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bench.instruments.observation import Observation
from bench.instruments.operators import OperatorCounter
from models.ops.grouped_mm import grouped_mm
from parallel.mxfp8 import mxfp8_grouped_mm, mxfp8_linear

Product = Callable[[Tensor, Tensor], Tensor]
ENDS = torch.tensor([32, 32, 64], dtype=torch.int32)
PRODUCTS: dict[str, tuple[Product, tuple[int, ...]]] = {
    "grouped_mm": (lambda x, weight: grouped_mm(x, weight, ENDS), (3, 96, 64)),
    "mxfp8_grouped_mm": (lambda x, weight: mxfp8_grouped_mm(x, weight, ENDS), (3, 96, 64)),
    "mxfp8_linear": (mxfp8_linear, (96, 64)),
}


def executed_flops(run: Callable[[], object]) -> int:
    counter = OperatorCounter()
    with Observation([counter]):
        run()
    return counter.report()["executed_flops"]


@pytest.mark.parametrize("through", ["leaves", "nodes"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_each_part_of_a_backward_in_two_parts_costs_one_product(name: str, through: str) -> None:
    """Whether the inputs are leaves of the graph or come out of other operators."""
    product, shape = PRODUCTS[name]
    x, weight = torch.randn(64, 64).requires_grad_(), torch.randn(shape).requires_grad_()
    inputs = (x, weight) if through == "leaves" else (x * 1, weight * 1)
    forward = executed_flops(lambda: product(*inputs))
    y = product(*inputs)
    grad = torch.randn_like(y)

    def backward(*asked: Tensor) -> int:
        return executed_flops(lambda: torch.autograd.grad(y, asked, grad, retain_graph=True))

    assert forward > 0
    assert backward(x) == backward(weight) == forward
    assert backward(x, weight) == 2 * forward
    assert executed_flops(lambda: y.backward(grad)) == 2 * forward


@pytest.mark.parametrize("name", PRODUCTS)
def test_what_has_no_gradient_costs_nothing(name: str) -> None:
    product, shape = PRODUCTS[name]
    x, weight = torch.randn(64, 64), torch.randn(shape).requires_grad_()
    y = product(x, weight)

    assert executed_flops(lambda: y.sum().backward()) == executed_flops(lambda: product(x, weight))
