"""Runs on disk: records in run and suite folders, and the steps that belong to them."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.errors import UsageError
from bench.record import RECORD_FILE, RunRecord, read_record
from reports.traces.summary import TraceSummary

STEPS_FILE = "steps.jsonl"


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One training step: ``step_time`` is the slowest rank's, in s; losses in nats per token.

    ``phase`` is ``warmup``, ``measured``, ``counted`` or ``profiled``; ``tokens`` without padding.
    """

    step: int
    phase: str
    step_time: float
    loss: float
    mtp_loss: float | None = None
    tokens: int | None = None
    padding: int | None = None


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A record with what belongs to it: its folder, its steps, published results to compare."""

    record: RunRecord
    folder: Path | None = None
    steps: list[Step] = []
    references: list[RunRecord] = []
    traces: TraceSummary | None = None
    traces_missing: str = ""
    """Why there are no traces although the run wrote some."""

    def measured_steps(self) -> list[Step]:
        """Return the steps that the metrics come from."""
        return [step for step in self.steps if step.phase == "measured"]

    def training_steps(self) -> list[Step]:
        """Return warm-up and measured steps: those before counters and profiler."""
        return [step for step in self.steps if step.phase in ("warmup", "measured")]


def find_records(paths: Sequence[Path]) -> list[tuple[Path, RunRecord]]:
    """Return every record at or below ``paths`` with its run folder, each once, in order.

    A path may be a ``run.json``, a run's folder, or a folder with runs anywhere below it.

    Raises:
        UsageError: if a path has none, or one of them cannot be read.
    """
    files: dict[Path, Path] = {}
    for path in paths:
        found = record_files(path)
        if not found:
            raise UsageError(
                f"no run record at {path}",
                hint=f"give a run folder, or a folder with runs in it (a run has a {RECORD_FILE})",
            )
        files |= {file.resolve(): file for file in found}
    return [(file.parent, read_record(file)) for file in files.values()]


def record_files(path: Path) -> list[Path]:
    """Return the record files at ``path``, sorted."""
    if path.is_file():
        return [path]
    if (path / RECORD_FILE).is_file():
        return [path / RECORD_FILE]
    return sorted(path.rglob(RECORD_FILE))


def read_steps(run_folder: Path) -> list[Step]:
    """Return the steps that the run has completed; none if it has not written any.

    Raises:
        UsageError: if the file holds something else.
    """
    file = run_folder / STEPS_FILE
    if not file.exists():
        return []
    lines = file.read_bytes().rpartition(b"\n")[0].splitlines()
    decoder = msgspec.json.Decoder(Step)
    try:
        return [decoder.decode(line) for line in lines if line.strip()]
    except msgspec.MsgspecError as error:
        raise UsageError(f"{file} does not hold one step a line: {error}") from error
