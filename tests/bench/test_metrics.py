"""Metrics: closed forms, and the published figures they must reproduce."""

import pytest

from bench import metrics
from bench.hardware import ACCELERATORS, find_accelerator

DEEPSEEK_V3_MTP1_FULL = 291_853_541_376  # FLOPs per token at 4096 tokens, by the golden ledger
PUBLISHED_RATE = 5262.68  # tokens/s per GB300, TorchTitan announcement of October 2026


def published(dtype: str) -> dict[str, metrics.MetricValue]:
    """Return the efficiency of the published DeepSeek V3 run."""
    return metrics.efficiency(
        PUBLISHED_RATE,
        {"full": DEEPSEEK_V3_MTP1_FULL, "causal": 260_647_919_616},
        dtype=dtype,
        peak_tflops=find_accelerator("GB300").peak_tflops,
        no_peak="none",
    )


def test_the_published_deepseek_v3_rate_gives_the_published_tflops():
    """5262.68 tokens/s per device were published as 1535.93 TFLOPS per device."""
    assert metrics.model_tflops(PUBLISHED_RATE, DEEPSEEK_V3_MTP1_FULL) == pytest.approx(
        1535.93, abs=0.005
    )


def test_mfu_names_its_denominator():
    """1535.93 of 2500 TFLOPS (BF16) is 61.44 %, of 5000 (MXFP8) 30.7 %."""
    values = published("mxfp8")

    assert values["mfu_bf16.full"].value == pytest.approx(61.44, abs=0.005)
    assert values["mfu.full"].value == pytest.approx(30.72, abs=0.005)
    assert values["mfu.full"].details == {"peak_dtype": "mxfp8", "peak_tflops": 5000}
    assert values["mfu_bf16.full"].details == {"peak_dtype": "bf16", "peak_tflops": 2500}


def test_the_causal_convention_of_the_same_run_is_lower():
    """1371.7 TFLOPS and 54.9 % of BF16 by 260.648 GFLOP per token."""
    values = published("mxfp8")

    assert values["model_tflops_per_device.causal"].value == pytest.approx(1371.7, abs=0.05)
    assert values["mfu_bf16.causal"].value == pytest.approx(54.87, abs=0.005)


def test_the_published_muse_spark_mfu():
    """813,168 tokens/s on 512 GB300 at 585.114 GFLOP per token were published as 37.17 %."""
    tflops = metrics.model_tflops(813_168 / 512, 585.114e9)
    value = metrics.mfu("mfu.full", tflops, {"bf16": 2500}, "bf16", no_peak="none")

    assert value.value == pytest.approx(37.17, abs=0.005)


def test_an_mfu_over_100_percent_is_invalid():
    """A 2024 report had 201.71 %: the peak fell back to another device's."""
    value = metrics.mfu("mfu.full", 629.3, {"bf16": 312}, "bf16", no_peak="none")

    assert value.value is None
    assert value.invalid is not None
    assert "201.7 %" in value.invalid


def test_an_mfu_without_a_peak_is_invalid_with_the_reason():
    value = metrics.mfu("mfu.full", 1.0, {}, "bf16", no_peak="no data sheet is known")

    assert (value.value, value.invalid) == (None, "no data sheet is known")


def test_an_mfu_of_an_unknown_dtype_is_invalid():
    value = metrics.mfu("mfu.full", 1.0, {"bf16": 2.0}, None, no_peak="")

    assert value.value is None
    assert value.invalid


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ({"compute": "bfloat16", "quantization": "none"}, "bf16"),
        ({"compute": "float32"}, "fp32"),
        ({"compute": "bfloat16", "quantization": "mxfp8"}, "mxfp8"),
        ({"quantization": "fp8"}, "fp8"),
        ({}, None),
    ],
)
def test_the_dtype_of_the_matrix_products(precision, dtype):
    assert metrics.matmul_dtype(precision) == dtype


def test_step_time_is_the_median_and_rates_follow_from_it():
    """Times 1, 2, 4, 8 s: median 3 s; 600 tokens in 3 s over 2 devices is 100 tokens/s each."""
    values = metrics.speed([4.0, 1.0, 8.0, 2.0], tokens_per_step=600, num_devices=2)

    assert values["step_time"].value == 3.0
    assert values["step_time"].samples == [4.0, 1.0, 8.0, 2.0]
    assert values["tokens_per_second"].value == 200.0
    assert values["tokens_per_second_per_device"].value == 100.0
    assert values["tokens_per_second"].samples == [150.0, 600.0, 75.0, 300.0]


def test_memory_is_the_largest_rank_in_gib():
    value = metrics.memory("peak_rss", [2**30, 3 * 2**30, 2**31])

    assert value.value == 3.0
    assert value.details == {"minimum": 1.0, "rank": 1}
    assert value.samples == [1.0, 3.0, 2.0]


def test_a_single_stage_has_no_bubble():
    assert metrics.bubble({"num_stages": 1, "bubble_percent": 0.0}).value == 0.0


def test_a_bubble_says_what_it_was_computed_from():
    pipeline = {"num_stages": 4, "bubble_percent": 12.5, "schedule": "1F1B", "durations": "FLOPs"}

    bubble = metrics.bubble(pipeline)

    assert bubble.value == 12.5
    assert bubble.details == {"schedule": "1F1B", "durations": "FLOPs", "pipeline_stages": 4}


def test_every_metric_has_a_name_a_unit_and_a_formula():
    assert all(name == metric.name for name, metric in metrics.METRICS.items())
    assert all(metric.unit and metric.title and metric.formula for metric in metrics._TABLE)
    assert len(metrics.METRICS) == len(metrics._TABLE)


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H200", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA GB300", 2500),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_devices_are_found_by_the_name_that_the_driver_gives(name, bf16):
    assert find_accelerator(name).peak_tflops["bf16"] == bf16


@pytest.mark.parametrize("name", ["NVIDIA H100", "nvidia gb300", "NVIDIA H20", "GB30", "CPU", ""])
def test_an_unknown_device_is_an_error_and_never_a_default(name):
    with pytest.raises(LookupError, match="no data sheet is known"):
        find_accelerator(name)


def test_no_name_means_two_devices():
    names = [name for accelerator in ACCELERATORS for name in accelerator.names]

    assert len(names) == len(set(names))


def test_dense_fp8_is_twice_bf16_wherever_a_data_sheet_has_both():
    """Sheets print sparse peaks, twice the dense: mixing the two up shows as a ratio of 4 or 1."""
    for accelerator in ACCELERATORS:
        if "fp8" in accelerator.peak_tflops:
            peaks = accelerator.peak_tflops
            assert peaks["fp8"] / peaks["bf16"] == pytest.approx(2, rel=0.01), accelerator.names
