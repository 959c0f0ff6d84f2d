"""A run's steps: the ranks' rows of one step combined, in ``steps.jsonl``."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.rank_report import StepRow
from bench.record import write_atomic

STEPS_FILE = "steps.jsonl"


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step of all ranks: ``step_time`` (s) is the slowest rank's, tokens are summed.

    The losses and the gradient norm are global already: every rank has the same.
    """

    step: int
    phase: str
    step_time: float
    slowest_rank: int
    loss: float
    mtp_loss: float | None
    grad_norm: float
    tokens: int
    padding: int
    targets: int


def combine_steps(rows_by_rank: Sequence[Sequence[StepRow]]) -> list[Step]:
    """Return the steps that every rank has finished; ``rows_by_rank`` has a sequence a rank."""
    return [_combine(rows) for rows in zip(*rows_by_rank, strict=False)]


def _combine(rows: Sequence[StepRow]) -> Step:
    assert len({(row.step, row.phase) for row in rows}) == 1, f"ranks differ in steps: {rows}"
    times = [row.step_time for row in rows]
    return Step(
        step=rows[0].step,
        phase=rows[0].phase,
        step_time=max(times),
        slowest_rank=times.index(max(times)),
        loss=rows[0].loss,
        mtp_loss=rows[0].mtp_loss,
        grad_norm=rows[0].grad_norm,
        tokens=sum(row.tokens for row in rows),
        padding=sum(row.padding for row in rows),
        targets=sum(row.targets for row in rows),
    )


def write_steps(steps: Sequence[Step], run_folder: Path) -> Path:
    """Write ``steps.jsonl`` and return its path."""
    path = run_folder / STEPS_FILE
    write_atomic(path, b"".join(msgspec.json.encode(step) + b"\n" for step in steps))
    return path


def measured(steps: Sequence[Step]) -> list[Step]:
    """Return the steps that count for the metrics."""
    return [step for step in steps if step.phase == "measured"]
