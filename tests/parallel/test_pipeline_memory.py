"""A pipeline's ranks hold, action by action, what its closed forms say: microbatches in flight."""

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from parallel.memory_forms import StageBytes, held_activations, stages_in_flight
from parallel.schedules import Schedule
from parallel.stages import StageModel, cut, place
from tests.parallel.cases import tiny
from tests.parallel.memory_cases import Memory, memory_of_a_step
from tests.parallel.orders import order
from tests.rank_pool import RankPool
from workloads.build import build_whole
from workloads.workload import Workload

pytestmark = pytest.mark.distributed
FLOAT32_BYTES = 4
MICROBATCHES = 4
SLACK_BYTES = 2**10
ALL_FORWARDS_FIRST: dict[int, Schedule] = {1: "GPipe", 2: "LoopedBFS"}
SCHEDULES: list[tuple[Schedule, int]] = [
    ("GPipe", 1),
    ("1F1B", 1),
    ("InterleavedZeroBubble", 1),
    ("LoopedBFS", 2),
    ("Interleaved1F1B", 2),
    ("InterleavedZeroBubble", 2),
    ("ZBVZeroBubble", 2),
    ("DualPipeV", 2),
]
STREAM_BYTES = FLOAT32_BYTES * 128 * 64
"""A tensor between stages: a sequence of 128 tokens of width 64."""


class Runs:
    """The memory of both ranks under a schedule; each runs once for all tests."""

    def __init__(self, pool: RankPool) -> None:
        self._pool = pool
        self._seen: dict[tuple[Schedule, int], list[Memory]] = {}

    def __call__(self, schedule: Schedule, per_rank: int) -> list[Memory]:
        key = (schedule, per_rank)
        if key not in self._seen:
            self._seen[key] = self._pool.run(memory_of_a_step, pipelined(*key))
        return self._seen[key]


@pytest.fixture(scope="module")
def run(two_ranks: RankPool) -> Runs:
    return Runs(two_ranks)


@pytest.mark.parametrize(("schedule", "per_rank"), SCHEDULES)
def test_a_pipeline_holds_what_its_actions_have_in_flight(
    run: Runs, schedule: Schedule, per_rank: int
) -> None:
    """After every action: activations of microbatches in flight, and gradients from the first on.

    What a microbatch leaves in a stage is measured where no other has ended: under GPipe or looped
    BFS. Tensors that a stage receives and sends (and their gradients) may live until the step
    ends, as torch waits for its sends. In a V the last rank has both sides of a boundary, whose
    tensor it holds once.
    """
    case = pipelined(schedule, per_rank)
    forward_bytes = bytes_of_forwards(run(ALL_FORWARDS_FIRST[per_rank], per_rank))
    actions = order(schedule, ranks=2, microbatches=MICROBATCHES, stages_per_rank=per_rank)

    for rank, memory in enumerate(run(schedule, per_rank)):
        ran = [(name, stage) for name, stage, _ in memory.after_chunks]
        assert ran == [(action.kind, action.stage) for action in actions[rank]]
        totals = [kinds["other"] for _, _, kinds in memory.after_chunks]
        stage_bytes = {
            stage: StageBytes(forward_bytes[stage], bytes_of_input_backward(ran, totals, stage))
            for stage in case.plan.stages_of(rank)
        }
        activations = held_activations(actions[rank], stage_bytes)
        start = totals[0] - activations[0]
        ended: list[int] = []
        shared = 0
        for action, total, held in zip(actions[rank], totals, activations, strict=True):
            if action.kind in ("backward", "backward_weight"):
                ended.append(action.stage)
            if action.kind == "forward" and action.stage - 1 in stage_bytes:
                shared += STREAM_BYTES
            expected = start + held + sum(gradient_bytes(per_rank, stage) for stage in set(ended))
            travelled = sum(boundary_bytes(per_rank, stage) for stage in ended)
            assert -SLACK_BYTES - shared <= total - expected <= travelled + SLACK_BYTES


def test_1f1b_holds_fewer_microbatches_than_gpipe_on_later_ranks(run: Runs) -> None:
    """The difference in peaks is that of the microbatches in flight, m against p - r."""
    gpipe, one_f_one_b = (run(schedule, 1) for schedule in ("GPipe", "1F1B"))
    each = bytes_of_forwards(gpipe)

    for rank, (most, least) in enumerate(zip(gpipe, one_f_one_b, strict=True)):
        spared = MICROBATCHES - stages_in_flight(
            "1F1B", rank=rank, num_ranks=2, microbatches=MICROBATCHES, stages_per_rank=1
        )
        found = sum(most.peak.values()) - sum(least.peak.values())
        # 1F1B's forwards come beside what earlier microbatches leave: GPipe's come before any.
        left = gradient_bytes(1, rank) + 2 * boundary_bytes(1, rank)
        assert spared * each[rank] - left - SLACK_BYTES <= found <= spared * each[rank]


def bytes_of_forwards(memories: list[Memory]) -> dict[int, int]:
    """Return what one more microbatch leaves in each stage, where forwards come first."""
    found: dict[int, int] = {}
    for memory in memories:
        chunks = memory.after_chunks
        for (name, stage, before), (next_name, next_stage, after) in pairwise(chunks):
            if (name, next_name) == ("forward", "forward") and stage == next_stage:
                found[stage] = after["other"] - before["other"]
    return found


def bytes_of_input_backward(ran: list[tuple[str, int]], totals: list[int], stage: int) -> int:
    """Return what a backward of the inputs alone leaves beyond the activations, in a stage."""
    found = [
        after - before
        for (before, after), chunk in zip(pairwise(totals), ran[1:], strict=True)
        if chunk == ("backward_input", stage)
    ]
    return max(found, default=0)


def gradient_bytes(per_rank: int, stage: int) -> int:
    """Return the bytes of a stage's gradients."""
    parameters = part_of(per_rank, stage).model.parameters()
    return FLOAT32_BYTES * sum(parameter.numel() for parameter in parameters)


def boundary_bytes(per_rank: int, stage: int) -> int:
    """Return the bytes of what enters and leaves a stage in a microbatch, with its gradients."""
    part = part_of(per_rank, stage)
    return 2 * (sum(part.enters) + sum(part.leaves or (0, 0))) * STREAM_BYTES


@cache
def part_of(per_rank: int, stage: int) -> StageModel:
    """Return a stage of the model on the meta device; schedules place them alike."""
    case = pipelined(ALL_FORWARDS_FIRST[per_rank], per_rank)
    placement = place(build_whole(case), case.plan.num_stages, case.sequence_length)
    return cut(build_whole(case), placement, stage)


def pipelined(schedule: Schedule, per_rank: int) -> Workload:
    plan: dict[str, Any] = {"schedule": schedule, "stages_per_rank": per_rank}
    case = tiny("deepseek_v3", 2, pp=2, microbatches=MICROBATCHES, **plan)
    return replace(case, routing="balanced")
