"""Divided sequences differ from one rank by rounding alone: in float64 they hardly differ at all.

With AdamW's usual epsilon of 1e-8, which turns rounding in gradients near zero into whole updates.
In float32 a step then drifts by up to a percent (Muse Spark over tensor ranks, after three steps);
an error of the layout would be as large in float64 as it is in float32.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parallel.cases import tiny, train
from tests.parallel.test_equivalence import Steps, assert_same
from tests.rank_pool import RankPool
from workloads.workload import Workload

pytestmark = pytest.mark.distributed
TOLERANCE = 1e-11
"""Found: 6e-16 for DeepSeek, 7e-13 for Muse Spark, whose softmax enlarges rounding."""
PLANS: list[dict[str, Any]] = [
    {"tp": 2},
    {"cp": 2},
    {"cp": 2, "context": "ulysses"},
    {"cp": 2, "context": "ring"},
]


def grouped_product(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
    """torch's grouped_mm, which has no float64, as a loop over the groups."""
    spans = [slice(start, end) for start, end in pairwise([0, *offs.tolist()])]
    if b.dim() == 2:
        return torch.stack([a[:, rows] @ b[rows] for rows in spans])
    products = [a[rows] @ matrix for rows, matrix in zip(spans, b, strict=True)]
    rest = a.new_zeros(len(a) - spans[-1].stop, b.shape[2])
    return torch.cat([*products, rest])


@contextmanager
def in_float64() -> Iterator[None]:
    """Make every float32 that code names while this is open a float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(Tensor, "float", Tensor.double)
        patch.setattr(torch.nn.functional, "grouped_mm", grouped_product)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float)


def train_in_float64(workload: Workload) -> Steps:
    """Return losses and gradient norms of three steps: parameters, products, sums and moments."""
    assert workload.training.epsilon == 1e-8
    with in_float64():
        return train(workload)


@pytest.fixture(
    scope="module", params=["deepseek_v3", pytest.param("muse_spark", marks=pytest.mark.exhaustive)]
)
def model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def reference(model: str, one_rank: RankPool) -> Steps:
    (steps,) = one_rank.run(train_in_float64, tiny(model, 1))
    return steps


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_two_ranks_equal_one_to_rounding(
    two_ranks: RankPool, reference: Steps, model: str, plan: dict[str, Any]
) -> None:
    steps = two_ranks.run(train_in_float64, tiny(model, 2, **plan))

    assert_same(steps, reference, relative=TOLERANCE)


def test_both_together_equal_one_rank_to_rounding(
    four_ranks: RankPool, reference: Steps, model: str
) -> None:
    steps = four_ranks.run(train_in_float64, tiny(model, 4, tp=2, cp=2))

    assert_same(steps, reference, relative=TOLERANCE)
