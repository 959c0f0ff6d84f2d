"""The runner: one specification in, one run folder and its record out."""

import secrets
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from bench.combine import combine
from bench.cpu_peak import cpu_peak
from bench.env import environment, num_cores
from bench.errors import UsageError
from bench.launch.local import launch
from bench.published import published_records, write_published
from bench.rank_report import StepRow, read_steps
from bench.record import RunRecord, write_record
from bench.resolve import resolve, resolve_device
from bench.spec import RunSpec, write_job

OnStep = Callable[[StepRow], None]


def check(specs: list[RunSpec], out: Path) -> list[RunSpec]:
    """Return the specifications with device and threads filled in, all of them able to start.

    Raises:
        UsageError: if one of them does not fit, or ``out`` cannot be written to.
    """
    for spec in specs:
        resolve(spec)
    complete = [_complete(spec) for spec in specs]
    _check_writable(out)
    return complete


def run(
    spec: RunSpec,
    out: Path,
    *,
    on_step: OnStep = lambda row: None,
    worker: str = "bench.worker",
) -> tuple[RunRecord, Path]:
    """Run ``spec`` and return its record and its folder ``OUT/<run_id>/``.

    The record is written whether the run succeeds or not; ``on_step`` sees each step of rank 0.

    Raises:
        UsageError: before anything is started, if the run cannot start.
    """
    (spec,) = check([spec], out)
    workload = resolve(spec)
    if spec.device == "cpu":
        cpu_peak(spec.threads)  # now, on an idle machine, rather than in every rank at once
    created = datetime.now(UTC)
    folder = _make_run_folder(out, created, workload.name)
    write_job(folder, spec)
    write_published(published_records(workload.reference), folder)
    before = environment()
    outcome = launch(
        folder,
        ranks=spec.ranks,
        threads=spec.threads,
        timeout=spec.timeout,
        worker=worker,
        on_tick=_step_reader(folder, on_step),
    )
    record = combine(
        folder,
        spec=spec,
        workload=workload,
        outcome=outcome,
        created=created.isoformat(timespec="seconds"),
        environment=before,
    )
    write_record(record, folder)
    return record, folder


def _complete(spec: RunSpec) -> RunSpec:
    """Return ``spec`` with what it leaves to the machine: the device and the threads per rank."""
    return msgspec.structs.replace(
        spec,
        device=resolve_device(spec),
        threads=spec.threads or max(1, num_cores() // spec.ranks),
    )


def _check_writable(out: Path) -> None:
    """Raise ``UsageError`` unless a file can be made in ``out``, which is made if it is missing."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise UsageError(
            f"cannot write to output folder {out}: {error.strerror}",
            hint="give another one with --output",
        ) from error


def _make_run_folder(out: Path, created: datetime, name: str) -> Path:
    """Make ``OUT/<time>-<workload>-<random>``; the random part keeps simultaneous runs apart."""
    folder = out / f"{created:%Y%m%dT%H%M%SZ}-{name}-{secrets.token_hex(3)}"
    folder.mkdir()
    return folder


def _step_reader(folder: Path, on_step: OnStep) -> Callable[[], None]:
    """Return a function that passes on the steps rank 0 has written since it was last called."""
    num_seen = 0

    def read_new() -> None:
        nonlocal num_seen
        rows = read_steps(folder, rank=0)
        for row in rows[num_seen:]:
            on_step(row)
        num_seen = len(rows)

    return read_new
