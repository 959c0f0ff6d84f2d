"""Copies of rows: spread and merged as by plain indexing, with its gradients."""

from typing import Any

import torch
from torch import Tensor

from parallel.copies import copies_of, merge, spread


def test_copies_and_their_weighted_sums_have_the_gradients_of_indexing() -> None:
    """Rows with several copies, one and none."""
    generator = torch.Generator().manual_seed(0)
    T, R, D = 9, 20, 6
    source = torch.randint(0, T - 1, (R,), generator=generator)
    x, weights, grad = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((T, D), (R,), (T, D))
    )
    targets = [x.requires_grad_(), weights.requires_grad_()]

    def mix(rows: Tensor, gather: Any, add: Any) -> Tensor:
        return rows * add(gather(rows).sin() * 3, weights) + add(gather(rows), None)

    def add_up(rows: Tensor, factors: Tensor | None) -> Tensor:
        weighted = rows if factors is None else rows * factors[:, None]
        return torch.zeros(T, D, dtype=rows.dtype).index_add(0, source, weighted)

    copies = copies_of(source, T)
    ours = mix(x, lambda x: spread(x, copies), lambda rows, w: merge(rows, copies, w))
    expected = mix(x, lambda x: x[source], add_up)

    torch.testing.assert_close(ours, expected)
    for mine, other in zip(
        torch.autograd.grad(ours, targets, grad),
        torch.autograd.grad(expected, targets, grad),
        strict=True,
    ):
        torch.testing.assert_close(mine, other)


def test_no_rows_have_no_copies() -> None:
    copies = copies_of(torch.zeros(0, dtype=torch.int64), 3)

    assert spread(torch.randn(3, 4), copies).shape == (0, 4)
    assert torch.equal(merge(torch.zeros(0, 4), copies, torch.zeros(0)), torch.zeros(3, 4))
