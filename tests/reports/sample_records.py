"""Records like those of the quick suite on two CPU ranks, and a published one beside them."""

import json
import random
from pathlib import Path

import msgspec

from bench import metrics
from bench.record import (
    Failure,
    FlopsSection,
    HardwareSection,
    ModelSection,
    RunRecord,
    WorkloadSection,
    write_record,
)

GIB = 2**30
HOSTILE = "<script>alert('x')</script> | `tick` **bold** [a](javascript:alert(1)) & \"quote\"\n_b_"
FLOPS = {"full": 41_500_000.0, "causal": 38_900_000.0}
PEAKS = {"fp32": 0.0535, "bf16": 0.321}
STEP_TIMES = (1.183, 1.171, 1.202, 1.179, 1.188, 1.262, 1.175, 1.181, 1.169, 1.184)


def step_rows(num_warmup: int = 3, num_measured: int = 10) -> list[dict]:
    """Rows of ``steps.jsonl``: warm-up, measured, counted, profiled; the losses fall."""
    rng = random.Random(0)
    phases = ["warmup"] * num_warmup + ["measured"] * num_measured + ["counted", "profiled"]
    rows = []
    for step, phase in enumerate(phases):
        measured = step - num_warmup
        times = {"warmup": 3.4 - step, "counted": 2.6, "profiled": 2.1}
        rows.append(
            {
                "step": step,
                "phase": phase,
                "step_time": times.get(phase) or STEP_TIMES[measured % len(STEP_TIMES)],
                "slowest_rank": step % 2,
                "loss": 5.61 * 0.93**step + rng.uniform(-0.05, 0.05),
                "mtp_loss": 5.72 * 0.95**step + rng.uniform(-0.05, 0.05),
                "grad_norm": 2.0,
                "tokens": 2048,
                "padding": 0,
                "targets": 2040,
            }
        )
    return rows


def measured_metrics(rows: list[dict], quantization: str) -> dict:
    """Return the metrics as the harness computes them."""
    times = [row["step_time"] for row in rows if row["phase"] == "measured"]
    speed = metrics.speed(times, tokens_per_step=2048, num_devices=2)
    dtype = metrics.matmul_dtype({"compute": "bfloat16", "quantization": quantization})
    losses = [row["loss"] for row in rows if row["phase"] == "measured"]
    return {
        **speed,
        **metrics.efficiency(
            speed["tokens_per_second_per_device"].value,
            FLOPS,
            dtype=dtype,
            peak_tflops=PEAKS,
            no_peak="no mxfp8 peak is known for this CPU (measured with a matmul of 2048 cubed)",
        ),
        "peak_memory_allocated": metrics.invalid(
            "peak_memory_allocated", "a CPU has no caching allocator"
        ),
        "peak_tensor_memory": metrics.memory(
            "peak_tensor_memory", [int(0.412 * GIB), int(0.409 * GIB)]
        ),
        "peak_rss": metrics.memory("peak_rss", [int(1.31 * GIB), int(1.28 * GIB)]),
        "exposed_communication": metrics.invalid(
            "exposed_communication", "the traces were not analysed"
        ),
        "bubble": metrics.bubble({"num_stages": 1, "bubble_percent": 0.0}),
        "loss": metrics.valid("loss", losses[-1], samples=losses),
    }


def measured_record(
    name: str = "deepseek_v3_proxy", *, quantization: str = "mxfp8", rows: list[dict] | None = None
) -> RunRecord:
    """Return a run that ended well, on two CPU ranks."""
    kernels = {"mxfp8_linear": "emulated (torchao)"} if quantization == "mxfp8" else {}
    return RunRecord(
        run_id=f"{name}-20261201-114500-3fa2",
        kind="measured",
        status="ok",
        created="2026-12-01T11:45:00Z",
        workload=WorkloadSection(
            name=name,
            version=1,
            sequence_length=512,
            global_batch_size=4,
            tokens_per_step=2048,
            routing="learned",
            data={
                "source": "text",
                "tokens": 12_080_465,
                "documents": 729,
                "mean_document_length": 16571.28,
                "sha256": "d40d13360fc49225489a0f2ca20e5216",
                "python": "3.11.7",
            },
        ),
        model=ModelSection(
            family="deepseek_v3", parameters=9_871_104, active_parameters=4_212_736, config={}
        ),
        plan={"world_size": 2, "dp_replicate": 1, "dp_shard": 2, "ep": 2, "remat": "selective"},
        precision={
            "params": "float32",
            "compute": "bfloat16",
            "reduce": "float32",
            "quantization": quantization,
        },
        training={"learning_rate": 1e-3, "weight_decay": 0.1, "seed": 0},
        measurement={"warmup_steps": 3, "steps": 10, "profile": True},
        flops=FlopsSection(per_token=FLOPS, terms={}),
        hardware=HardwareSection(
            device="Intel(R) Xeon(R) Platinum 8481C",
            num_devices=2,
            peak_tflops=PEAKS,
            peak_source="measured: matrix product of 2048 cubed, 1 thread",
            memory_gib=7.8,
            details={"kind": "cpu", "threads_per_device": 1},
        ),
        environment={
            "python": "3.11.7",
            "packages": {"torch": "2.13.0+cpu", "torchao": "0.18.0"},
            "cpu": {"cores": 2, "memory_bytes": 8_375_000_000, "load_average": [0.41, 0.38, 0.3]},
            "git": {"commit": "cea60bf", "dirty": False},
            "kernels": kernels,
            "ranks": [{"threads": 1}, {"threads": 1}],
        },
        metrics=measured_metrics(rows or step_rows(), quantization),
        counters={
            "collectives": {
                "dp_shard": {
                    "all_gather": {"count": 14, "bytes": 9_123_456},
                    "reduce_scatter": {"count": 7, "bytes": 18_246_912},
                },
                "ep": {"all_to_all": {"count": 24, "bytes": 3_145_728}},
            },
            "operators": 6123,
            "executed_flops": 112_345_678_912,
            "by_operator": {"aten::mm": 412, "aten::add": 977},
            "peak_tensor_bytes": int(0.412 * GIB),
        },
        artifacts={"steps": "steps.jsonl", "traces": "traces/"},
    )


