"""The run record: one schema for measured, predicted, imported and published results.

A run is a folder ``OUT/<run_id>/``; its truth is ``run.json``, strict and finite JSON that is
written under a temporary name and renamed, so that a reader never sees half a record.
"""

import math
import os
from pathlib import Path
from typing import Any, Literal

import msgspec

from bench.errors import UsageError

SCHEMA_VERSION = 1
RECORD_FILE = "run.json"

Kind = Literal["measured", "predicted", "imported", "published"]
Status = Literal["ok", "failed", "interrupted", "timeout"]
Scalar = bool | int | float | str | None


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the record's parts: frozen, keyword-only, unknown fields refused."""


class WorkloadSection(Section, frozen=True, kw_only=True):
    """What was computed. ``sequence_length`` in tokens, ``global_batch_size`` in sequences."""

    name: str
    version: int
    sequence_length: int
    global_batch_size: int | None
    tokens_per_step: int | None
    routing: str
    data: dict[str, Scalar]


class ModelSection(Section, frozen=True, kw_only=True):
    """The network. Parameter counts are exact and derived from the configuration."""

    family: str
    parameters: int
    active_parameters: int
    config: dict[str, Any]


class FlopsSection(Section, frozen=True, kw_only=True):
    """Model FLOPs per token (forward and backward, no recomputation) in both conventions."""

    per_token: dict[str, float]
    terms: dict[str, dict[str, float]]


class HardwareSection(Section, frozen=True, kw_only=True):
    """The devices. Peaks are dense TFLOPS per device and dtype; ``peak_source`` says whence."""

    device: str
    num_devices: int
    peak_tflops: dict[str, float] = {}
    peak_source: str = ""
    memory_gib: float | None = None
    details: dict[str, Scalar] = {}


class MetricValue(Section, frozen=True, kw_only=True):
    """One metric: a finite value with its unit, or no value and the reason in ``invalid``."""

    value: float | None
    unit: str
    samples: list[float] = []
    invalid: str | None = None
    details: dict[str, Scalar] = {}


class Failure(Section, frozen=True, kw_only=True):
    """Why a run did not succeed: the earliest failing rank and its own error."""

    rank: int | None
    error: str
    hint: str = ""


class RunRecord(Section, frozen=True, kw_only=True):
    """The whole record; see the module docstring and ``docs/architecture.md``."""

    schema: int = SCHEMA_VERSION
    run_id: str
    kind: Kind
    status: Status
    created: str
    workload: WorkloadSection
    model: ModelSection
    plan: dict[str, Scalar]
    precision: dict[str, Scalar]
    training: dict[str, Scalar] = {}
    measurement: dict[str, Scalar] = {}
    flops: FlopsSection
    hardware: HardwareSection
    environment: dict[str, Any] = {}
    metrics: dict[str, MetricValue] = {}
    counters: dict[str, Any] = {}
    artifacts: dict[str, str] = {}
    source: str = ""
    notes: list[str] = []
    failure: Failure | None = None


def encode(record: RunRecord) -> bytes:
    """Return the record as strict, indented JSON.

    Raises:
        ValueError: if any number in it is NaN or infinite; the message names the place.
    """
    builtins = msgspec.to_builtins(record)
    require_finite(builtins)
    return msgspec.json.format(msgspec.json.encode(builtins), indent=2) + b"\n"


def require_finite(value: object, where: str = "record") -> None:
    """Raise ``ValueError`` naming the place of the first NaN or infinity in nested builtins."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} is {value}: a record holds finite numbers only")
    if isinstance(value, dict):
        for key, item in value.items():
            require_finite(item, f"{where}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            require_finite(item, f"{where}[{index}]")


def write_atomic(path: Path, data: bytes) -> None:
    """Write ``data`` so that ``path`` holds either its old content or all of the new."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_record(record: RunRecord, run_folder: Path) -> Path:
    """Write ``run.json`` into an existing ``run_folder`` and return its path."""
    path = run_folder / RECORD_FILE
    write_atomic(path, encode(record))
    return path


def read_record(path: Path) -> RunRecord:
    """Read a record from ``run.json`` or from the run's folder.

    Raises:
        UsageError: if there is none, or it is not a record of this schema.
    """
    file = path / RECORD_FILE if path.is_dir() else path
    try:
        return msgspec.json.decode(file.read_bytes(), type=RunRecord)
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise UsageError(
            f"{file} is not a run record of schema {SCHEMA_VERSION}: {error}",
            hint="give a run folder or the run.json in it",
        ) from error
