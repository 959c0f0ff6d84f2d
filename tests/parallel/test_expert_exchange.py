"""However tokens are exchanged with their experts, the network of one rank is trained."""

from typing import Any, NamedTuple

import pytest
import torch
from msgspec.structs import replace

from bench.instruments.routing import RoutingCounter
from bench.trainer import Trainer
from models.qwen3 import QWEN3_PROXY
from parallel.check import check_layout
from parallel.plan import ParallelPlan
from tests.parallel.cases import train
from tests.parallel.test_divided_sequences import TOLERANCE
from tests.parallel.test_divided_sequences import smooth as tiny
from tests.parallel.test_equivalence import PER_EXPERT, Steps, assert_same
from tests.rank_pool import RankPool
from workloads.build import build_whole
from workloads.workload import Precision, Workload

distributed = pytest.mark.distributed
exhaustive = pytest.mark.exhaustive
OVERLAP = {"expert_overlap": True, "expert_chunks": 2}
EVERY_TIME = {"microbatches": 2, "reduce_gradients": "microbatch"}

TWO_RANKS: list[Any] = [
    {},
    {**OVERLAP, "remat": "full"},
    {**OVERLAP, "remat": "selective", "microbatches": 2},
    {**OVERLAP, **PER_EXPERT},
    pytest.param({"expert_overlap": True}, marks=exhaustive),
    pytest.param({"expert_chunks": 3}, marks=exhaustive),
    pytest.param({**OVERLAP, **PER_EXPERT, "remat": "full"}, marks=exhaustive),
    pytest.param({**OVERLAP, "compile": "local"}, marks=exhaustive),
    pytest.param({**OVERLAP, "compile": "block"}, marks=exhaustive),
]
FOUR_RANKS: list[Any] = [
    {"ep": 4, **OVERLAP},
    {"ep": 2, "dp_replicate": 2, **OVERLAP},
    {"ep": 2, "cp": 2, **OVERLAP},
    {"ep": 4, "tp": 2, **OVERLAP},
    pytest.param({"ep": 4}, marks=exhaustive),
    pytest.param({"ep": 2, "expert_chunks": 2}, marks=exhaustive),
    pytest.param({"ep": 4, **OVERLAP, **PER_EXPERT}, marks=exhaustive),
    pytest.param({"ep": 4, "cp": 2}, marks=exhaustive),
    pytest.param({"ep": 2, "cp": 2, **OVERLAP, **EVERY_TIME}, marks=exhaustive),
]
PIPELINES: list[Any] = [
    {"schedule": "1F1B", "reshard_after_forward": True, "remat": "selective"},
    {"schedule": "ZBVZeroBubble", "stages_per_rank": 2},
    {"schedule": "DualPipeV", "stages_per_rank": 2},
    pytest.param({"schedule": "1F1B"}, marks=exhaustive),
    pytest.param({"schedule": "DualPipeV", "stages_per_rank": 2, **PER_EXPERT}, marks=exhaustive),
]


