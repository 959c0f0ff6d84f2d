"""The pipeline schedules: what each asks of a plan, and which stages a rank holds.

GPipe (arXiv:1811.06965), 1F1B and its interleaved form (arXiv:2104.04473), looped breadth-first
(arXiv:2211.05953), zero bubble with stages in a loop or in a V (arXiv:2401.10241), and DualPipeV,
DeepSeek's DualPipe (arXiv:2412.19437) cut in half.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

Schedule = Literal[
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
]


class Rules(NamedTuple):
    """What a schedule is like.

    ``in_v``: stages go down the ranks and up again, so that the first rank has the last stage too.
    ``splits_backward``: weight gradients are a step of their own, which fills bubbles.
    ``in_rounds``: microbatches go through in rounds of equal size, at least one per rank.
    """

    least_stages_per_rank: int = 1
    most_stages_per_rank: int | None = None
    in_v: bool = False
    splits_backward: bool = False
    in_rounds: bool = False
    least_microbatches: Literal["any", "ranks", "stages"] = "any"


RULES: dict[str, Rules] = {
    "GPipe": Rules(most_stages_per_rank=1),
    "1F1B": Rules(most_stages_per_rank=1, least_microbatches="ranks"),
    "Interleaved1F1B": Rules(in_rounds=True),
    "LoopedBFS": Rules(),
    "InterleavedZeroBubble": Rules(splits_backward=True, in_rounds=True),
    "ZBVZeroBubble": Rules(
        least_stages_per_rank=2, most_stages_per_rank=2, in_v=True, splits_backward=True
    ),
    "DualPipeV": Rules(
        least_stages_per_rank=2,
        most_stages_per_rank=2,
        in_v=True,
        splits_backward=True,
        least_microbatches="stages",
    ),
}


def stages_of_rank(
    schedule: Schedule, *, rank: int, num_ranks: int, stages_per_rank: int
) -> list[int]:
    """Return the stages that pipeline rank ``rank`` holds, in order."""
    if RULES[schedule].in_v:
        return [rank, 2 * num_ranks - 1 - rank]
    return list(range(rank, num_ranks * stages_per_rank, num_ranks))


def rank_of_stage(schedule: Schedule, stage: int, *, num_ranks: int) -> int:
    """Return the pipeline rank that holds ``stage``."""
    if RULES[schedule].in_v:
        return min(stage, 2 * num_ranks - 1 - stage)
    return stage % num_ranks


def check_schedule(
    schedule: Schedule, *, num_ranks: int, stages_per_rank: int, microbatches: int
) -> None:
    """Raise ``ValueError``, with what would fit, unless the schedule can run these sizes."""
    rules = RULES[schedule]
    least, most = rules.least_stages_per_rank, rules.most_stages_per_rank
    if stages_per_rank < least or (most is not None and stages_per_rank > most):
        raise ValueError(
            f"plan.stages_per_rank={stages_per_rank}: {schedule} has {most or least} on a rank; "
            f"plan.stages_per_rank={min(max(stages_per_rank, least), most or stages_per_rank)} "
            "would fit"
        )

    def fits(number: int) -> bool:
        return _fits(rules, number, num_ranks=num_ranks, stages_per_rank=stages_per_rank)

    if not fits(microbatches):
        raise ValueError(
            f"plan.microbatches={microbatches} does not suit {schedule} on {num_ranks} ranks with "
            f"{stages_per_rank} stages each ({_reason(rules)}); "
            f"plan.microbatches={_nearest(microbatches, fits)} would"
        )


def _fits(rules: Rules, microbatches: int, *, num_ranks: int, stages_per_rank: int) -> bool:
    least = {"any": 1, "ranks": num_ranks, "stages": num_ranks * stages_per_rank}
    if microbatches < least[rules.least_microbatches]:
        return False
    num_rounds = max(1, microbatches // num_ranks)
    return not rules.in_rounds or microbatches % num_rounds == 0


def _reason(rules: Rules) -> str:
    if rules.in_rounds:
        return "it goes in rounds of equal size"
    return f"it needs as many as {rules.least_microbatches}"


def _nearest(number: int, fits: Callable[[int], bool]) -> int:
    distance = 0
    while True:
        distance += 1
        for candidate in (number + distance, number - distance):
            if candidate > 0 and fits(candidate):
                return candidate
