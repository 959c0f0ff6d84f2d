"""The waterfall: it adds up, begins with the record's MFU, and says why where it cannot."""

import msgspec
import pytest

from bench.record import read_record
from reports.load import read_steps
from reports.run_traces import read_traces
from reports.waterfall import REST, flops_by_part, padding_share, run_waterfall, trace_waterfall
from tests.reports.sample_records import measured_record, step_rows, write_run
from tests.reports.sample_traces import balanced, late


@pytest.fixture
def traces(tmp_path):
    return read_traces([late(tmp_path / "traces")], num_workers=1)


def run_of(tmp_path, **changes):
    record = msgspec.structs.replace(measured_record(quantization="none"), **changes)
    return write_run(tmp_path / "runs", record)


def test_bars_of_a_run_add_up_to_its_measured_step(tmp_path, traces):
    folder = run_of(tmp_path)
    record = read_record(folder)
    waterfall = run_waterfall(record, traces, read_steps(folder))

    assert waterfall.total_ms == 1e3 * record.metrics["step_time"].value
    assert sum(bar.ms for bar in waterfall.bars) == pytest.approx(waterfall.total_ms, rel=1e-12)


def test_first_bar_is_the_mfu_of_the_record(tmp_path, traces):
    record = read_record(run_of(tmp_path))
    waterfall = run_waterfall(record, traces)

    assert waterfall.mfu_percent == pytest.approx(record.metrics["mfu.full"].value)
    assert waterfall.bars[0].label == "model FLOPs at the peak"
    assert "full convention" in waterfall.basis and "bf16 peak" in waterfall.basis


def test_traces_alone_are_broken_down_with_the_reason(traces):
    waterfall = trace_waterfall(traces, "no record")
    bars = {bar.label: bar.ms for bar in waterfall.bars}

    assert waterfall.mfu_percent is None and waterfall.basis == "no record"
    assert waterfall.total_ms == 1.0
    assert bars["gemm"] == pytest.approx(0.3)
    assert bars["late ranks"] == pytest.approx(0.4)
    assert bars["communication, dp_shard"] == pytest.approx(0.2)
    assert bars["pipeline bubble"] == bars[REST] == 0.0


def test_a_run_without_a_peak_says_why(tmp_path, traces):
    record = measured_record()  # MXFP8 on a CPU: no peak for it, but one for BF16
    metrics = {
        name: metric for name, metric in record.metrics.items() if not name.startswith("mfu_bf16")
    }
    waterfall = run_waterfall(msgspec.structs.replace(record, metrics=metrics), traces)

    assert waterfall.mfu_percent is None
    assert "no mxfp8 peak is known" in waterfall.basis


def test_causality_tells_attention_inside_a_term():
    """MTP of 100 causal and 140 full has 80 of attention, since causality halves it."""
    parts = flops_by_part(
        {
            "linear": {"full": 60.0, "causal": 60.0},
            "attention": {"full": 100.0, "causal": 50.0},
            "head": {"full": 20.0, "causal": 20.0},
            "mtp": {"full": 140.0, "causal": 100.0},
            "linear_attention_state": {"full": 80.0, "causal": 80.0},
        }
    )

    assert parts == {
        "matrix products": pytest.approx(120 / 400),
        "attention": pytest.approx(180 / 400),
        "head and loss": pytest.approx(20 / 400),
        "linear attention": pytest.approx(80 / 400),
    }


def test_padding_is_its_share_of_what_the_products_lose(tmp_path):
    rows = [row | {"tokens": 1536, "padding": 512} for row in step_rows()]
    record = msgspec.structs.replace(measured_record(quantization="none"), counters={})
    folder = write_run(tmp_path, record, rows)
    steps = read_steps(folder)
    traces = read_traces([balanced(tmp_path / "traces", gemm_us=600.0)], num_workers=1)
    padded = {bar.label: bar.ms for bar in run_waterfall(record, traces, steps).bars}
    whole = {bar.label: bar.ms for bar in run_waterfall(record, traces).bars}

    assert padding_share(steps) == 0.25
    assert "padding" not in whole
    lost = whole["matrix products below peak"]
    assert padded["padding"] == pytest.approx(0.25 * lost)
    assert padded["matrix products below peak"] == pytest.approx(0.75 * lost)
