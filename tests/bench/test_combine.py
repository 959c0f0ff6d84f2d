"""From rank files to a record, with rank files written by hand."""

from pathlib import Path

import msgspec
import pytest

from bench.combine import combine
from bench.launch.local import Outcome
from bench.rank_report import RANKS_FOLDER, RankReport, StepRow, append_step, write_report
from bench.record import Failure, RunRecord, encode
from bench.resolve import resolve
from bench.spec import RunSpec
from bench.steps import Step

GIB = 2**30
SPEC = RunSpec(workload="deepseek_v3_proxy", ranks=2, device="cpu", threads=1, set=["plan.ep=2"])
# by rank: the times of a warm-up step and of three measured ones
TIMES = [[9.0, 1.0, 2.0, 4.0], [9.5, 2.0, 1.0, 3.0]]
PEAK = {"float32": 0.1, "bfloat16": 0.2, "how": "measured here"}


def row(step: int, step_time: float, *, phase: str = "measured") -> StepRow:
    return StepRow(
        step=step,
        phase=phase,
        step_time=step_time,
        loss=6.0 - step,
        mtp_loss=7.0 - step,
        grad_norm=1.0,
        tokens=1000,
        padding=24,
        targets=990,
    )


def instruments(rank: int) -> dict[str, object]:
    return {
        "memory": {"peak_tensor_bytes": (rank + 1) * GIB, "peak_rss_bytes": 3 * GIB},
        "collectives": {"ep": {"all_to_all": {"count": 8, "bytes": 100 + rank}}},
        "operators": {
            "count": 500,
            "executed_flops": 10**9 + rank,
            "by_operator": {"aten::mm": 5},
            "flops_by_operator": {"aten::mm": 10**9 + rank},
            "recomputed_flops_by_operator": {"aten::mm": 7} if rank else {},
        },
        "peak": PEAK,
        "pipeline": {"num_stages": 1, "bubble_percent": 0.0},
    }


def run_folder(tmp_path: Path, *, device: str = "cpu", **without: object) -> Path:
    """Write what two ranks hand in; ``without`` replaces instruments, None removes one."""
    (tmp_path / RANKS_FOLDER).mkdir()
    for rank in range(2):
        for step, time in enumerate(TIMES[rank]):
            append_step(tmp_path, rank, row(step, time, phase="measured" if step else "warmup"))
        parts = {k: v for k, v in {**instruments(rank), **without}.items() if v is not None}
        report = RankReport(
            rank=rank,
            device=device,
            instruments=parts,
            kernels={"mxfp8": "emulated"},
            data={"source": "text"},
            environment={"threads": 1},
        )
        write_report(tmp_path, report)
    return tmp_path


def combined(folder: Path, *, outcome: Outcome | None = None, spec: RunSpec = SPEC) -> RunRecord:
    record = combine(
        folder,
        spec=spec,
        workload=resolve(spec),
        outcome=outcome or Outcome(status="ok"),
        created="2026-12-01T00:00:00+00:00",
        environment={"python": "3"},
    )
    assert encode(record)
    return record


def test_the_step_time_is_the_median_of_the_slowest_rank_per_step(tmp_path):
    """Slowest per measured step: 2, 2 and 4 s; no rank on its own has this median and maximum."""
    metrics = combined(run_folder(tmp_path)).metrics

    assert metrics["step_time"].samples == [2.0, 2.0, 4.0]
    assert metrics["step_time"].value == 2.0


def test_tokens_are_those_of_all_ranks_without_padding(tmp_path):
    metrics = combined(run_folder(tmp_path)).metrics

    assert metrics["tokens_per_second"].value == 2000 / 2.0
    assert metrics["tokens_per_second_per_device"].value == 500.0


def test_flops_and_mfu_follow_from_the_models_ledger_and_the_measured_peak(tmp_path):
    record = combined(run_folder(tmp_path))
    ledger = resolve(SPEC).model.flops_per_token(record.workload.sequence_length)
    tflops = 500.0 * ledger.full / 1e12

    assert record.flops.per_token == {"full": ledger.full, "causal": ledger.causal}
    assert sum(term["full"] for term in record.flops.terms.values()) == ledger.full
    assert record.metrics["model_tflops_per_device.full"].value == pytest.approx(tflops)
    assert record.metrics["mfu_bf16.full"].value == pytest.approx(100 * tflops / 0.2)
    assert record.hardware.peak_source == "measured here"


