"""From what the ranks handed in to the run's record."""

from pathlib import Path
from typing import Any

import msgspec

from bench import metrics
from bench.counters import counters
from bench.env import cpu_model, memory_bytes
from bench.hardware import find_accelerator
from bench.launch.local import Outcome
from bench.rank_report import RankReport, read_report, read_steps
from bench.record import (
    Failure,
    FlopsSection,
    HardwareSection,
    MetricValue,
    ModelSection,
    RunRecord,
    Scalar,
    WorkloadSection,
)
from bench.spec import RunSpec
from bench.steps import STEPS_FILE, Step, combine_steps, measured, write_steps
from workloads.workload import Workload

PUBLISHED_FILE = "published.json"
NO_ALLOCATOR = "a CPU has no caching allocator: see peak_tensor_memory and peak_rss"
SWITCHED_OFF = "the instruments were switched off"
# metric: the key of the rank's memory report
MEMORY_METRICS = {
    "peak_memory_allocated": "peak_memory_allocated_bytes",
    "peak_memory_reserved": "peak_memory_reserved_bytes",
    "peak_tensor_memory": "peak_tensor_bytes",
    "peak_rss": "peak_rss_bytes",
}
CPU_ONLY_METRICS = ("peak_tensor_memory", "peak_rss")


def combine(
    run_folder: Path,
    *,
    spec: RunSpec,
    workload: Workload,
    outcome: Outcome,
    created: str,
    environment: dict[str, Any],
) -> RunRecord:
    """Return the record of the run in ``run_folder`` and write its ``steps.jsonl``.

    A run that did not end well has its steps but no metrics.
    """
    steps = combine_steps([read_steps(run_folder, rank) for rank in range(spec.ranks)])
    write_steps(steps, run_folder)
    found = [read_report(run_folder, rank) for rank in range(spec.ranks)]
    reports = [report for report in found if report is not None]
    outcome = _confirmed(outcome, found)
    hardware = hardware_section(spec, reports)
    flops = flops_section(workload)
    succeeded = outcome.status == "ok"
    return RunRecord(
        run_id=run_folder.name,
        kind="measured",
        status=outcome.status,
        created=created,
        workload=workload_section(workload, reports),
        model=model_section(workload),
        plan={"world_size": spec.ranks, **scalars(workload.plan)},
        precision=scalars(workload.precision),
        training=scalars(workload.training),
        measurement=_measurement(spec),
        flops=flops,
        hardware=hardware,
        environment={**environment, **_rank_environment(reports)},
        metrics=_metrics(steps, reports, workload, hardware, flops) if succeeded else {},
        counters=counters(reports) if succeeded else {},
        artifacts=_artifacts(run_folder),
        failure=outcome.failure,
    )


def _confirmed(outcome: Outcome, reports: list[RankReport | None]) -> Outcome:
    """Return the outcome, failed if a rank ended well but handed in no report."""
    if outcome.status != "ok" or None not in reports:
        return outcome
    rank = reports.index(None)
    return Outcome(
        status="failed", failure=Failure(rank=rank, error="ended without handing in a report")
    )


def workload_section(workload: Workload, reports: list[RankReport]) -> WorkloadSection:
    """Return what was computed, with what the data source says about itself."""
    return WorkloadSection(
        name=workload.name,
        version=workload.version,
        sequence_length=workload.sequence_length,
        global_batch_size=workload.global_batch_size,
        tokens_per_step=workload.tokens_per_step,
        routing=workload.routing,
        data=reports[0].data if reports else {"source": workload.data},
    )


def model_section(workload: Workload) -> ModelSection:
    """Return the network with its exact parameter counts."""
    counts = workload.model.counts()
    return ModelSection(
        family=type(workload.model).__module__.rpartition(".")[2],
        parameters=counts.total,
        active_parameters=counts.active,
        config=msgspec.to_builtins(workload.model),
    )


def flops_section(workload: Workload) -> FlopsSection:
    """Return the model's FLOPs per token at the workload's sequence length."""
    ledger = workload.model.flops_per_token(workload.sequence_length)
    return FlopsSection(
        per_token={"full": ledger.full, "causal": ledger.causal},
        terms={
            name: {"full": term.full, "causal": term.causal} for name, term in ledger.terms.items()
        },
    )


def hardware_section(spec: RunSpec, reports: list[RankReport]) -> HardwareSection:
    """Return the devices: one per rank, on a CPU the share of the machine that a rank has."""
    name = reports[0].device if reports else spec.device
    if name == "cpu":
        return _cpu_section(spec, reports)
    try:
        accelerator = find_accelerator(name)
    except LookupError as error:
        return HardwareSection(device=name, num_devices=spec.ranks, peak_source=str(error))
    return HardwareSection(
        device=name,
        num_devices=spec.ranks,
        peak_tflops=accelerator.peak_tflops,
        peak_source=accelerator.source,
        memory_gib=accelerator.memory_bytes / metrics.GIB,
        details={"memory_bytes_per_s": accelerator.memory_bytes_per_s},
    )


