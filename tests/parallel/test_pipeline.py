"""Every pipeline schedule trains the same network as one rank, and moves what its form says."""

from collections import Counter
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from bench.trainer import Trainer
from parallel.schedules import RULES, Schedule
from tests.parallel.cases import count_collectives, executed_flops, tiny, train
from tests.parallel.test_equivalence import PER_EXPERT
from tests.rank_pool import RankPool
from workloads.workload import Precision, Workload

pytestmark = pytest.mark.distributed
exhaustive = pytest.mark.exhaustive
Steps = list[tuple[float, float, float]]
FLOAT32_BYTES = 4
MICROBATCHES = 4

SCHEDULES: list[dict[str, Any]] = [
    {"schedule": "GPipe"},
    {"schedule": "1F1B"},
    {"schedule": "Interleaved1F1B", "stages_per_rank": 2},
    {"schedule": "LoopedBFS", "stages_per_rank": 2},
    {"schedule": "InterleavedZeroBubble"},
    {"schedule": "InterleavedZeroBubble", "stages_per_rank": 2},
    {"schedule": "ZBVZeroBubble", "stages_per_rank": 2},
    {"schedule": "DualPipeV", "stages_per_rank": 2},
]
# One proof of each kind is quick; the others repeat it under another schedule.
REPEATED = {"GPipe", "LoopedBFS", "InterleavedZeroBubble"}
EACH_SCHEDULE: list[Any] = [
    pytest.param(plan, marks=exhaustive if plan["schedule"] in REPEATED else ())
    for plan in SCHEDULES
]
POLICIES: list[Any] = [
    {"schedule": "1F1B", "reshard_after_forward": True},
    {"schedule": "Interleaved1F1B", "stages_per_rank": 2, "remat": "selective"},
    pytest.param({"schedule": "GPipe", "reshard_after_forward": True}, marks=exhaustive),
    pytest.param(
        {"schedule": "Interleaved1F1B", "stages_per_rank": 2, "reshard_after_forward": True},
        marks=exhaustive,
    ),
    pytest.param({"schedule": "1F1B", "remat": "full"}, marks=exhaustive),
]
FOUR_RANKS: list[Any] = [
    {"pp": 4, "schedule": "1F1B"},
    pytest.param({"pp": 4, "schedule": "GPipe"}, marks=exhaustive),
    pytest.param({"pp": 2, "schedule": "1F1B"}, marks=exhaustive),
    {"pp": 2, "schedule": "1F1B", "reshard_after_forward": True},
    pytest.param(
        {"pp": 2, "schedule": "InterleavedZeroBubble", "stages_per_rank": 2}, marks=exhaustive
    ),
    pytest.param({"pp": 2, "schedule": "1F1B", "ep": 2, **PER_EXPERT}, marks=exhaustive),
    {"pp": 2, "ep": 2, **PER_EXPERT, "reshard_after_forward": True, "remat": "selective"},
    {"pp": 2, "schedule": "ZBVZeroBubble", "stages_per_rank": 2, "ep": 2, **PER_EXPERT},
    {"pp": 2, "schedule": "DualPipeV", "stages_per_rank": 2, "ep": 2, **PER_EXPERT},
    {"pp": 2, "schedule": "DualPipeV", "stages_per_rank": 2, "dp_replicate": 2},
]


def workload(model: str, world_size: int, **plan: Any) -> Workload:
    """Return eight sequences a step, so that two data ranks have four microbatches each."""
    return replace(tiny(model, world_size, **plan), global_batch_size=8)


def pipelined(model: str, world_size: int, **plan: Any) -> Workload:
    return workload(model, world_size, **{"pp": 2, "microbatches": MICROBATCHES, **plan})


def biases_and_embeddings(workload: Workload, steps: int) -> dict[str, Any]:
    """Return the routers' biases by layer, and this rank's shards of the embedding by stage."""
    trainer = Trainer(workload, torch.device("cpu"))
    for index in range(steps):
        trainer.step(index)
    biases = {name: moe.router.expert_bias.tolist() for name, moe in trainer.moe_layers()}
    embeddings = {
        stage.number: stage.model.embedding.weight.to_local().tolist()
        for stage in trainer.stages
        if stage.model.embedding is not None
    }
    return {"biases": biases, "embeddings": embeddings}


def described(workload: Workload) -> dict[str, Any]:
    return Trainer(workload, torch.device("cpu")).describe_pipeline()