def test_a_cpu_has_no_mxfp8_peak_and_says_so(tmp_path):
    """The proxy quantizes to MXFP8, which a CPU emulates."""
    value = combined(run_folder(tmp_path)).metrics["mfu.full"]

    assert value.value is None
    assert value.invalid is not None
    assert "mxfp8" in value.invalid


def test_a_cpus_memory_stands_under_its_own_names(tmp_path):
    metrics = combined(run_folder(tmp_path)).metrics

    assert metrics["peak_tensor_memory"].value == 2.0
    assert metrics["peak_tensor_memory"].details == {"minimum": 1.0, "rank": 1}
    assert metrics["peak_rss"].value == 3.0
    for name in ("peak_memory_allocated", "peak_memory_reserved"):
        assert metrics[name].value is None
        assert "no caching allocator" in str(metrics[name].invalid)


def test_an_unknown_accelerator_makes_mfu_invalid_and_nothing_else(tmp_path):
    folder = run_folder(tmp_path, device="NVIDIA Z900", peak=None)
    record = combined(folder)

    for name in ("mfu.full", "mfu.causal", "mfu_bf16.full", "mfu_bf16.causal"):
        assert record.metrics[name].value is None
        assert "'NVIDIA Z900'" in str(record.metrics[name].invalid)
    assert record.metrics["tokens_per_second"].value == 1000.0


def test_a_known_accelerator_brings_its_data_sheet(tmp_path):
    record = combined(run_folder(tmp_path, device="NVIDIA GB300", peak=None))

    assert record.hardware.peak_tflops["mxfp8"] == 5000
    assert record.metrics["mfu.full"].value is not None


def test_instruments_that_were_off_leave_their_metrics_invalid(tmp_path):
    record = combined(run_folder(tmp_path, memory={}, operators=None, collectives=None))

    assert record.counters == {}
    assert record.metrics["peak_tensor_memory"].value is None
    assert record.metrics["exposed_communication"].value is None


def test_exposed_communication_is_the_largest_share(tmp_path):
    profiler = {"trace": "traces/rank0.json.gz", "exposed_communication_percent": 12.5}
    value = combined(run_folder(tmp_path, profiler=profiler)).metrics["exposed_communication"]

    assert value.value == 12.5


def test_counters_are_the_largest_over_the_ranks_and_flops_by_operator_their_sum(tmp_path):
    assert combined(run_folder(tmp_path)).counters == {
        "collectives": {"ep": {"all_to_all": {"count": 8, "bytes": 101}}},
        "operators": 500,
        "executed_flops": 10**9 + 1,
        "by_operator": {"aten::mm": 5},
        "flops_by_operator": {"aten::mm": 2 * 10**9 + 1},
        "recomputed_flops_by_operator": {"aten::mm": 7},
        "peak_tensor_bytes": 2 * GIB,
    }


def test_the_loss_is_the_last_measured_one(tmp_path):
    metrics = combined(run_folder(tmp_path)).metrics

    assert (metrics["loss"].value, metrics["loss"].samples) == (3.0, [5.0, 4.0, 3.0])
    assert metrics["mtp_loss"].value == 4.0


def test_the_combined_steps_lie_beside_the_record(tmp_path):
    combined(run_folder(tmp_path))
    lines = (tmp_path / "steps.jsonl").read_bytes().splitlines()
    steps = [msgspec.json.decode(line, type=Step) for line in lines]

    assert [step.phase for step in steps] == ["warmup", "measured", "measured", "measured"]
    assert [step.slowest_rank for step in steps] == [1, 1, 0, 0]
    assert steps[0].tokens == 2000


def test_a_failed_run_keeps_its_steps_and_has_no_metrics(tmp_path):
    folder = run_folder(tmp_path)
    (folder / RANKS_FOLDER / "rank1.json").unlink()
    failure = Failure(rank=1, error="RuntimeError: out of luck")
    record = combined(folder, outcome=Outcome(status="failed", failure=failure))

    assert (record.status, record.failure) == ("failed", failure)
    assert record.metrics == {}
    assert len((folder / "steps.jsonl").read_bytes().splitlines()) == 4


def test_a_run_that_failed_before_its_first_step_has_a_record_too(tmp_path):
    failure = Failure(rank=0, error="ImportError: no torch")
    record = combined(tmp_path, outcome=Outcome(status="failed", failure=failure))

    assert record.failure == failure
    assert record.hardware.num_devices == 2


def test_a_rank_that_ends_well_without_a_report_is_a_failure(tmp_path):
    folder = run_folder(tmp_path)
    (folder / RANKS_FOLDER / "rank1.json").unlink()
    record = combined(folder)

    assert record.status == "failed"
    assert record.failure is not None
    assert record.failure.rank == 1