@pytest.fixture(
    scope="module", params=["deepseek_v3", pytest.param("muse_spark", marks=exhaustive)]
)
def model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=["per_rank", "per_expert"])
def exchange(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def reference(model: str, one_rank: RankPool) -> Steps:
    (steps,) = one_rank.run(train, tiny(model, 1))
    return steps


@distributed
@pytest.mark.parametrize("plan", TWO_RANKS, ids=str)
def test_two_ranks_equal_one(
    two_ranks: RankPool, reference: Steps, model: str, plan: dict[str, Any]
) -> None:
    steps = two_ranks.run(train, tiny(model, 2, ep=2, **plan))

    assert_same(steps, reference, relative=TOLERANCE[model])


@distributed
@pytest.mark.parametrize("plan", FOUR_RANKS, ids=str)
def test_four_ranks_equal_one(
    four_ranks: RankPool, reference: Steps, model: str, plan: dict[str, Any]
) -> None:
    steps = four_ranks.run(train, tiny(model, 4, **plan))

    assert_same(steps, reference, relative=TOLERANCE[model])


@distributed
@pytest.mark.parametrize("plan", PIPELINES, ids=str)
def test_pipelines_with_mtp_equal_one_rank(
    one_rank: RankPool, four_ranks: RankPool, plan: dict[str, Any]
) -> None:
    """Also where a backward runs in two parts."""
    pipeline = {"pp": 2, "microbatches": 4, "ep": 2, **OVERLAP, **plan}
    (alone,) = one_rank.run(train, replace(tiny("deepseek_v3", 1), global_batch_size=8))

    steps = four_ranks.run(train, replace(tiny("deepseek_v3", 4, **pipeline), global_batch_size=8))

    assert_same(steps, alone)


@distributed
@pytest.mark.parametrize("routing", ["random", "balanced_strided"])
def test_forced_routing_equals_one_rank(
    one_rank: RankPool, two_ranks: RankPool, routing: str
) -> None:
    """Every rank forces the same choices on its own tokens: one rank in two microbatches."""
    alone = replace(tiny("deepseek_v3", 1, microbatches=2), routing=routing)
    spread_out = replace(tiny("deepseek_v3", 2, ep=2, **OVERLAP), routing=routing)

    assert_same(two_ranks.run(train, spread_out), one_rank.run(train, alone)[0])


class Crowded(NamedTuple):
    """Steps, and the rows that this rank's experts worked on."""

    steps: Steps
    rows: int


def train_crowded(workload: Workload) -> Crowded:
    """Train with routers that choose among the first half of the experts."""
    trainer = Trainer(workload, torch.device("cpu"))
    for _, moe in trainer.moe_layers():
        moe.router.expert_bias[: len(moe.router.expert_bias) // 2] += 10.0
    with RoutingCounter(trainer.moe_layers(), workload.plan.ep) as counter:
        results = [trainer.step(index) for index in range(3)]
    steps = [(r.loss.item(), r.mtp_loss.item(), r.grad_norm.item()) for r in results]
    return Crowded(steps, sum(layer["rows"] for layer in counter.report()["layers"].values()))


@distributed
@pytest.mark.parametrize("plan", [{}, OVERLAP], ids=str)
def test_a_rank_may_receive_nothing(
    one_rank: RankPool, two_ranks: RankPool, exchange: str, plan: dict[str, Any]
) -> None:
    workload = tiny("deepseek_v3", 2, ep=2, expert_exchange=exchange, **plan)
    (alone,) = one_rank.run(train_crowded, tiny("deepseek_v3", 1))

    first, second = two_ranks.run(train_crowded, workload)

    assert (first.rows, second.rows) == (alone.rows, 0)
    assert_same([first.steps, second.steps], alone.steps)


@distributed
@pytest.mark.parametrize("plan", [{}, OVERLAP], ids=str)
def test_same_seed_and_plan_give_the_same_bits(two_ranks: RankPool, plan: dict[str, Any]) -> None:
    workload = tiny("deepseek_v3", 2, ep=2, **plan)

    assert two_ranks.run(train, workload) == two_ranks.run(train, workload)


@distributed
def test_overlap_with_the_shared_expert_changes_no_bit(two_ranks: RankPool, exchange: str) -> None:
    workload = tiny("deepseek_v3", 2, ep=2, expert_exchange=exchange)
    overlapped = replace(workload, plan=replace(workload.plan, expert_overlap=True))

    assert two_ranks.run(train, overlapped) == two_ranks.run(train, workload)


@distributed
@pytest.mark.parametrize("plan", [{}, OVERLAP], ids=str)
def test_mxfp8_experts_are_near_those_of_one_rank(
    one_rank: RankPool, two_ranks: RankPool, plan: dict[str, Any]
) -> None:
    """Rows are quantized alike wherever they are; sums of a rank are rounded to bfloat16."""
    mxfp8 = Precision(compute="bfloat16", quantization="mxfp8")
    alone = one_rank.run(train, tiny("deepseek_v3", 1, precision=mxfp8), 1)

    ranks = two_ranks.run(train, tiny("deepseek_v3", 2, precision=mxfp8, ep=2, **plan), 1)

    assert ranks[0][0][:2] == pytest.approx(alone[0][0][:2], rel=1e-3)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"expert_overlap": True}, "plan.expert_overlap=True needs expert ranks"),
        ({"expert_chunks": 2}, "plan.expert_chunks=2 needs expert ranks"),
        ({"expert_exchange": "per_expert"}, "plan.expert_exchange=per_expert needs expert ranks"),
        ({"expert_chunks": 0, "ep": 2}, "plan.expert_chunks=0: must be at least 1"),
    ],
    ids=str,
)
def test_refusals(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelPlan(**plan)


def test_overlap_needs_a_shared_expert() -> None:
    plan = ParallelPlan(ep=2, expert_overlap=True).resolve(2)

    check_layout(build_whole(tiny("deepseek_v3", 1)), plan)
    with pytest.raises(ValueError, match=r"no shared expert.*plan\.expert_chunks needs none"):
        check_layout(QWEN3_PROXY.build(), plan)