@pytest.fixture(
    scope="module", params=["deepseek_v3", pytest.param("muse_spark", marks=exhaustive)]
)
def model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def reference(model: str, one_rank: RankPool) -> Steps:
    (steps,) = one_rank.run(train, workload(model, 1))
    return steps


def assert_same(ranks: list[Steps], reference: Steps) -> None:
    for steps in ranks:
        for step, expected in zip(steps, reference, strict=True):
            assert step == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("plan", SCHEDULES + POLICIES, ids=str)
def test_two_stages_of_ranks_equal_one_rank(
    two_ranks: RankPool, reference: Steps, model: str, plan: dict[str, Any]
) -> None:
    assert_same(two_ranks.run(train, pipelined(model, 2, **plan)), reference)


@pytest.mark.parametrize("plan", FOUR_RANKS, ids=str)
def test_pipelines_of_sharded_stages_equal_one_rank(
    four_ranks: RankPool, reference: Steps, model: str, plan: dict[str, Any]
) -> None:
    assert_same(four_ranks.run(train, pipelined(model, 4, **plan)), reference)


@pytest.mark.parametrize("num_microbatches", [2, 8])
def test_microbatches_flow_as_one_rank_accumulates_them(
    one_rank: RankPool, two_ranks: RankPool, model: str, num_microbatches: int
) -> None:
    """Against as many microbatches: in larger ones a router may round to another expert."""
    (expected,) = one_rank.run(train, workload(model, 1, microbatches=num_microbatches))

    assert_same(two_ranks.run(train, pipelined(model, 2, microbatches=num_microbatches)), expected)


@pytest.mark.parametrize("plan", [SCHEDULES[1], SCHEDULES[-1]], ids=str)
def test_bfloat16_crosses_the_boundaries_in_the_dtype_of_the_stream(
    one_rank: RankPool, two_ranks: RankPool, model: str, plan: dict[str, Any]
) -> None:
    """Muse Spark's stream is float32 also then. Gradients of microbatches are added in bfloat16."""
    (expected,) = one_rank.run(
        train, replace(workload(model, 1, microbatches=MICROBATCHES), precision=Precision()), 1
    )

    ranks = two_ranks.run(train, replace(pipelined(model, 2, **plan), precision=Precision()), 1)

    assert ranks[0] == ranks[1]
    assert ranks[0][0] == pytest.approx(expected[0], rel=2e-3)
    assert ranks[0][0][:2] == pytest.approx(expected[0][:2], rel=1e-6)


@pytest.mark.parametrize("plan", EACH_SCHEDULE, ids=str)
def test_same_seed_and_plan_give_the_same_bits(two_ranks: RankPool, plan: dict[str, Any]) -> None:
    pipeline = pipelined("deepseek_v3", 2, **plan)

    assert two_ranks.run(train, pipeline) == two_ranks.run(train, pipeline)


def test_two_depths_of_mtp_are_placed_like_any_part(
    one_rank: RankPool, four_ranks: RankPool
) -> None:
    """Over 4 stages the MTP modules land on two of them: three stages hold the embedding."""

    def deeper(world_size: int, **plan: Any) -> Workload:
        base = workload("deepseek_v3", world_size, **plan)
        return replace(base, model=replace(base.model, num_mtp_layers=2, dense_hidden_dim=512))

    pipeline = deeper(4, pp=4, microbatches=MICROBATCHES)
    parts = four_ranks.run(described, pipeline)[0]["parts"]
    holders = [stage for stage in parts.split(" | ") if "mtp" in stage]
    (expected,) = one_rank.run(train, deeper(1))

    assert len(holders) == 2
    assert_same(four_ranks.run(train, pipeline), expected)


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_copies_of_the_embedding_stay_equal_and_biases_are_those_of_one_rank(
    one_rank: RankPool, two_ranks: RankPool, schedule: Schedule
) -> None:
    per_rank = 2 if RULES[schedule].in_v else 1
    pipeline = pipelined("deepseek_v3", 2, schedule=schedule, stages_per_rank=per_rank)

    alone = one_rank.run(biases_and_embeddings, workload("deepseek_v3", 1), 3)[0]
    ranks = two_ranks.run(biases_and_embeddings, pipeline, 3)

    first, *copies = [table for rank in ranks for table in rank["embeddings"].values()]
    assert len(copies) == 1
    assert copies[0] == first
    biases = {name: bias for rank in ranks for name, bias in rank["biases"].items()}
    assert biases == alone["biases"]
    assert any(value != 0 for bias in biases.values() for value in bias)


