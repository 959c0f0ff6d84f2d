"""Which rank is to blame: the earliest failure among those that follow from one another."""

import re
import signal
from pathlib import Path

import msgspec

from bench.rank_report import RANKS_FOLDER, RankError, read_error, read_steps
from bench.record import Failure

# What a rank reports when another one is gone; only believed when no rank has an error of its own.
_ECHO = re.compile(
    r"DistBackendError|DistNetworkError|DistStoreError|ConnectionError|gloo|nccl"
    r"|connection (was )?(closed|reset|refused)|broken pipe|socket timeout|wait timeout",
    re.IGNORECASE,
)


class RankEnd(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The end of a rank's process: its exit code, below 0 for a signal, at ``time`` (epoch s)."""

    rank: int
    returncode: int
    time: float


def log_path(run_folder: Path, rank: int) -> Path:
    """Return where the rank's output goes."""
    return run_folder / RANKS_FOLDER / f"rank{rank}.log"


def has_failed(run_folder: Path, ends: list[RankEnd], num_ranks: int) -> bool:
    """Say whether a rank has ended badly or has written an error and not ended yet."""
    if any(end.returncode != 0 for end in ends):
        return True
    return any(read_error(run_folder, rank) is not None for rank in range(num_ranks))


def earliest_failure(run_folder: Path, ends: list[RankEnd], num_ranks: int) -> Failure:
    """Return the first failure: by time, errors of communication after all others.

    A rank that dies of a signal says nothing, and its neighbours' errors may be noted before its
    end is; those errors are the echo, not the cause.
    """
    errors = [read_error(run_folder, rank) for rank in range(num_ranks)]
    causes = [error for error in errors if error is not None]
    spoke = {error.rank for error in causes}
    silent = [end for end in ends if end.returncode != 0 and end.rank not in spoke]
    causes += [_silent_end(run_folder, end) for end in silent]
    first = min(causes, key=lambda error: (bool(_ECHO.search(error.error)), error.time))
    return Failure(
        rank=first.rank, error=first.error, hint=f"see {log_path(run_folder, first.rank)}"
    )


def hang(run_folder: Path, ends: list[RankEnd], num_ranks: int, timeout: float) -> Failure:
    """Return the failure of a run whose ranks did not end within ``timeout`` s.

    The rank that is furthest behind is named if there is one.
    """
    ended = {end.rank for end in ends}
    steps = {rank: len(read_steps(run_folder, rank)) for rank in range(num_ranks)}
    running = [rank for rank in range(num_ranks) if rank not in ended]
    behind = [rank for rank in running if steps[rank] == min(steps[r] for r in running)]
    done = ", ".join(f"rank {rank} {steps[rank]} steps" for rank in running)
    return Failure(
        rank=behind[0] if len(behind) == 1 else None,
        error=f"still running after {timeout:g} s: {done}",
        hint=f"raise --timeout, or see where the ranks were in {run_folder / RANKS_FOLDER}",
    )


def _silent_end(run_folder: Path, end: RankEnd) -> RankError:
    """Return what can be said of a rank that ended without an error of its own."""
    if end.returncode < 0:
        error = f"killed by {signal.Signals(-end.returncode).name}"
        if end.returncode == -signal.SIGKILL:
            error += " (by the system if memory ran out)"
    else:
        error = f"exited with code {end.returncode}: {_last_line(log_path(run_folder, end.rank))}"
    return RankError(rank=end.rank, time=end.time, error=error, traceback="")


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output")
