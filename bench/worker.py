"""The worker: what one rank does. Build, warm up, measure, count, profile, report.

``python -m bench.worker --run-folder F --rank R --world-size N``: the launcher has written what
to run into ``F/job.json``; everything the rank has to say goes to ``F/ranks/``.
"""

import argparse
import gc
import math
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from bench.cpu_peak import cpu_peak
from bench.instruments.collectives import CollectiveCounter
from bench.instruments.issued import RECORDER_ENTRIES, RECORDER_VARIABLE
from bench.instruments.memory import AllocatorPeak, TensorBytes, peak_rss_bytes
from bench.instruments.memory_course import MemoryCourse, write_course
from bench.instruments.observation import Observation
from bench.instruments.operators import OperatorCounter
from bench.instruments.profiler import ProfilerWindow
from bench.instruments.routing import RoutingCounter
from bench.instruments.step_timer import StepTimer
from bench.rank_report import (
    RANKS_FOLDER,
    RankReport,
    StepRow,
    append_step,
    write_error,
    write_report,
)
from bench.resolve import resolve, resolve_device
from bench.spec import RunSpec, read_job
from bench.trainer import Trainer


class Session:
    """One rank's run: the trainer, where its results go, and which step comes next."""

    def __init__(self, spec: RunSpec, trainer: Trainer, run_folder: Path, rank: int) -> None:
        self.spec = spec
        self.trainer = trainer
        self.run_folder = run_folder
        self.rank = rank
        self.timer = StepTimer(trainer.device)
        self.next_step = 0
        self.instruments: dict[str, Any] = {}

    def run_step(self, phase: str) -> None:
        """Run, time and write down one step.

        Raises:
            FloatingPointError: if a loss or the gradient norm is not finite.
        """
        self.timer.start()
        result = self.trainer.step(self.next_step)
        step_time = self.timer.stop()
        row = StepRow(
            step=self.next_step,
            phase=phase,
            step_time=step_time,
            loss=result.loss.item(),
            mtp_loss=result.mtp_loss.item() if self.trainer.has_mtp else None,
            grad_norm=result.grad_norm.item(),
            tokens=result.tokens,
            padding=result.padding,
            targets=result.targets,
        )
        if not all(math.isfinite(x or 0.0) for x in (row.loss, row.mtp_loss, row.grad_norm)):
            raise FloatingPointError(
                f"step {row.step}: loss {row.loss}, MTP loss {row.mtp_loss}, "
                f"gradient norm {row.grad_norm}; "
                "lower training.learning_rate or look at precision and data"
            )
        append_step(self.run_folder, self.rank, row)
        self.next_step += 1

    def measure(self) -> None:
        """Run the warm-up and the measured steps; nothing but the step is inside the times."""
        for _ in range(self.spec.warmup_steps):
            self.run_step("warmup")
        allocator = AllocatorPeak(self.trainer.device)
        # A collection at a random moment on one rank would be timed on all of them.
        gc.collect()
        gc.disable()
        dist.barrier()
        allocator.start()
        for _ in range(self.spec.steps):
            self.run_step("measured")
        gc.enable()
        self.instruments["memory"] = {
            **allocator.report(),
            "peak_rss_bytes": peak_rss_bytes(),
        }

    def count(self) -> None:
        """Run one step under the exact counters."""
        trainer = self.trainer
        operators, collectives = OperatorCounter(), CollectiveCounter()
        is_compiled = trainer.workload.plan.compile != "none"
        standing = {"parameter": trainer.standing_tensors(), "optimizer_state": states_of(trainer)}
        course = MemoryCourse(standing, () if is_compiled else trainer.models)
        tensors = TensorBytes(trainer.standing_tensors(), course.note)
        routing = RoutingCounter(trainer.moe_layers(), trainer.workload.plan.ep)
        with routing, course, tensors, Observation((course, operators, collectives, tensors)):
            self.run_step("counted")
        self.instruments["memory"].update(tensors.report())
        memory = course.device_memory(trainer.device.type)
        if memory is not None:
            write_course(memory, self.run_folder, self.rank)
            self.instruments["memory"]["peak_tensor_by_kind"] = memory.peak_by_kind
        self.instruments["collectives"] = collectives.report()
        self.instruments["operators"] = operators.report()
        self.instruments["routing"] = routing.report()

    def profile(self) -> None:
        """Run one step under the profiler."""
        metadata = {
            "run_id": self.run_folder.name,
            "workload": self.spec.workload,
            "set": self.spec.set,
            "step": self.next_step,
        }
        with ProfilerWindow(self.run_folder, self.rank, self.trainer.device, metadata) as window:
            self.run_step("profiled")
        self.instruments["profiler"] = window.report()


def states_of(trainer: Trainer) -> list[torch.Tensor]:
    """Return the tensors of the optimizer's state."""
    values = [value for state in trainer.optimizer.state.values() for value in state.values()]
    return [value for value in values if torch.is_tensor(value)]


def work(spec: RunSpec, run_folder: Path, rank: int, world_size: int) -> RankReport:
    """Do the whole run of this rank and return its report."""
    device = _join(spec, run_folder, rank, world_size)
    trainer = Trainer(resolve(spec), device)
    session = Session(spec, trainer, run_folder, rank)
    session.measure()
    if spec.instruments:
        session.count()
    if spec.profile:
        session.profile()
    session.instruments["pipeline"] = trainer.describe_pipeline()
    if device.type == "cpu":
        session.instruments["peak"] = msgspec.to_builtins(cpu_peak(torch.get_num_threads()))
    return RankReport(
        rank=rank,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        instruments=session.instruments,
        kernels=trainer.kernels(),
        data=trainer.data.describe(),
        environment={"threads": torch.get_num_threads(), "load_average": list(os.getloadavg())},
    )


def _join(spec: RunSpec, run_folder: Path, rank: int, world_size: int) -> torch.device:
    """Join the process group through a file of the run's own and return this rank's device."""
    if resolve_device(spec) == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        os.environ.setdefault(RECORDER_VARIABLE, str(RECORDER_ENTRIES))
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        init_method=f"file://{(run_folder / RANKS_FOLDER / 'rendezvous').resolve()}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=spec.timeout),
    )
    return device


def main() -> int:
    """Run as a rank; the exit code is 0 or, with the error written down, 1."""
    parser = argparse.ArgumentParser(prog="bench.worker")
    parser.add_argument("--run-folder", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    options = parser.parse_args()
    try:
        report = work(
            read_job(options.run_folder), options.run_folder, options.rank, options.world_size
        )
        write_report(options.run_folder, report)
        dist.destroy_process_group()
    except Exception as error:
        write_error(options.run_folder, options.rank, error)
        traceback.print_exception(error)
        sys.stderr.flush()
        # Not sys.exit: other threads of a broken process group must not delay the end.
        os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
