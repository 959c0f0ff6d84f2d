"""What one rank hands to the launcher: files in ``<run>/ranks/`` that outlive the rank.

``rank<N>.steps.jsonl`` grows by a line a step, ``rank<N>.json`` is the report at the end, and
``rank<N>.error.json`` says how the rank failed and when, so that the launcher can tell the
first failure from those it caused.
"""

import time
import traceback
from pathlib import Path
from typing import Any

import msgspec

from bench.record import require_finite, write_atomic

RANKS_FOLDER = "ranks"


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step on one rank. ``step_time`` in s; losses are means over all targets.

    ``phase`` is ``warmup``, ``measured``, ``counted`` (under the exact counters) or ``profiled``.
    """

    step: int
    phase: str
    step_time: float
    loss: float
    mtp_loss: float | None
    grad_norm: float
    tokens: int
    padding: int
    targets: int


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's results; each instrument adds its part under its own name to ``instruments``."""

    rank: int
    device: str
    instruments: dict[str, Any]
    kernels: dict[str, str]
    data: dict[str, Any]
    environment: dict[str, Any]


class RankError(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank failed: ``time`` in s since the epoch, the error in a line, the traceback."""

    rank: int
    time: float
    error: str
    traceback: str


def steps_path(run_folder: Path, rank: int) -> Path:
    """Return where rank ``rank`` appends its steps."""
    return run_folder / RANKS_FOLDER / f"rank{rank}.steps.jsonl"


def append_step(run_folder: Path, rank: int, row: StepRow) -> None:
    """Append one step's row."""
    with steps_path(run_folder, rank).open("ab") as file:
        file.write(msgspec.json.encode(row) + b"\n")


def read_steps(run_folder: Path, rank: int) -> list[StepRow]:
    """Return the complete rows that the rank has written so far, also after a crash."""
    path = steps_path(run_folder, rank)
    if not path.exists():
        return []
    complete = path.read_bytes().rpartition(b"\n")[0]
    return msgspec.json.decode(b"[" + complete.replace(b"\n", b",") + b"]", type=list[StepRow])


def write_report(run_folder: Path, report: RankReport) -> None:
    """Write the rank's report; raises ``ValueError`` on a number that is not finite."""
    builtins = msgspec.to_builtins(report)
    require_finite(builtins, f"rank{report.rank}")
    path = run_folder / RANKS_FOLDER / f"rank{report.rank}.json"
    write_atomic(path, msgspec.json.encode(builtins))


def read_report(run_folder: Path, rank: int) -> RankReport | None:
    """Return the rank's report, or None if it did not get that far."""
    path = run_folder / RANKS_FOLDER / f"rank{rank}.json"
    return msgspec.json.decode(path.read_bytes(), type=RankReport) if path.exists() else None


def write_error(run_folder: Path, rank: int, error: BaseException) -> None:
    """Write how the rank failed, with the time of now."""
    lines = traceback.format_exception(error)
    what = f"{type(error).__name__}: {error}".strip()
    rank_error = RankError(rank=rank, time=time.time(), error=what, traceback="".join(lines))
    path = run_folder / RANKS_FOLDER / f"rank{rank}.error.json"
    write_atomic(path, msgspec.json.encode(rank_error))


def read_error(run_folder: Path, rank: int) -> RankError | None:
    """Return how the rank failed, or None."""
    path = run_folder / RANKS_FOLDER / f"rank{rank}.error.json"
    return msgspec.json.decode(path.read_bytes(), type=RankError) if path.exists() else None
