"""One GPU, checked in one call: do the workloads train here, and how fast are their operators?

``python scripts/gpu_check.py -o OUT [--small] [--device cuda|cpu]`` needs plain torch with CUDA,
msgspec, torch_remat and pyyaml: no network, no torchao, no second device. It trains both proxies
and a one-layer, full-width slice of each flagship in bf16, measures the rates of products,
grouped products, attention and memory-bound operators, and writes records, traces and
``rates.json``. ``--small`` shrinks everything so that a CPU does it in a minute.
"""

import argparse
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from bench.errors import BenchError  # noqa: E402
from bench.record import RunRecord  # noqa: E402
from bench.runner import run  # noqa: E402
from bench.spec import RunSpec  # noqa: E402
from scripts.operator_rates import measure_rates, write_rates  # noqa: E402

BF16 = ["precision.quantization=none", "workload.data=synthetic"]
ONE_RANK = ["plan.pp=1", "plan.cp=1", "plan.ep=1", "plan.microbatches=1", "plan.remat=none"]
# What one rank of 8 expert-parallel ranks holds of a flagship's layer, at the layer's full width.
DEEPSEEK_SLICE = [
    "model.num_layers=1",
    "model.num_dense_layers=0",
    "model.num_mtp_layers=0",
    "model.num_experts=32",
    "model.num_expert_groups=1",
    "model.num_limited_groups=1",
    *ONE_RANK,
    "workload.global_batch_size=2",
]
MUSE_SLICE = [
    "model.num_layers=1",
    "model.num_experts=32",
    *ONE_RANK,
    "workload.global_batch_size=2",
]
SMALL_DEEPSEEK = ["model.dim=256", "model.num_heads=4", "model.expert_hidden_dim=64"]
SMALL_MUSE = [
    "model.dim=256",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.latent_dim=64",
    "model.expert_hidden_dim=64",
]
SMALL = ["workload.sequence_length=128", "workload.global_batch_size=1"]
SMALL_SLICE = ["model.num_experts=8", "model.vocab_size=512"]


def specs(*, device: str, small: bool) -> list[RunSpec]:
    """Return the runs of the check."""
    deepseek = DEEPSEEK_SLICE + (SMALL_DEEPSEEK + SMALL_SLICE if small else [])
    muse = MUSE_SLICE + (SMALL_MUSE + SMALL_SLICE if small else [])
    runs: dict[str, list[str]] = {
        "deepseek_v3_proxy": [],
        "muse_spark_proxy": [],
        "deepseek_v3_671b_bf16": deepseek,
        "muse_spark_4k": muse,
    }
    return [
        RunSpec(
            workload=workload,
            set=BF16 + changes + (SMALL if small else []),
            device="cuda" if device == "cuda" else "cpu",
            steps=1 if small else 10,
            warmup_steps=0 if small else 3,
            timeout=240,
        )
        for workload, changes in runs.items()
    ]


def main() -> int:
    """Run the check; the exit code is 3 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    rates = measure_rates(options.device, small=options.small)
    write_rates(rates, options.output / "rates.json")
    for rate in rates:
        print(rate.line(), flush=True)
    failed = False
    for spec in specs(device=options.device, small=options.small):
        try:
            record, folder = run(spec, options.output)
        except BenchError as error:
            print(f"error: {spec.workload}: {error}", file=sys.stderr)
            failed = True
            continue
        failed |= record.status != "ok"
        print(summary(record), folder.name, flush=True)
    return 3 if failed else 0


def summary(record: RunRecord) -> str:
    """Return one line on a run: its speed, or why it has none."""
    if record.failure is not None:
        return f"{record.workload.name}: {record.status}: {record.failure.error}"
    values = {name: metric.value for name, metric in record.metrics.items()}
    return (
        f"{record.workload.name}: {values['tokens_per_second_per_device']:.0f} tokens/s, "
        f"{values['model_tflops_per_device.full']:.1f} TFLOPS (full), "
        f"{values['model_tflops_per_device.causal']:.1f} (causal), loss {values['loss']:.3f}"
    )


if __name__ == "__main__":
    sys.exit(main())
