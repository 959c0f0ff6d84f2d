"""The closed forms of memory equal what schedules do and what published layouts state."""

import pytest

from models.deepseek_v3 import DEEPSEEK_V3_671B_MTP1
from parallel.bubble import Action
from parallel.memory_forms import (
    ParameterNumbers,
    StageBytes,
    gathered_parameters,
    gradients_between_microbatches,
    held_activations,
    held_parameters,
    stages_in_flight,
    states,
)
from parallel.plan import ParallelPlan
from parallel.schedules import RULES, Schedule, check_schedule
from tests.parallel.orders import order

RANKS, MICROBATCHES, STAGES_PER_RANK = (2, 3, 4, 8), (1, 2, 3, 4, 5, 6, 8, 12, 16, 24), (1, 2, 3)
GIB = 2**30


def sizes(schedule: Schedule) -> list[tuple[int, int, int]]:
    """Return every (ranks, microbatches, stages per rank) that the schedule takes."""

    def fits(ranks: int, microbatches: int, stages: int) -> bool:
        try:
            check_schedule(
                schedule, num_ranks=ranks, stages_per_rank=stages, microbatches=microbatches
            )
        except ValueError:
            return False
        return True

    every = [(p, m, v) for p in RANKS for m in MICROBATCHES for v in STAGES_PER_RANK]
    return [size for size in every if fits(*size)]


@pytest.mark.parametrize("schedule", RULES)
def test_stages_in_flight_are_those_of_the_action_list(schedule: Schedule) -> None:
    assert len(sizes(schedule)) > 9
    for ranks, microbatches, per_rank in sizes(schedule):
        actions = order(schedule, ranks=ranks, microbatches=microbatches, stages_per_rank=per_rank)
        each = dict.fromkeys(range(ranks * per_rank), StageBytes(1))
        for rank in range(ranks):
            found = max(held_activations(actions[rank], each))
            assert found == stages_in_flight(
                schedule,
                rank=rank,
                num_ranks=ranks,
                microbatches=microbatches,
                stages_per_rank=per_rank,
            ), (schedule, ranks, microbatches, per_rank, rank)


def test_published_numbers_of_microbatches_in_flight() -> None:
    """Of whole models of p = 8 ranks: 1F1B p on the first, interleaved 1 + (p-1)/pv times as many
    (arXiv:2104.04473), V p on each (arXiv:2405.15362), DualPipe PP + 1 of PP stages.
    """

    def in_flight(schedule: Schedule, rank: int, per_rank: int) -> float:
        number = stages_in_flight(
            schedule, rank=rank, num_ranks=8, microbatches=64, stages_per_rank=per_rank
        )
        return number / per_rank

    assert [in_flight("1F1B", rank, 1) for rank in range(8)] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert in_flight("Interleaved1F1B", 0, 4) == 8 * (1 + 7 / (8 * 4))
    assert {in_flight("ZBVZeroBubble", rank, 2) for rank in range(8)} == {8}
    assert {2 * in_flight("DualPipeV", rank, 2) for rank in range(8)} == {16 + 1}


def test_a_split_backward_frees_with_its_second_part_what_both_have_kept() -> None:
    actions = [
        Action("forward", 0, 0),
        Action("forward", 0, 1),
        Action("backward_input", 0, 0),
        Action("backward", 0, 1),
        Action("backward_weight", 0, 0),
    ]

    assert held_activations(actions, {0: StageBytes(10, 3)}) == [10, 20, 23, 13, 0]


def test_zero_3_of_the_published_model_over_512_ranks() -> None:
    """671B with its MTP module: 16 bytes of states a parameter with its gradient, 512 shards."""
    counts = DEEPSEEK_V3_671B_MTP1.counts()
    experts = 59 * 256 * 3 * 7168 * 2048
    numbers = ParameterNumbers(counts.total - experts, 0, experts)
    plan = ParallelPlan(dp_shard=512, ep=64).resolve(512)

    here = states(numbers, plan)

    assert sum(here) / GIB == pytest.approx(19.9, abs=0.05)
    assert here.moments == 2 * here.parameters == 2 * here.gradients
    assert states(numbers, plan, moment_bytes=2).moments == here.parameters


def test_whole_gradients_of_a_pipeline_stage_take_what_was_measured() -> None:
    """671B on two stages under expert parallelism of 64: about 52 GiB more than in shards."""
    counts = DEEPSEEK_V3_671B_MTP1.counts()
    experts = 59 * 256 * 3 * 7168 * 2048
    stage = ParameterNumbers((counts.total - experts) // 2, 0, experts // 2)
    plan = ParallelPlan(pp=2, dp_shard=256, ep=64, microbatches=2).resolve(512)

    assert gradients_between_microbatches(stage, plan) / GIB == pytest.approx(52, abs=0.5)


def test_each_dimension_divides_what_it_shards() -> None:
    numbers = ParameterNumbers(replicated=64, divided=128, experts=256)

    def held(world_size: int, **plan: int) -> int:
        return held_parameters(numbers, ParallelPlan(**plan).resolve(world_size))

    assert held(1) == numbers.total
    assert held(4) == held(4, ep=2) == held(4, cp=2) == numbers.total // 4
    assert held(4, dp_replicate=4) == numbers.total
    assert held(4, dp_replicate=2) == numbers.total // 2
    assert held(4, tp=4) == 64 + 128 // 4 + 256 // 4
    assert gathered_parameters(numbers, ParallelPlan(tp=2, ep=4).resolve(4)) == 64 + 64 + 64
