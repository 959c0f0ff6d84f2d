"""A pool of real gloo ranks that lives for the test session: torch is imported once per rank."""

import gc
import multiprocessing as mp
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

CASE_SECONDS = 300
CASES_PER_PROCESS = 25
"""Groups that a case made outlive it in torch's caches of meshes, each with threads and sockets."""


class RankPool:
    """``world_size`` processes that run one function after another, all ranks together."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._num_cases = 0

    def run(self, case: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``case(*args)`` on every rank and return the results in rank order.

        Raises AssertionError with the first failing rank's traceback; the pool then starts anew,
        since the other ranks may wait for a collective that never comes.
        """
        if self._num_cases == CASES_PER_PROCESS:
            self.close()
        if not self._processes:
            self._start()
        self._num_cases += 1
        for pipe in self._pipes:
            pipe.send((case, args))
        results = [self._receive(pipe) for pipe in self._pipes]
        errors = [f"rank {rank}: {error}" for rank, (ok, error) in enumerate(results) if not ok]
        if errors:
            self.close()
            raise AssertionError("\n".join(errors))
        return [result for _, result in results]

    def close(self) -> None:
        """End the ranks."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []
        self._num_cases = 0

    @staticmethod
    def _receive(pipe: Connection) -> tuple[bool, Any]:
        if not pipe.poll(CASE_SECONDS):
            return False, f"no answer within {CASE_SECONDS} s"
        try:
            return pipe.recv()
        except EOFError:
            return False, "the process died"

    def _start(self) -> None:
        context = mp.get_context("spawn")
        store = Path(tempfile.mkdtemp(prefix="titanbench-ranks-")) / "rendezvous"
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, self.world_size, str(store)), daemon=True
            )
            process.start()
            self._processes.append(process)
            self._pipes.append(ours)


def _serve(pipe: Connection, rank: int, world_size: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    case_number = 0
    while True:
        case, args = pipe.recv()
        case_number += 1
        # Anew for each case: every mesh of a case makes groups, and each group has threads.
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}-{case_number}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=CASE_SECONDS),
        )
        try:
            answer = (True, case(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        gc.collect()
        dist.destroy_process_group()
        pipe.send(answer)