@pytest.mark.parametrize("plan", EACH_SCHEDULE, ids=str)
def test_sends_and_receives_equal_the_closed_form(
    two_ranks: RankPool, plan: dict[str, Any]
) -> None:
    """B x S x D values forward and as many backward, per microbatch and boundary between ranks.

    In a V the middle two stages are on one rank, and so are both copies of the embedding.
    """
    pipeline = pipelined("muse_spark", 2, **plan)
    num_stages = pipeline.plan.num_stages
    boundaries = num_stages - 1 - RULES[pipeline.plan.schedule].in_v
    tokens = pipeline.tokens_per_step // MICROBATCHES
    number = boundaries * MICROBATCHES

    counts = [rank["pp"] for rank in two_ranks.run(count_collectives, pipeline)]

    for rank in counts:
        sent, received = rank["send"], rank["recv"]
        assert sent["count"] == received["count"] == number
        assert sent["bytes"] == number * tokens * pipeline.model.dim * FLOAT32_BYTES
        assert received["bytes"] == sent["bytes"]


@pytest.mark.parametrize("quantization", ["none", "mxfp8"])
@pytest.mark.parametrize("plan", [SCHEDULES[4], SCHEDULES[6]], ids=str)
def test_a_backward_in_two_parts_executes_the_products_of_a_whole_one(
    one_rank: RankPool, two_ranks: RankPool, plan: dict[str, Any], quantization: str
) -> None:
    """Operator by operator: the inputs' part computes no weight gradient, nor the other way."""
    precision = Precision(compute="bfloat16", quantization=quantization)
    whole, split = (
        replace(case, precision=precision)
        for case in (
            workload("deepseek_v3", 1, microbatches=MICROBATCHES),
            pipelined("deepseek_v3", 2, **plan),
        )
    )
    (expected,) = one_rank.run(executed_flops, whole)
    executed = sum((Counter(rank) for rank in two_ranks.run(executed_flops, split)), Counter())

    assert executed == Counter(expected)
    assert any("mxfp8" in operator for operator in executed) == (quantization == "mxfp8")


def test_the_gradient_of_the_embedding_travels_once_a_step(two_ranks: RankPool) -> None:
    """With MTP each holder of the embedding sends its shard of the gradient to the other."""
    pipeline = pipelined("deepseek_v3", 2)
    config = pipeline.model
    stream = pipeline.tokens_per_step * config.dim

    sent = two_ranks.run(count_collectives, pipeline)[0]["pp"]["send"]

    assert sent["count"] == MICROBATCHES + 1
    assert sent["bytes"] == FLOAT32_BYTES * (stream + config.vocab_size * config.dim)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_parameters_are_gathered_once_a_step_or_in_every_microbatch(
    four_ranks: RankPool, schedule: Schedule
) -> None:
    """Blocks: once, or in forward and backward of each microbatch; what is around them: once,
    or once each. Gradients are reduced once.
    """

    def gathers(reshard: bool) -> list[dict[str, dict[str, int]]]:
        plan = pipelined("muse_spark", 4, schedule=schedule, reshard_after_forward=reshard)
        counted = four_ranks.run(count_collectives, plan)
        return [rank[axis] for rank in counted for axis in rank if axis.startswith("dp_shard")]

    for once, each in zip(gathers(False), gathers(True), strict=True):
        num_blocks = once["reduce_scatter"]["count"] - 1
        assert num_blocks == 2
        assert once["all_gather"]["count"] == num_blocks + 1
        assert once["all_gather"]["bytes"] == once["reduce_scatter"]["bytes"]
        assert each["reduce_scatter"] == once["reduce_scatter"]
        assert each["all_gather"]["count"] == MICROBATCHES * (2 * num_blocks + 1)


def test_an_uneven_pipeline_says_what_its_bubble_is(two_ranks: RankPool) -> None:
    even, (here, _) = (
        100 * 1 / (MICROBATCHES + 1),
        two_ranks.run(described, pipelined("muse_spark", 2)),
    )

    assert here["num_stages"] == 2
    assert here["schedule"] == "1F1B"
    assert here["bubble_percent"] >= even
