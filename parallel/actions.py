"""The actions of a pipeline schedule, in the order that torch.distributed.pipelining has."""

from collections.abc import Iterator
from typing import Any

from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe, _ComputationType

from parallel.bubble import Action, Kind

_KINDS: dict[_ComputationType, Kind] = {
    _ComputationType.FORWARD: "forward",
    _ComputationType.FULL_BACKWARD: "backward",
    _ComputationType.BACKWARD_INPUT: "backward_input",
    _ComputationType.BACKWARD_WEIGHT: "backward_weight",
}


def schedule_actions(
    schedule: Any, *, num_ranks: int, microbatches: int
) -> dict[int, list[Action]]:
    """Return the computations of each rank in its order, from a schedule of torch.

    A forward and a backward that DualPipeV overlaps come one after the other, as torch runs them.
    """
    # What these two execute is in code, not in the list they carry: 1F1B's has gaps.
    if isinstance(schedule, ScheduleGPipe):
        return {
            rank: _one_forward_one_backward(rank, microbatches, microbatches)
            for rank in range(num_ranks)
        }
    if isinstance(schedule, Schedule1F1B):
        return {
            rank: _one_forward_one_backward(rank, num_ranks - rank, microbatches)
            for rank in range(num_ranks)
        }
    return {rank: list(_flatten(order)) for rank, order in schedule.pipeline_order.items()}


def _one_forward_one_backward(stage: int, warmup: int, microbatches: int) -> list[Action]:
    """Return ``warmup`` forwards, a backward and a forward in turn, and the backwards left over."""
    warmup = min(warmup, microbatches)
    actions = [Action("forward", stage, microbatch) for microbatch in range(warmup)]
    for microbatch in range(microbatches):
        actions.append(Action("backward", stage, microbatch))
        if warmup + microbatch < microbatches:
            actions.append(Action("forward", stage, warmup + microbatch))
    return actions


def _flatten(order: list[Any]) -> Iterator[Action]:
    for action in order:
        for part in (action and action.sub_actions) or (action,):
            if part is not None and part.computation_type in _KINDS:
                kind = _KINDS[part.computation_type]
                yield Action(kind, part.stage_index, part.microbatch_index)