def failed_record() -> RunRecord:
    """Return a run whose rank 1 raised after some steps."""
    return msgspec.structs.replace(
        measured_record("muse_spark_proxy", quantization="none"),
        status="failed",
        metrics={},
        counters={},
        failure=Failure(
            rank=1,
            error="FloatingPointError: step 7: loss nan, gradient norm nan",
            hint="lower training.learning_rate or look at precision and data",
        ),
    )


def published_record() -> RunRecord:
    """Return the announced result of DeepSeek V3 as a record."""

    def marked(name: str, value: float, origin: str, **details):
        return metrics.valid(name, value, details={**details, "origin": origin})

    peak = {"peak_dtype": "mxfp8", "peak_tflops": 5000.0}
    return RunRecord(
        run_id="published-torchtitan-2026-10-gb300-mxfp8",
        kind="published",
        status="ok",
        created="2026-10",
        workload=WorkloadSection(
            name="TorchTitan, 512 GB300, MXFP8",
            version=1,
            sequence_length=4096,
            global_batch_size=None,
            tokens_per_step=None,
            routing="not stated",
            data={},
        ),
        model=ModelSection(
            family="deepseek_v3",
            parameters=682_636_472_320,
            active_parameters=38_240_382_976,
            config={},
        ),
        plan={"world_size": 512, "pp": 2},
        precision={"quantization": "mxfp8"},
        flops=FlopsSection(
            per_token={"full": 291_853_541_376.0, "causal": 260_648_000_000.0}, terms={}
        ),
        hardware=HardwareSection(device="GB300", num_devices=512, memory_gib=268.2),
        metrics={
            "tokens_per_second_per_device": marked(
                "tokens_per_second_per_device", 5262.68, "stated"
            ),
            "model_tflops_per_device.full": marked(
                "model_tflops_per_device.full", 1535.93, "stated"
            ),
            "model_tflops_per_device.causal": marked(
                "model_tflops_per_device.causal", 1371.71, "derived"
            ),
            "mfu.full": marked("mfu.full", 30.72, "derived", **peak),
            "mfu.causal": marked("mfu.causal", 27.43, "derived", **peak),
            "peak_memory_reserved": marked("peak_memory_reserved", 224.65, "stated"),
        },
        source="PyTorch announcement of TorchTitan, October 2026",
        notes=["The sequence length is not stated; at 4096 tokens/s and TFLOPS agree."],
    )


def hostile_record() -> RunRecord:
    """Return a run with markup in every place that a user or a machine can name."""
    record = measured_record(HOSTILE)
    replace = msgspec.structs.replace
    return replace(
        record,
        run_id=HOSTILE,
        status="failed",
        workload=replace(record.workload, data={"source": HOSTILE, "tokens": 5}),
        plan={HOSTILE: HOSTILE},
        hardware=replace(record.hardware, device=HOSTILE, peak_source=HOSTILE),
        environment={HOSTILE: {HOSTILE: HOSTILE}},
        metrics={
            HOSTILE: metrics.MetricValue(value=1.5, unit=HOSTILE, details={HOSTILE: HOSTILE}),
            "step_time": metrics.invalid("step_time", HOSTILE),
        },
        counters={"collectives": {HOSTILE: {HOSTILE: {"count": 1, "bytes": 2}}}, HOSTILE: 3},
        source="javascript:alert(1)",
        notes=[HOSTILE],
        failure=Failure(rank=0, error=f"{HOSTILE}\n```\nsecond line", hint=HOSTILE),
    )


def write_run(folder: Path, record: RunRecord, rows: list[dict] | None = None) -> Path:
    """Write a run folder below ``folder`` and return it."""
    run_folder = folder / record.run_id
    run_folder.mkdir(parents=True)
    write_record(record, run_folder)
    lines = [json.dumps(row) + "\n" for row in (step_rows() if rows is None else rows)]
    (run_folder / "steps.jsonl").write_text("".join(lines))
    return run_folder
