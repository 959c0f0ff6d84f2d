"""Each parallel dimension at two ranks against one rank, a thread each; what EP exposes.

Both sides train the DeepSeek V3 proxy in BF16 on the same batches and take turns step by step; a
ratio is the median over pairs. The global batch is fixed, so two ideal cores have a ratio of 1
per device. Prints two Markdown tables. (Not ``parallel.py``: a script's folder comes first on
Python's path, where it would hide the package.)
"""

import multiprocessing as mp
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from msgspec.structs import replace

from bench.instruments.profiler import ProfilerWindow
from bench.trainer import Trainer
from perf.paired import interleave, ratio, table
from reports.traces.reduce import reduce_trace
from reports.traces.summary import RankSummary, overall
from workloads.registry import load
from workloads.workload import Precision, Workload

WORKLOAD = "deepseek_v3_proxy"
ROUNDS = 5
PROFILED_STEPS = 4
BUILD_SECONDS = 120
DIMENSIONS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "hsdp, replicate": {"dp_replicate": 2},
    "tp": {"tp": 2},
    "cp, gather": {"cp": 2},
    "cp, ulysses": {"cp": 2, "context": "ulysses"},
    "cp, ring": {"cp": 2, "context": "ring"},
    "pp, 1F1B, 4 microbatches": {"pp": 2, "microbatches": 4},
    "fsdp + ep": {"ep": 2},
    "fsdp + ep, a row per expert": {"ep": 2, "expert_exchange": "per_expert"},
    "fsdp + ep, shared expert beside": {"ep": 2, "expert_overlap": True},
    "fsdp + ep, shared expert beside, 2 chunks": {
        "ep": 2,
        "expert_overlap": True,
        "expert_chunks": 2,
    },
}


class Ranks:
    """Processes that train one workload together, a step whenever they are told."""

    def __init__(self, workload: Workload, folder: Path, num_ranks: int) -> None:
        self.folder = folder
        context = mp.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            args = (theirs, workload, folder, rank, num_ranks)
            self.processes.append(context.Process(target=serve, args=args, daemon=True))
            self.pipes.append(ours)
            self.processes[-1].start()

    def __enter__(self) -> Self:
        self._answers("a trainer")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def step(self) -> None:
        """Run one training step on all ranks."""
        self._ask("step")

    def profile(self) -> list[RankSummary]:
        """Run one step under the profiler and return what each rank's trace says."""
        self._ask("profile")
        traces = sorted(self.folder.glob("traces/*.json.gz"))
        return [reduce_trace(path) for path in traces]

    def _ask(self, what: str) -> None:
        for pipe in self.pipes:
            pipe.send(what)
        self._answers(what)

    def _answers(self, what: str) -> None:
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(BUILD_SECONDS):
                raise TimeoutError(f"rank {rank}: no {what} within {BUILD_SECONDS} s")
            pipe.recv()


def serve(pipe: Connection, workload: Workload, folder: Path, rank: int, num_ranks: int) -> None:
    """Build a trainer and answer each message when what it asks for is done."""
    torch.set_num_threads(1)
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
    trainer = Trainer(workload, torch.device("cpu"))
    pipe.send("built")
    index = 0
    while True:
        if pipe.recv() == "profile":
            with ProfilerWindow(folder, rank, trainer.device):
                trainer.step(index).loss.item()
        else:
            trainer.step(index).loss.item()
        index += 1
        pipe.send("done")


@contextmanager
def train(num_ranks: int, plan: dict[str, Any]) -> Iterator[Ranks]:
    """Start ranks with the proxy under a plan; they end with the context."""
    base = load(WORKLOAD)
    resolved = replace(base.plan, **plan).resolve(num_ranks)
    workload = replace(base, plan=resolved, precision=Precision())
    with (
        tempfile.TemporaryDirectory() as folder,
        Ranks(workload, Path(folder), num_ranks) as ranks,
    ):
        yield ranks


def compare(alone: Ranks, name: str) -> tuple[list[str], list[RankSummary]]:
    """Return the row of one dimension and, with expert ranks, profiles of steps of each rank."""
    tokens = load(WORKLOAD).tokens_per_step
    with train(2, DIMENSIONS[name]) as ranks:
        times = interleave({"one": alone.step, "two": ranks.step}, rounds=ROUNDS)
        steps = PROFILED_STEPS if "ep" in DIMENSIONS[name] else 0
        profiles = [profile for _ in range(steps) for profile in ranks.profile()]
    one, two = (statistics.median(times[key]) for key in ("one", "two"))
    speedup = ratio(times, "one", "two")
    figures = (f"{tokens / one:.0f}", f"{tokens / two:.0f}", f"{tokens / two / 2:.0f}")
    return [name, *figures, f"{speedup:.2f}", f"{speedup / 2:.2f}"], profiles


def exposure(name: str, profiles: list[RankSummary]) -> list[str]:
    """Return the row of profiled steps: how long the ranks' all-to-alls take, what of it shows."""
    total = sum(overall(profile).duration_ns for profile in profiles)
    exchanges = [
        collective
        for profile in profiles
        for collective in profile.collectives
        if collective.kind == "all_to_all"
    ]
    running = sum(exchange.duration_ns for exchange in exchanges)
    exposed = sum(exchange.exposed_ns for exchange in exchanges)
    shares = (running / total, exposed / total, 1 - exposed / running)
    return [name, *(f"{100 * share:.1f} %" for share in shares)]


def main() -> None:
    """Print both tables."""
    begin = time.perf_counter()
    rows, lines = [], []
    with train(1, {}) as alone:
        for name in DIMENSIONS:
            row, profiles = compare(alone, name)
            rows.append(row)
            lines += [exposure(name, profiles)] if profiles else []
    print(f"## Two ranks against one rank: {WORKLOAD} in BF16, a thread each\n")
    header = ["dimension", "one rank (tokens/s)", "two ranks (tokens/s)", "per device"]
    print(table([*header, "ratio", "ratio per device"], rows))
    print(f"\n## All-to-alls of expert parallelism in {PROFILED_STEPS} profiled steps\n")
    print(table(["dimension", "under way", "exposed", "hidden of it"], lines))
    load, *_ = os.getloadavg()
    print(f"\n{time.perf_counter() - begin:.0f} s in all, load average {load:.0f}")


if __name__ == "__main__":
    main()
