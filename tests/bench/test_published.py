"""Published results as records: what is stated stays, the rest follows by our ledger."""

import pytest

from bench.errors import UsageError
from bench.published import published_records, read_published, write_published
from bench.record import RunRecord, encode


def record(reference: str, run_id: str) -> RunRecord:
    return next(r for r in published_records(reference) if r.run_id == run_id)


def test_the_published_deepseek_v3_run_is_explained_to_six_digits():
    found = record("deepseek_v3_671b", "published-torchtitan-2026-10-gb300-mxfp8")
    tflops = found.metrics["model_tflops_per_device.full"]

    assert found.flops.per_token["full"] == 291_853_541_376
    assert tflops.value == 1535.93
    assert tflops.details["origin"] == "stated"
    assert tflops.details["ledger"] == pytest.approx(1535.93, abs=0.005)
    assert found.metrics["mfu_bf16.full"].value == pytest.approx(61.44, abs=0.005)
    assert found.metrics["mfu.full"].value == pytest.approx(30.72, abs=0.005)
    assert found.metrics["mfu.full"].details["origin"] == "derived"


def test_rows_without_mtp_are_counted_without_it():
    found = record("deepseek_v3_671b", "published-megatron-bridge-25.11-gb300-mxfp8")

    assert found.flops.per_token["full"] == 281_158_232_064


def test_nvidia_counts_causally_and_leaves_out_the_router():
    """By our ledger its rows come out 0.3 % higher: the router's FLOPs."""
    for found in published_records("deepseek_v3_671b"):
        tflops = found.metrics["model_tflops_per_device.causal"]
        if "megatron-bridge" in found.run_id:
            assert tflops.details["origin"] == "stated"
            assert tflops.details["ledger"] == pytest.approx(tflops.value, rel=0.006)


def test_the_published_muse_spark_run_is_explained():
    (found,) = published_records("muse_spark")

    assert found.flops.per_token["full"] == pytest.approx(585.114e9, rel=1e-5)
    assert found.metrics["mfu_bf16.full"].value == 37.17
    assert found.metrics["mfu_bf16.full"].details["ledger"] == pytest.approx(37.17, abs=0.005)
    assert found.metrics["tokens_per_second"].value == 813_168


def test_what_a_source_does_not_state_is_no_number():
    """The MaxText row states no precision, so nothing can be said against that dtype's peak."""
    found = record("deepseek_v3_671b", "published-maxtext-v5p")

    assert found.metrics["mfu.full"].value is None
    assert found.metrics["mfu_bf16.full"].value == pytest.approx(33.2, abs=0.05)


def test_no_reference_means_no_published_results_and_an_unknown_one_is_an_error():
    assert published_records("") == []
    with pytest.raises(UsageError, match="cannot read published results"):
        published_records("gpt_5")


def test_records_are_kept_with_a_run(tmp_path):
    records = published_records("muse_spark")
    write_published(records, tmp_path)

    assert read_published(tmp_path) == records
    assert all(encode(found) for found in records)


def test_a_run_without_published_results_has_none(tmp_path):
    assert read_published(tmp_path) == []
