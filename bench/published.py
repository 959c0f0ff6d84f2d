"""Published results as records: what a source states, and what follows from it by our ledger.

They lie in ``workloads/published/<reference>.yaml``. Every metric's ``details["origin"]`` says
``stated`` or ``derived``; where the source states a number, ``details["ledger"]`` has the one
that our count gives, so that a convention of its own is seen.
"""

from pathlib import Path
from typing import Literal

import msgspec
import yaml
from msgspec.structs import replace

from bench import metrics
from bench.combine import PUBLISHED_FILE, flops_section, model_section
from bench.errors import UsageError
from bench.hardware import find_accelerator
from bench.record import (
    FlopsSection,
    HardwareSection,
    MetricValue,
    RunRecord,
    Scalar,
    WorkloadSection,
    write_atomic,
)
from workloads import registry
from workloads.workload import Workload

FOLDER = Path(registry.__file__).parent / "published"


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what the file holds: unknown keys are refused."""


class StatedTflops(_Entry, frozen=True, kw_only=True):
    """TFLOPS per device in the convention that the source counts in."""

    value: float
    convention: Literal["full", "causal"]


class StatedMfu(_Entry, frozen=True, kw_only=True):
    """MFU in % in the convention of the source, against the peak of ``peak_dtype``."""

    value: float
    convention: Literal["full", "causal"]
    peak_dtype: str


class Devices(_Entry, frozen=True, kw_only=True):
    """The device by a name of ``bench.hardware``."""

    device: str
    num_devices: int


class PublishedResult(_Entry, frozen=True, kw_only=True):
    """One published result; None and missing keys are what the source does not state."""

    run_id: str
    title: str
    source: str
    created: str | None
    hardware: Devices
    sequence_length: int
    global_batch_size: int | None
    precision: dict[str, Scalar]
    plan: dict[str, Scalar]
    routing: str | None
    mtp: int
    tokens_per_second: float | None
    tokens_per_second_per_device: float
    model_tflops_per_device: StatedTflops | None
    mfu: StatedMfu | None
    peak_memory_gib: float | None
    """What trainers print: memory reserved by the allocator."""
    notes: list[str] = []


def published_records(reference: str) -> list[RunRecord]:
    """Return the published results that a workload's ``reference`` names; none for "".

    Raises:
        UsageError: if there is no such file, or it holds something else.
    """
    if not reference:
        return []
    path = FOLDER / f"{reference}.yaml"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        results = msgspec.convert(content, list[PublishedResult])
    except (OSError, yaml.YAMLError, msgspec.ValidationError) as error:
        raise UsageError(f"cannot read published results {path}: {error}") from error
    network = _network(reference)
    return [_record(result, network) for result in results]


def _network(reference: str) -> Workload:
    """Return the workload of the published network: the largest that names the reference."""
    named = [registry.load(name) for name in registry.catalogue()]
    candidates = [workload for workload in named if workload.reference == reference]
    return max(candidates, key=lambda workload: workload.model.counts().total)


def _record(result: PublishedResult, network: Workload) -> RunRecord:
    model = network.model
    if result.mtp != model.num_mtp_layers:  # not every family has MTP to set
        model = replace(model, num_mtp_layers=result.mtp)
    workload = replace(network, model=model, sequence_length=result.sequence_length)
    flops = flops_section(workload)
    batch = result.global_batch_size
    return RunRecord(
        run_id=result.run_id,
        kind="published",
        status="ok",
        created=result.created or "",
        workload=WorkloadSection(
            name=result.title,
            version=workload.version,
            sequence_length=result.sequence_length,
            global_batch_size=batch,
            tokens_per_step=batch * result.sequence_length if batch else None,
            routing=result.routing or "not stated",
            data={},
        ),
        model=model_section(workload),
        plan={"world_size": result.hardware.num_devices, **result.plan},
        precision=result.precision,
        flops=flops,
        hardware=_hardware(result.hardware),
        metrics=_metrics(result, flops),
        source=result.source,
        notes=result.notes,
    )


def _hardware(devices: Devices) -> HardwareSection:
    try:
        accelerator = find_accelerator(devices.device)
    except LookupError as error:
        return HardwareSection(
            device=devices.device, num_devices=devices.num_devices, peak_source=str(error)
        )
    return HardwareSection(
        device=devices.device,
        num_devices=devices.num_devices,
        peak_tflops=accelerator.peak_tflops,
        peak_source=accelerator.source,
        memory_gib=accelerator.memory_bytes / metrics.GIB,
    )


def _metrics(result: PublishedResult, flops: FlopsSection) -> dict[str, MetricValue]:
    """Return the derived metrics with the stated ones in their places."""
    rate = result.tokens_per_second_per_device
    hardware = _hardware(result.hardware)
    dtype = metrics.matmul_dtype(result.precision)
    values = metrics.efficiency(
        rate,
        flops.per_token,
        dtype=dtype,
        peak_tflops=hardware.peak_tflops,
        no_peak=f"no dense {dtype} peak is known for {hardware.device}",
    )
    values["tokens_per_second"] = metrics.valid(
        "tokens_per_second", rate * result.hardware.num_devices
    )
    values = {name: _marked(value, "derived") for name, value in values.items()}
    return values | _stated(result, values)


def _stated(result: PublishedResult, derived: dict[str, MetricValue]) -> dict[str, MetricValue]:
    """Return what the source states, each with what our ledger gives in its place."""
    numbers = {"tokens_per_second_per_device": result.tokens_per_second_per_device}
    if result.tokens_per_second is not None:
        numbers["tokens_per_second"] = result.tokens_per_second
    if result.peak_memory_gib is not None:
        numbers["peak_memory_reserved"] = result.peak_memory_gib
    if result.model_tflops_per_device is not None:
        tflops = result.model_tflops_per_device
        numbers[f"model_tflops_per_device.{tflops.convention}"] = tflops.value
    if result.mfu is not None:
        kind = "mfu_bf16" if result.mfu.peak_dtype == "bf16" else "mfu"
        numbers[f"{kind}.{result.mfu.convention}"] = result.mfu.value
    stated = {}
    for name, number in numbers.items():
        ledger = {"ledger": derived[name].value} if name in derived else {}
        stated[name] = _marked(metrics.valid(name, number, details=ledger), "stated")
    return stated


def _marked(value: MetricValue, origin: str) -> MetricValue:
    return replace(value, details={**value.details, "origin": origin})


def write_published(records: list[RunRecord], run_folder: Path) -> None:
    """Keep the records with the run, so that reporting needs neither the models nor torch."""
    write_atomic(run_folder / PUBLISHED_FILE, msgspec.json.encode(records))


def read_published(run_folder: Path) -> list[RunRecord]:
    """Return the records that were kept with the run; none if there are none."""
    path = run_folder / PUBLISHED_FILE
    return msgspec.json.decode(path.read_bytes(), type=list[RunRecord]) if path.exists() else []
