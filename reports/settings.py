"""Settings: what ran, on what, and in which surroundings, as rows of text."""

from collections.abc import Iterator, Mapping
from typing import Any

from bench.record import RunRecord
from reports.blocks import Cell, Column, Facts, Table
from reports.numbers import ABSENT, number, quantity, scalar, short_bytes, short_count, short_flop


def what_ran(record: RunRecord) -> Facts:
    """Return workload, model, batch, data, layout, precision and device of a run."""
    workload, model = record.workload, record.model
    items = [
        ("Workload", Cell(text=f"{workload.name}, version {workload.version}")),
        ("Model", model_cell(record)),
        ("Batch", batch_cell(record)),
        ("Data", data_cell(workload.data)),
        ("Routing", Cell(text=workload.routing or ABSENT)),
        ("Plan", Cell(text=pairs(record.plan))),
        ("Precision", precision_cell(record)),
        ("Kernels", Cell(text=pairs(named_kernels(record)))),
        ("Training", Cell(text=pairs(record.training))),
        ("Measurement", Cell(text=pairs(record.measurement))),
        ("Devices", device_cell(record)),
        ("Source", Cell(text=record.source, link=record.source)),
    ]
    if not model.family:
        items = [item for item in items if item[0] != "Model"]
    return Facts(items=[(name, cell) for name, cell in items if cell.text not in ("", ABSENT)])


def model_cell(record: RunRecord) -> Cell:
    """Return the network's size and its FLOPs per token in both conventions."""
    model = record.model
    flops = [
        f"{short_flop(value)} per token ({convention})"
        for convention, value in record.flops.per_token.items()
    ]
    return Cell(
        text=f"{model.family}, {short_count(model.parameters)} parameters, "
        f"{short_count(model.active_parameters)} active per token",
        note=", ".join([f"exactly {model.parameters:,} parameters", *flops]),
    )


def batch_cell(record: RunRecord) -> Cell:
    """Return the shape of a step."""
    workload = record.workload
    length = f"{workload.sequence_length:,} tokens"
    if workload.global_batch_size is None:
        return Cell(text=f"sequences of {length}; global batch size not known")
    tokens = workload.tokens_per_step or workload.global_batch_size * workload.sequence_length
    return Cell(
        text=f"{workload.global_batch_size:,} sequences x {length} = {tokens:,} tokens per step"
    )


def data_cell(data: Mapping[str, Any]) -> Cell:
    """Return the data's source, size and fingerprint; whatever else the record says follows."""
    known = {"source", "tokens", "documents", "mean_document_length", "sha256"}
    text = str(data.get("source", ""))
    if data.get("tokens") is not None and data.get("documents") is not None:
        text += (
            f": {data['tokens']:,} tokens in {data['documents']:,} documents of "
            f"{number(data.get('mean_document_length', 0))} tokens on average"
        )
    others = {key: value for key, value in data.items() if key not in known and value is not None}
    if data.get("sha256"):
        others["sha256"] = str(data["sha256"])[:16]
    return Cell(text=text, note=pairs(others))


def precision_cell(record: RunRecord) -> Cell:
    """Return the dtypes; what is only emulated on this device is called so."""
    emulated = emulated_kernels(record)
    note = ""
    if emulated:
        note = (
            f"{', '.join(emulated)}: emulated on this device, with the numerics of the format "
            "but not its speed"
        )
    label = " (emulated)" if emulated else ""
    return Cell(text=pairs(record.precision) + label, note=note)


def emulated_kernels(record: RunRecord) -> list[str]:
    """Return the operators whose kernel was an emulation, from what the record says ran."""
    named = {**named_kernels(record), **record.precision}
    return [str(name) for name, kernel in named.items() if "emulat" in str(kernel).lower()]


def named_kernels(record: RunRecord) -> dict[str, Any]:
    """Return the kernel that served each operator which has several, as the record names it."""
    kernels = record.environment.get("kernels", {})
    return kernels if isinstance(kernels, dict) else {}


def device_cell(record: RunRecord) -> Cell:
    """Return number and kind of devices, with the peaks that MFU is measured against."""
    hardware = record.hardware
    peaks = ", ".join(
        f"{dtype} {quantity(peak, 'TFLOPS')}" for dtype, peak in hardware.peak_tflops.items()
    )
    notes = [f"dense peak per device: {peaks} ({hardware.peak_source})" if peaks else ""]
    if hardware.memory_gib:
        whose = "in the machine" if hardware.details.get("kind") == "cpu" else "per device"
        notes.append(f"memory {number(hardware.memory_gib)} GiB {whose}")
    notes.append(pairs(hardware.details))
    return Cell(
        text=f"{hardware.num_devices:,} x {hardware.device}",
        note="; ".join(note for note in notes if note),
    )


def environment_table(record: RunRecord) -> Table | None:
    """Return versions, machine and commit, one a row; None if the record has none."""
    rows = [
        [Cell(text=name), Cell(text=environment_value(name, value))]
        for name, value in flatten(record.environment)
    ]
    if not rows:
        return None
    columns = [Column(title="Name"), Column(title="Value")]
    return Table(columns=columns, rows=rows, caption="Environment of the run", folded=True)


def environment_value(name: str, value: object) -> str:
    """Return an environment value as text; sizes in bytes in a unit that fits."""
    if name.endswith("_bytes") and isinstance(value, int):
        return short_bytes(value)
    return scalar(value)


def flatten(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested mappings as dotted names and plain values; a list is one value."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from flatten(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield from flatten(item, f"{name}.{index}")
    elif isinstance(value, list):
        yield name, " ".join(scalar(item) for item in value)
    else:
        yield name, value


def pairs(settings: Mapping[str, Any]) -> str:
    """Return ``name value`` pairs as one line."""
    return ", ".join(f"{name} {scalar(value)}" for name, value in settings.items())
