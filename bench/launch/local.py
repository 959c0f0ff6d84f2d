"""Ranks as processes of this machine: start them, watch them, end them all when one fails.

Each rank leads a process group of its own and meets the others through a file in the run's
folder, so that runs at the same time share nothing. What is reported is the earliest failure;
the errors that it causes in the other ranks are not.
"""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from bench.env import rank_environment
from bench.launch.blame import RankEnd, earliest_failure, hang, has_failed, log_path
from bench.rank_report import RANKS_FOLDER
from bench.record import Failure, Status

TICK_SECONDS = 0.1
SETTLE_SECONDS = 0.5  # between the first failure and the end: for ranks that failed with it
GRACE_SECONDS = 5.0  # between the polite signal and the hard one


class Outcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the ranks ended, and the first failure if they did not end well."""

    status: Status
    failure: Failure | None = None


def launch(
    run_folder: Path,
    *,
    ranks: int,
    threads: int,
    timeout: float,
    worker: str = "bench.worker",
    on_tick: Callable[[], None] = lambda: None,
) -> Outcome:
    """Run ``python -m worker`` as ``ranks`` processes with ``threads`` threads each.

    ``on_tick`` is called about ten times a second. Returns when every rank has ended: well,
    after the first failure, after ``timeout`` s, or after SIGINT or SIGTERM to this process.
    """
    (run_folder / RANKS_FOLDER).mkdir(exist_ok=True)
    ends: queue.Queue[RankEnd] = queue.Queue()
    processes: list[subprocess.Popen[bytes]] = []
    with _interruption() as interrupted:
        try:
            for rank in range(ranks):
                process = _start(run_folder, rank, ranks, threads, worker)
                processes.append(process)
                threading.Thread(target=_wait, args=(rank, process, ends), daemon=True).start()
            return _watch(run_folder, ranks, ends, timeout, interrupted, on_tick)
        finally:
            _end_all(processes)


def _start(
    run_folder: Path, rank: int, ranks: int, threads: int, worker: str
) -> "subprocess.Popen[bytes]":
    # -P: a module of the same name in the user's folder must not stand in for one of ours.
    command = [sys.executable, "-P", "-m", "bench.launch.rank", str(os.getpid()), worker]
    arguments = ["--run-folder", str(run_folder), "--rank", str(rank), "--world-size", str(ranks)]
    with log_path(run_folder, rank).open("wb") as log:
        return subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=rank_environment(threads),
            start_new_session=True,
        )


def _wait(rank: int, process: "subprocess.Popen[bytes]", ends: "queue.Queue[RankEnd]") -> None:
    returncode = process.wait()
    ends.put(RankEnd(rank=rank, returncode=returncode, time=time.time()))


def _watch(
    run_folder: Path,
    num_ranks: int,
    ends: "queue.Queue[RankEnd]",
    timeout: float,
    interrupted: threading.Event,
    on_tick: Callable[[], None],
) -> Outcome:
    """Return when all ranks have ended or one of them has a reason to end the others."""
    deadline = time.monotonic() + timeout
    ended: list[RankEnd] = []
    while len(ended) < num_ranks:
        ended += _take(ends, TICK_SECONDS)
        on_tick()
        if interrupted.is_set():
            failure = Failure(rank=None, error="interrupted by the user")
            return Outcome(status="interrupted", failure=failure)
        if has_failed(run_folder, ended, num_ranks):
            ended += _take(ends, SETTLE_SECONDS)
            failure = earliest_failure(run_folder, ended, num_ranks)
            return Outcome(status="failed", failure=failure)
        if time.monotonic() > deadline:
            failure = hang(run_folder, ended, num_ranks, timeout)
            return Outcome(status="timeout", failure=failure)
    return Outcome(status="ok")


def _take(ends: "queue.Queue[RankEnd]", seconds: float) -> list[RankEnd]:
    """Return the ends of ranks that arrive within ``seconds``."""
    deadline = time.monotonic() + seconds
    taken: list[RankEnd] = []
    while (left := deadline - time.monotonic()) > 0:
        try:
            taken.append(ends.get(timeout=left))
        except queue.Empty:
            break
    return taken


def _end_all(processes: "list[subprocess.Popen[bytes]]") -> None:
    """End every rank and what it started: politely, then, after a grace, hard."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        _signal_group(process, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while any(process.poll() is None for process in running) and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in processes:
        _signal_group(process, signal.SIGKILL)
    for process in processes:
        process.wait()


def _signal_group(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # the whole group has ended
        os.killpg(process.pid, number)


@contextmanager
def _interruption() -> Iterator[threading.Event]:
    """Yield an event that SIGINT and SIGTERM set, so that ranks are ended before we are."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event  # only the main thread may handle signals
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: event.set()) for number in numbers}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
