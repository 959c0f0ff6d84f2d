"""Published results: each row's figures agree with each other and with the FLOPs per token."""

from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "workloads" / "published"

KEYS = {
    "run_id", "title", "source", "created", "hardware", "sequence_length", "global_batch_size",
    "precision", "plan", "routing", "mtp", "tokens_per_second", "tokens_per_second_per_device",
    "model_tflops_per_device", "mfu", "peak_memory_gib", "notes",
}  # fmt: skip

# FLOPs per token, by (file, sequence length, convention, MTP modules): from the configurations
# alone, 6 N of the active parameters and the attention products. "causal" is NVIDIA's: half the
# attention, no router.
FLOPS_PER_TOKEN = {
    ("deepseek_v3_671b", 4096, "full", 0): 281_158_232_064,
    ("deepseek_v3_671b", 4096, "full", 1): 291_853_541_376,
    ("deepseek_v3_671b", 4096, "causal", 0): 249.812e9,
    ("deepseek_v3_671b", 4096, "causal", 1): 259.993e9,
    ("muse_spark", 196_608, "full", 0): 585_114_304_512,
}

ROWS = [
    pytest.param(path.stem, row, id=row["run_id"])
    for path in sorted(FOLDER.glob("*.yaml"))
    for row in yaml.safe_load(path.read_text())
]


def test_both_flagship_workloads_have_their_announced_result():
    announced = {
        (file.values[0], file.values[1]["tokens_per_second"], file.values[1]["hardware"]["device"])
        for file in ROWS
    }

    assert {
        ("deepseek_v3_671b", 2_694_493, "GB300"),
        ("muse_spark", 813_168, "GB300"),
    } <= announced


@pytest.mark.parametrize(("file", "row"), ROWS)
def test_row_has_the_keys_of_the_format_and_a_source(file, row):
    assert set(row) == KEYS
    assert row["source"] and row["title"]
    assert row["hardware"]["num_devices"] >= 1
    assert all(isinstance(note, str) for note in row["notes"])


@pytest.mark.parametrize(("file", "row"), ROWS)
def test_tflops_follow_from_tokens_per_second(file, row):
    tflops = row["model_tflops_per_device"]
    if tflops is None:  # published in tokens/s alone
        return
    key = (file, row["sequence_length"], tflops["convention"], row["mtp"])
    expected = row["tokens_per_second_per_device"] * FLOPS_PER_TOKEN[key] / 1e12

    assert tflops["value"] == pytest.approx(expected, rel=0.005)


def test_announced_deepseek_tflops_follow_to_six_digits():
    row = next(row for _, row in (p.values for p in ROWS) if row["tokens_per_second"] == 2_694_493)

    tflops = row["tokens_per_second_per_device"] * 291_853_541_376 / 1e12

    assert tflops == pytest.approx(1535.93, abs=0.005)
    assert row["tokens_per_second_per_device"] == 5262.68
    assert row["model_tflops_per_device"] == {"value": 1535.93, "convention": "full"}


@pytest.mark.parametrize(("file", "row"), ROWS)
def test_global_tokens_per_second_is_that_of_all_devices(file, row):
    if row["tokens_per_second"] is not None:
        per_device = row["tokens_per_second"] / row["hardware"]["num_devices"]

        assert row["tokens_per_second_per_device"] == pytest.approx(per_device, abs=0.005)


def test_muse_spark_mfu_is_against_the_bf16_peak_of_a_gb300():
    row = yaml.safe_load((FOLDER / "muse_spark.yaml").read_text())[0]

    mfu = 100 * row["model_tflops_per_device"]["value"] / 2500

    assert row["mfu"] == {"value": 37.17, "convention": "full", "peak_dtype": "bf16"}
    assert mfu == pytest.approx(37.17, abs=0.005)


def test_run_ids_are_unique():
    ids = [parameter.id for parameter in ROWS]

    assert len(ids) == len(set(ids))
