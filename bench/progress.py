"""Progress: a bar on a terminal, a line now and then elsewhere, always on stderr."""

import sys
import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from bench.rank_report import StepRow
from bench.spec import RunSpec

SECONDS_BETWEEN_LINES = 5.0


class RunProgress:
    """Shows the steps of one run while it is open."""

    def __init__(self, spec: RunSpec) -> None:
        self.name = spec.workload
        self.num_steps = num_steps(spec)
        self._bar = _bar() if sys.stderr.isatty() else None
        self._task: TaskID | None = None
        self._last_line = 0.0

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(self.name, total=self.num_steps, state="starting")
        else:
            self._print("starting")
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def on_step(self, row: StepRow) -> None:
        """Show that the step is done."""
        done = row.step + 1
        state = f"{row.phase}, loss {row.loss:.4f}, {row.step_time:.3g} s"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, state=state)
        elif done == self.num_steps or time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES:
            self._print(f"step {done} of {self.num_steps}: {state}")

    def _print(self, text: str) -> None:
        print(f"{self.name}: {text}", file=sys.stderr, flush=True)
        self._last_line = time.monotonic()


def file_progress(done: int, total: int) -> None:
    """Say how many of several files have been read; a single one needs no progress."""
    if total < 2:
        return
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\rtraces read: {done} of {total}", end=end, file=sys.stderr, flush=True)
    elif done == total or done % 32 == 0:
        print(f"traces read: {done} of {total}", file=sys.stderr, flush=True)


def num_steps(spec: RunSpec) -> int:
    """Return how many steps the run takes: warm-up, measured, counted and profiled."""
    return spec.warmup_steps + spec.steps + int(spec.instruments) + int(spec.profile)


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} {task.fields[state]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
