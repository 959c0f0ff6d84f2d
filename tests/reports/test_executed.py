"""Counted FLOPs in the waterfall: a bar of its own for each class, by a pencil, adding up."""

import msgspec
import pytest

from reports.bars import Bar, counted_bars
from reports.executed import Executed, executed
from reports.run_traces import read_traces
from reports.waterfall import run_waterfall
from tests.reports.sample_records import measured_record
from tests.reports.sample_traces import balanced

MODEL_MS = {"matrix products": 6.0, "attention": 3.0, "head and loss": 1.0}
TIMES = {
    "gemm": 10.0,
    "grouped_gemm": 5.0,
    "attention": 4.0,
    "embedding_loss": 3.0,
    "norm_pointwise": 2.0,
}
RECOMPUTE = Bar(label="recomputation", ms=1.5, kind="compute", source="")


def record(**counters):
    """Two ranks that compute 1000 model FLOPs a step: at the peak 10 ms, so 0.01 ms a FLOP."""
    one = measured_record(quantization="none")
    replace = msgspec.structs.replace
    return replace(
        one,
        workload=replace(one.workload, tokens_per_step=10),
        flops=replace(one.flops, per_token={"full": 100.0, "causal": 90.0}),
        counters={
            "flops_by_operator": {
                "aten::mm": 800,
                "titanbench::grouped_mm": 200,
                "titanbench::attention": 200,
            },
            "recomputed_flops_by_operator": {"aten::mm": 100},
        }
        | counters,
    )


def test_the_heads_product_counts_where_its_time_is_and_recomputation_does_not() -> None:
    assert executed(record(), MODEL_MS) == Executed(
        by_class={
            "gemm": pytest.approx(6.0),
            "grouped_gemm": pytest.approx(2.0),
            "attention": pytest.approx(2.0),
            "embedding_loss": pytest.approx(1.0),
        },
        beyond={"matrix products": pytest.approx(2.0), "attention": pytest.approx(-1.0)},
    )


def test_gemm_and_grouped_gemm_have_bars_of_their_own() -> None:
    counted = executed(record(), MODEL_MS)
    assert counted is not None
    bars = {bar.label: bar.ms for bar in counted_bars(TIMES, counted, RECOMPUTE, None)}

    assert bars == {
        "gemm below peak": pytest.approx(4.0),
        "grouped gemm below peak": pytest.approx(3.0),
        "attention below peak": pytest.approx(2.0),
        "head and loss below peak": pytest.approx(2.0),
        "norm pointwise": 2.0,
        "recomputation": 1.5,
        "non-model FLOPs": pytest.approx(2.0),
        "attention not executed": pytest.approx(-1.0),
    }


@pytest.mark.parametrize("padding", [None, 0.0, 0.1, 0.7])
def test_model_flops_and_the_bars_add_up_to_all_computation(padding: float | None) -> None:
    counted = executed(record(), MODEL_MS)
    assert counted is not None
    bars = counted_bars(TIMES, counted, RECOMPUTE, padding)

    whole = sum(TIMES.values()) + RECOMPUTE.ms
    assert sum(MODEL_MS.values()) + sum(bar.ms for bar in bars) == pytest.approx(whole, rel=1e-12)


def test_padding_takes_its_share_of_the_products_time_from_all_their_bars() -> None:
    counted = executed(record(), MODEL_MS)
    assert counted is not None
    bars = {bar.label: bar.ms for bar in counted_bars(TIMES, counted, RECOMPUTE, 0.1)}

    assert bars["padding"] == pytest.approx(0.1 * (10 + 5 + 4 + 3))
    assert bars["gemm below peak"] == pytest.approx(0.9 * 4)
    assert bars["non-model FLOPs"] == pytest.approx(2.0 - 0.1 * 9)


def test_linear_attention_without_counted_flops_executes_the_models() -> None:
    model_ms = {
        "matrix products": 4.0,
        "linear attention": 2.0,
        "attention": 3.0,
        "head and loss": 1,
    }
    counted = executed(record(), model_ms)

    assert counted is not None
    assert counted.by_class["linear_attention"] == 2.0
    assert counted.beyond["matrix products"] == pytest.approx(2.0 + 2.0)


def test_without_flops_by_operator_nothing_is_said_of_classes() -> None:
    assert executed(record(flops_by_operator=None), MODEL_MS) is None
    assert executed(record(recomputed_flops_by_operator=None), MODEL_MS) is None


def test_a_class_faster_than_the_peak_is_a_correction_and_not_hidden() -> None:
    counted = executed(record(), MODEL_MS)
    assert counted is not None
    bars = counted_bars({**TIMES, "grouped_gemm": 0.5}, counted, RECOMPUTE, None)
    above = next(bar for bar in bars if bar.label == "grouped gemm above peak")

    assert (above.ms, above.kind) == (pytest.approx(-1.5), "correction")


def test_the_waterfall_of_a_run_with_counted_flops_adds_up_to_its_step(tmp_path) -> None:
    traces = read_traces([balanced(tmp_path / "traces")], num_workers=1)
    counters = {
        "flops_by_operator": {"aten::mm": 90_000_000_000},
        "recomputed_flops_by_operator": {},
    }
    one = msgspec.structs.replace(measured_record(quantization="none"), counters=counters)
    waterfall = run_waterfall(one, traces)
    bars = {bar.label: bar.ms for bar in waterfall.bars}

    assert sum(bars.values()) == pytest.approx(waterfall.total_ms, rel=1e-12)
    assert waterfall.total_ms == 1e3 * one.metrics["step_time"].value
    assert bars["rest"] == pytest.approx(0.0, abs=1e-9)
