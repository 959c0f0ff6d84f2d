"""Gradients are reduced once a step or after every microbatch, with one result."""

from typing import Any

import pytest
from msgspec.structs import replace

from tests.parallel.cases import count_collectives, tiny, train
from tests.parallel.test_equivalence import Steps, assert_same
from tests.rank_pool import RankPool
from workloads.workload import Precision, Workload

pytestmark = pytest.mark.distributed
Counts = dict[str, dict[str, dict[str, int]]]

ACCUMULATED: list[dict[str, Any]] = [
    {"microbatches": 4},
    {"microbatches": 4, "ep": 2, "reshard_after_forward": False},
]
REPLICATED: dict[str, Any] = {"dp_replicate": 2, "microbatches": 2, "ep": 2}
PIPELINED: list[dict[str, Any]] = [
    {"schedule": "1F1B"},
    {"schedule": "GPipe", "reshard_after_forward": True},
    {"schedule": "ZBVZeroBubble", "stages_per_rank": 2, "ep": 2},
    {"schedule": "DualPipeV", "stages_per_rank": 2},
]


def workload(world_size: int, **plan: Any) -> Workload:
    return replace(tiny("deepseek_v3", world_size, **plan), global_batch_size=8)


def both(pool: RankPool, **plan: Any) -> tuple[Counts, Counts]:
    """Return the collectives of a rank that reduces once a step, and in every microbatch."""
    step, microbatch = (
        pool.run(count_collectives, workload(pool.world_size, reduce_gradients=when, **plan))[0]
        for when in ("step", "microbatch")
    )
    return step, microbatch


def times(number: int, moved: dict[str, int]) -> dict[str, int]:
    return {name: number * value for name, value in moved.items()}


@pytest.fixture(scope="module")
def reference(one_rank: RankPool) -> Steps:
    (steps,) = one_rank.run(train, workload(1))
    return steps


@pytest.mark.parametrize("plan", ACCUMULATED, ids=str)
def test_accumulated_steps_equal_one_rank(
    two_ranks: RankPool, reference: Steps, plan: dict[str, Any]
) -> None:
    case = workload(2, reduce_gradients="microbatch", **plan)

    assert_same(two_ranks.run(train, case), reference)


@pytest.mark.parametrize(
    "plan", [REPLICATED, *({"pp": 2, "microbatches": 4, **p} for p in PIPELINED)], ids=str
)
def test_replicated_and_pipelined_steps_equal_one_rank(
    four_ranks: RankPool, reference: Steps, plan: dict[str, Any]
) -> None:
    case = workload(4, reduce_gradients="microbatch", **plan)

    assert_same(four_ranks.run(train, case), reference)


@pytest.mark.parametrize("reshard", [True, False])
def test_every_microbatch_scatters_what_a_step_would_once(
    two_ranks: RankPool, reshard: bool
) -> None:
    """What is gathered does not change: blocks twice a microbatch and the root once, or all once.

    Bytes that are gathered or scattered once are those of every parameter.
    """
    step, microbatch = both(two_ranks, microbatches=4, reshard_after_forward=reshard)
    once = step["dp_shard"]["reduce_scatter"]
    num_blocks = once["count"] - 1

    assert microbatch["dp_shard"]["reduce_scatter"] == times(4, once)
    assert microbatch["dp_shard"]["all_gather"] == step["dp_shard"]["all_gather"]
    if reshard:
        assert step["dp_shard"]["all_gather"]["count"] == 4 * (2 * num_blocks + 1)
    else:
        assert step["dp_shard"]["all_gather"] == once


def test_a_reduction_in_bfloat16_sends_half_and_rounds_gradients_alone(
    two_ranks: RankPool, reference: Steps
) -> None:
    high = workload(2, ep=2)
    low = replace(high, precision=Precision(compute="float32", reduce="bfloat16"))
    (sent_high, _), (sent_low, _) = (two_ranks.run(count_collectives, case) for case in (high, low))
    (loss, mtp_loss, grad_norm), *_ = two_ranks.run(train, low, 1)[0]

    scattered, half = (x["dp_shard"]["reduce_scatter"] for x in (sent_high, sent_low))
    assert half == {"count": scattered["count"], "bytes": scattered["bytes"] // 2}
    assert sent_low["dp_shard"]["all_gather"] == sent_high["dp_shard"]["all_gather"]
    assert (loss, mtp_loss) == pytest.approx(reference[0][:2], rel=1e-6)
    assert grad_norm != reference[0][2]
    assert grad_norm == pytest.approx(reference[0][2], rel=2**-8)


def test_replicas_add_up_their_shards_once_a_step(four_ranks: RankPool) -> None:
    step, microbatch = both(four_ranks, **REPLICATED)

    assert microbatch["dp_shard"]["reduce_scatter"] == times(2, step["dp_shard"]["reduce_scatter"])
    assert microbatch["dp_replicate"] == step["dp_replicate"]
    assert set(step["dp_replicate"]) == {"all_reduce"}


@pytest.mark.parametrize("plan", [PIPELINED[0], PIPELINED[2]], ids=str)
def test_a_stage_scatters_in_every_microbatch_too(
    four_ranks: RankPool, plan: dict[str, Any]
) -> None:
    """With a backward in two parts each second part does, torch's own hooks or not."""
    step, microbatch = both(four_ranks, pp=2, microbatches=4, **plan)
    once = step["dp_shard"]["reduce_scatter"]

    assert microbatch["dp_shard"] == {
        "all_gather": step["dp_shard"]["all_gather"],
        "reduce_scatter": times(4, once),
    }