def _cpu_section(spec: RunSpec, reports: list[RankReport]) -> HardwareSection:
    peak = reports[0].instruments.get("peak") if reports else None
    return HardwareSection(
        device=cpu_model(),
        num_devices=spec.ranks,
        peak_tflops={"fp32": peak["float32"], "bf16": peak["bfloat16"]} if peak else {},
        peak_source=peak["how"] if peak else "the CPU's peak was not measured",
        memory_gib=memory_bytes() / metrics.GIB,
        details={"kind": "cpu", "threads_per_device": spec.threads},
    )


def scalars(struct: msgspec.Struct) -> dict[str, Scalar]:
    """Return the fields of a struct; several words as one text, as ``--set`` reads them."""
    fields = msgspec.structs.asdict(struct)
    return {k: ", ".join(v) if isinstance(v, tuple) else v for k, v in fields.items()}


def _metrics(
    steps: list[Step],
    reports: list[RankReport],
    workload: Workload,
    hardware: HardwareSection,
    flops: FlopsSection,
) -> dict[str, MetricValue]:
    """Return every metric of a run that ended well."""
    rows = measured(steps)
    tokens_per_step = sum(row.tokens for row in rows) / len(rows)
    speed = metrics.speed(
        [row.step_time for row in rows],
        tokens_per_step=tokens_per_step,
        num_devices=hardware.num_devices,
    )
    rate = speed["tokens_per_second_per_device"].value
    assert rate is not None, "speed() measures or raises"
    dtype = metrics.matmul_dtype(msgspec.to_builtins(workload.precision))
    return {
        **speed,
        **metrics.efficiency(
            rate,
            flops.per_token,
            dtype=dtype,
            peak_tflops=hardware.peak_tflops,
            no_peak=_no_peak(hardware, dtype),
        ),
        **_memory_metrics(reports),
        "exposed_communication": _exposed_communication(reports),
        "bubble": metrics.bubble(reports[0].instruments["pipeline"]),
        **_loss_metrics(rows),
    }


def _no_peak(hardware: HardwareSection, dtype: str | None) -> str:
    if not hardware.peak_tflops:
        return hardware.peak_source
    if hardware.details.get("kind") == "cpu":
        return f"a CPU emulates {dtype} and has no peak for it: see mfu_bf16"
    return f"no dense {dtype} peak is known for {hardware.device} ({hardware.peak_source})"


def _loss_metrics(rows: list[Step]) -> dict[str, MetricValue]:
    losses = [row.loss for row in rows]
    norms = [row.grad_norm for row in rows]
    result = {
        "loss": metrics.valid("loss", losses[-1], samples=losses),
        "grad_norm": metrics.valid("grad_norm", norms[-1], samples=norms),
    }
    mtp_losses = [row.mtp_loss for row in rows if row.mtp_loss is not None]
    if mtp_losses:
        result["mtp_loss"] = metrics.valid("mtp_loss", mtp_losses[-1], samples=mtp_losses)
    return result


def _memory_metrics(reports: list[RankReport]) -> dict[str, MetricValue]:
    """Return the memory metrics of the device: the allocator's, or a CPU's two of its own."""
    on_cpu = reports[0].device == "cpu"
    result = {}
    for name, key in MEMORY_METRICS.items():
        found = [report.instruments.get("memory", {}).get(key) for report in reports]
        if None not in found:
            result[name] = metrics.memory(name, found)
        elif on_cpu or name not in CPU_ONLY_METRICS:
            allocator = on_cpu and name not in CPU_ONLY_METRICS
            result[name] = metrics.invalid(name, NO_ALLOCATOR if allocator else SWITCHED_OFF)
    return result


def _exposed_communication(reports: list[RankReport]) -> MetricValue:
    name = "exposed_communication"
    profiles = [report.instruments.get("profiler") for report in reports]
    found = [profile.get("exposed_communication_percent") for profile in profiles if profile]
    shares = [share for share in found if share is not None]
    if not found:
        return metrics.invalid(name, "the run was not profiled")
    if not shares:
        reason = next((profile.get("reason") for profile in profiles if profile), None)
        return metrics.invalid(name, reason or "the traces were not analysed")
    details: dict[str, Scalar] = {"minimum": min(shares), "rank": shares.index(max(shares))}
    return metrics.valid(name, max(shares), details=details)


def _measurement(spec: RunSpec) -> dict[str, Scalar]:
    fields = msgspec.to_builtins(spec)
    return {**{k: v for k, v in fields.items() if k != "set"}, "set": " ".join(spec.set)}


def _rank_environment(reports: list[RankReport]) -> dict[str, Any]:
    if not reports:
        return {}
    # Pipeline stages may have different layers.
    kinds = sorted({kind for report in reports for kind in report.kernels})
    kernels = {
        kind: "; ".join(sorted({r.kernels[kind] for r in reports if kind in r.kernels}))
        for kind in kinds
    }
    return {"kernels": kernels, "ranks": [report.environment for report in reports]}


def _artifacts(run_folder: Path) -> dict[str, str]:
    """Return what else lies in the run's folder, by what it is."""
    paths = {
        "steps": STEPS_FILE,
        "ranks": "ranks/",
        "traces": "traces/",
        "memory": "memory/",
        "published": PUBLISHED_FILE,
    }
    return {name: path for name, path in paths.items() if (run_folder / path).exists()}
