"""The action list of a schedule without ranks: torch's schedules over stand-ins for stages."""

from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from parallel.actions import schedule_actions
from parallel.bubble import Action
from parallel.schedules import Schedule, stages_of_rank


def order(
    schedule: Schedule, *, ranks: int, microbatches: int, stages_per_rank: int = 1
) -> dict[int, list[Action]]:
    """Return every rank's computations."""
    stages: list[Any] = [
        SimpleNamespace(
            stage_index=index,
            num_stages=ranks * stages_per_rank,
            group_size=ranks,
            group_rank=0,
            is_last=False,
            has_backward=True,
            submod=None,
        )
        for index in stages_of_rank(
            schedule, rank=0, num_ranks=ranks, stages_per_rank=stages_per_rank
        )
    ]
    schedule_class = get_schedule_class(schedule)
    single = issubclass(schedule_class, PipelineScheduleSingle)
    built = schedule_class(
        stages[0] if single else stages, n_microbatches=microbatches, loss_fn=lambda *_: None
    )
    return schedule_actions(built, num_ranks=ranks, microbatches=microbatches)
