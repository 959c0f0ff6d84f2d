"""Every layout trains the same network: losses and gradient norms equal those of one rank."""

from typing import Any

import pytest

from tests.parallel.cases import FP32, tiny, train
from tests.rank_pool import RankPool
from workloads.workload import Precision

pytestmark = pytest.mark.distributed
Steps = list[tuple[float, float, float]]

PER_EXPERT = {"expert_exchange": "per_expert"}
"""Sums in the order of one rank: AdamW's first updates turn another's rounding into signs."""

TWO_RANKS: list[dict[str, Any]] = [
    {},
    {"ep": 2, **PER_EXPERT},
    {"dp_replicate": 2},
    {"ep": 2, **PER_EXPERT, "microbatches": 2},
    {"ep": 2, **PER_EXPERT, "remat": "full"},
    {"ep": 2, **PER_EXPERT, "remat": "selective"},
    {"reshard_after_forward": False},
]
FOUR_RANKS: list[dict[str, Any]] = [
    {},
    {"ep": 2, **PER_EXPERT},
    {"ep": 4, **PER_EXPERT},
    {"dp_replicate": 2, "ep": 2, **PER_EXPERT},
]


@pytest.fixture(scope="module", params=["deepseek_v3", "muse_spark"])
def model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def reference(model: str, one_rank: RankPool) -> Steps:
    (steps,) = one_rank.run(train, tiny(model, 1))
    return steps


def assert_same(ranks: list[Steps], reference: Steps, *, relative: float = 1e-5) -> None:
    for steps in ranks:
        for step, expected in zip(steps, reference, strict=True):
            assert step == pytest.approx(expected, rel=relative)


@pytest.mark.parametrize("plan", TWO_RANKS, ids=str)
def test_two_ranks_equal_one(
    two_ranks: RankPool, reference: Steps, model: str, plan: dict[str, Any]
) -> None:
    assert_same(two_ranks.run(train, tiny(model, 2, **plan)), reference)


@pytest.mark.parametrize("plan", FOUR_RANKS, ids=str)
def test_four_ranks_equal_one(
    four_ranks: RankPool, reference: Steps, model: str, plan: dict[str, Any]
) -> None:
    assert_same(four_ranks.run(train, tiny(model, 4, **plan)), reference)


def test_gradient_accumulation_equals_one_batch(
    one_rank: RankPool, reference: Steps, model: str
) -> None:
    assert_same(one_rank.run(train, tiny(model, 1, microbatches=4)), reference)


def test_same_seed_and_plan_give_the_same_bits(two_ranks: RankPool, model: str) -> None:
    workload = tiny(model, 2, ep=2)

    first, second = two_ranks.run(train, workload), two_ranks.run(train, workload)

    assert first == second


def test_mxfp8_experts_are_the_same_on_any_layout(one_rank: RankPool, two_ranks: RankPool) -> None:
    """Quantization is by row block, so moving rows between ranks changes no forward value."""
    mxfp8 = Precision(compute="bfloat16", quantization="mxfp8")

    alone = one_rank.run(train, tiny("deepseek_v3", 1, precision=mxfp8), 1)
    spread = two_ranks.run(train, tiny("deepseek_v3", 2, precision=mxfp8, ep=2, **PER_EXPERT), 1)

    assert spread[0][0][:2] == pytest.approx(alone[0][0][:2], rel=1e-4)


def test_lower_precision_is_near_fp32_but_not_equal(one_rank: RankPool, reference: Steps) -> None:
    """The precision setting reaches the products: the loss moves, but by rounding alone."""
    for precision in (Precision(), Precision(quantization="mxfp8")):
        ((step, *_),) = one_rank.run(train, tiny("deepseek_v3", 1, precision=precision), 1)
        ((expected, *_),) = one_rank.run(train, tiny("deepseek_v3", 1, precision=FP32), 1)

        assert step[0] != expected[0]
        assert step[0] == pytest.approx(expected[0], rel=0.03)
