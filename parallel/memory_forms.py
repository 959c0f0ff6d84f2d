"""Closed forms of what a rank holds in memory: parameters, gradients, moments, microbatches.

They are what a plan promises before anything runs, and what tests hold real steps against. Nothing
here imports torch.

p ranks and r this rank of a pipeline, v stages of a rank, m microbatches.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from parallel.bubble import Action
from parallel.plan import ParallelPlan
from parallel.schedules import Schedule

FLOAT32_BYTES = 4
NUM_MOMENTS = 2


class ParameterNumbers(NamedTuple):
    """Parameters of the stages of a rank, before any other dimension divides them."""

    replicated: int
    """Whole on each tensor rank: norms, routers, what tensor parallelism leaves alone."""
    divided: int
    """Divided by tensor parallelism."""
    experts: int
    """Routed experts."""

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


class States(NamedTuple):
    """What lives from step to step, and gradients when the optimizer steps, in bytes of a rank."""

    parameters: int
    gradients: int
    moments: int


def held_parameters(numbers: ParameterNumbers, plan: ParallelPlan) -> int:
    """Return how many parameters a rank of a resolved plan holds, where all shards are even.

    Everything is sharded over dp_shard x cp, what tensor parallelism divides and experts over
    tp too: to experts its ranks are data ranks. Replicas divide nothing.
    """
    shards = plan.dp_shard * plan.cp
    return numbers.replicated // shards + (numbers.divided + numbers.experts) // (shards * plan.tp)


def gathered_parameters(numbers: ParameterNumbers, plan: ParallelPlan) -> int:
    """Return how many parameters a rank computes with: all that it gathers for its layers."""
    return numbers.replicated + numbers.divided // plan.tp + numbers.experts // plan.ep


def states(numbers: ParameterNumbers, plan: ParallelPlan, *, moment_bytes: int = 4) -> States:
    """Return 4 bytes of parameter, 4 of gradient and two moments for all that a rank holds.

    Args:
        moment_bytes: of a value of AdamW's moments: 4 for float32, 2 for bfloat16.
    """
    held = held_parameters(numbers, plan)
    return States(FLOAT32_BYTES * held, FLOAT32_BYTES * held, NUM_MOMENTS * moment_bytes * held)


def gradients_between_microbatches(
    numbers: ParameterNumbers, plan: ParallelPlan, *, reduce_bytes: int = 4
) -> int:
    """Return the bytes of gradients that wait for the next microbatch of a step.

    Args:
        reduce_bytes: of a value in the dtype of the reduction, in which whole gradients add up.
    """
    if plan.reduces_once:
        return reduce_bytes * gathered_parameters(numbers, plan)
    return FLOAT32_BYTES * held_parameters(numbers, plan)


def stages_in_flight(
    schedule: Schedule, *, rank: int, num_ranks: int, microbatches: int, stages_per_rank: int
) -> int:
    """Return how many microbatches of its stages a rank holds activations of at most.

    Each of a rank's stages counts for itself, from its forward to the end of its backward: under
    schedules in two parts to that of the weights. GPipe and looped BFS hold all; 1F1B as many as
    ranks follow (arXiv:2104.04473, whose interleaved form adds a round per further stage); zero
    bubble as many on each rank as 1F1B on its first (arXiv:2401.10241); its V as many halves
    (arXiv:2405.15362), DualPipeV one more (DeepSeek's DualPipe: PP + 1 for PP stages).
    """
    p, r, m, v = num_ranks, rank, microbatches, stages_per_rank
    per_round = m // max(1, m // p)
    most: dict[Schedule, Callable[[], int]] = {
        "GPipe": lambda: m,
        "1F1B": lambda: p - r,
        "LoopedBFS": lambda: v * m,
        "Interleaved1F1B": lambda: (v - 1) * per_round + 2 * (p - 1 - r) + 1,
        "InterleavedZeroBubble": lambda: (v - 1) * per_round + p,
        "ZBVZeroBubble": lambda: min(2 * p, m + 1 + r),
        "DualPipeV": lambda: 2 * p + 1,
    }
    return min(v * m, most[schedule]())


class StageBytes(NamedTuple):
    """What one microbatch leaves behind on a rank in a stage."""

    forward: int
    """After the forward: activations for the backward."""
    backward_input: int = 0
    """After a backward of the inputs alone, beyond that: gradients that its weights wait for."""


def held_activations(
    actions: Sequence[Action], bytes_by_stage: Mapping[int, StageBytes]
) -> list[int]:
    """Return the bytes of activations that a rank holds after each of its actions, in order.

    A backward of the inputs alone frees nothing: that of the weights needs the activations too.
    """
    waiting: set[tuple[int, int]] = set()
    held, totals = 0, []
    for action in actions:
        bytes_of, key = bytes_by_stage[action.stage], (action.stage, action.microbatch)
        if action.kind == "forward":
            held += bytes_of.forward
        elif action.kind == "backward_input":
            held += bytes_of.backward_input
            waiting.add(key)
        else:
            held -= bytes_of.forward + bytes_of.backward_input * (key in waiting)
        totals.append(held)
    return totals
