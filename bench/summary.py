"""The summary of finished runs: a table for people, builtins for ``--json``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.record import MetricValue, RunRecord

Finished = tuple[RunRecord, Path]

# column: the metrics in it, side by side
COLUMNS = {
    "step time (s)": ("step_time",),
    "tokens/s": ("tokens_per_second",),
    "tokens/s/device": ("tokens_per_second_per_device",),
    "TFLOPS/device full / causal": (
        "model_tflops_per_device.full",
        "model_tflops_per_device.causal",
    ),
    "MFU full / causal (%)": ("mfu.full", "mfu.causal"),
    "BF16 MFU full / causal (%)": ("mfu_bf16.full", "mfu_bf16.causal"),
    "loss": ("loss",),
}
ABSENT = "-"


def summarize(run: Finished) -> dict[str, Any]:
    """Return the run's identity, status and metrics as builtins."""
    record, folder = run
    metrics = {
        name: {"value": value.value, "unit": value.unit, "invalid": value.invalid}
        for name, value in record.metrics.items()
    }
    return {
        "run_id": record.run_id,
        "workload": record.workload.name,
        "status": record.status,
        "folder": str(folder),
        "metrics": metrics,
        "failure": msgspec.to_builtins(record.failure),
    }


def summary_table(runs: Sequence[Finished]) -> str:
    """Return the runs as a text table, with the reasons of invalid metrics below it."""
    header = ["workload", "status", "devices", *COLUMNS]
    rows = [
        [record.workload.name, record.status, str(record.hardware.num_devices), *_cells(record)]
        for record, _ in runs
    ]
    reasons = {
        f"{record.workload.name}: no {name}: {value.invalid}"
        for record, _ in runs
        for name, value in record.metrics.items()
        if value.invalid and any(name in names for names in COLUMNS.values())
    }
    return "\n".join([text_table([header, *rows]), *sorted(reasons)])


def _cells(record: RunRecord) -> list[str]:
    return [_cell(record, names) for names in COLUMNS.values()]


def _cell(record: RunRecord, names: Sequence[str]) -> str:
    numbers = [_number(record.metrics.get(name)) for name in names]
    return ABSENT if set(numbers) == {ABSENT} else " / ".join(numbers)


def _number(metric: MetricValue | None) -> str:
    return ABSENT if metric is None or metric.value is None else f"{metric.value:.4g}"


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of equal length as aligned columns, the first row underlined."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [rows[0], rule, *rows[1:]]
    )


def failure_line(record: RunRecord, folder: Path) -> str:
    """Return in one line how the run failed and where its ranks' output is."""
    failure = record.failure
    assert failure is not None, f"{record.run_id} did not fail"
    where = "" if failure.rank is None else f"rank {failure.rank}: "
    what = " ".join(f"{where}{failure.error}".split())
    return f"{record.workload.name} {record.status}: {what}; logs in {folder / 'ranks'}"
