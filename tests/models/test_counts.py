"""Parameter counts and FLOPs per token against released checkpoints and published results."""

import pytest
import torch
from msgspec.structs import replace

from models.counts import AttentionLayers, attention_term
from models.deepseek_v3 import (
    DEEPSEEK_V3_671B,
    DEEPSEEK_V3_671B_MTP1,
    DEEPSEEK_V3_DEBUG,
    DEEPSEEK_V3_PROXY,
)
from models.muse_spark import MUSE_SPARK, MUSE_SPARK_PROXY
from models.protocol import ModelConfig

PRESETS = {
    "deepseek_v3_671b": DEEPSEEK_V3_671B,
    "deepseek_v3_671b_mtp1": DEEPSEEK_V3_671B_MTP1,
    "deepseek_v3_debug": DEEPSEEK_V3_DEBUG,
    "deepseek_v3_proxy": DEEPSEEK_V3_PROXY,
    "muse_spark": MUSE_SPARK,
    "muse_spark_proxy": MUSE_SPARK_PROXY,
}


def meta_parameters(config: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in config.build().parameters())


@pytest.mark.parametrize("name", PRESETS)
def test_counts_from_the_config_equal_those_of_the_network(name: str) -> None:
    assert PRESETS[name].counts().total == meta_parameters(PRESETS[name])


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("deepseek_v3_671b", 671_026_404_352),
        ("deepseek_v3_671b_mtp1", 671_026_404_352 + 11_610_067_968),
        ("deepseek_v3_debug", 33_014_016),
        ("muse_spark", 819_990_536_192),
    ],
)
def test_the_networks_have_the_parameters_of_the_released_ones(name: str, parameters: int) -> None:
    assert meta_parameters(PRESETS[name]) == parameters


def test_active_parameters_are_the_published_37b_and_42b() -> None:
    deepseek = DEEPSEEK_V3_671B.counts()

    assert deepseek.active == 36_625_603_584
    assert deepseek.active + deepseek.embedding == 37_552_282_624
    assert MUSE_SPARK.counts().active_layers == 42_780_753_920


@pytest.mark.parametrize(
    ("config", "sequence_length", "full", "causal"),
    [
        (DEEPSEEK_V3_671B, 4096, 281_158_232_064, 250_455_926_784),
        (DEEPSEEK_V3_671B_MTP1, 4096, 291_853_541_376, 260_647_919_616),
        (MUSE_SPARK, 196_608, 585_114_304_512, 430_495_481_856),
    ],
)
def test_flops_per_token_are_the_golden_ones(
    config: ModelConfig, sequence_length: int, full: int, causal: int
) -> None:
    ledger = config.flops_per_token(sequence_length)

    assert (ledger.full, ledger.causal) == (full, causal)


def test_flops_of_the_debug_size_with_mtp_are_those_of_torchtitan_pull_request_4300() -> None:
    config = replace(DEEPSEEK_V3_DEBUG, num_mtp_layers=1)

    assert config.flops_per_token(4096).full == 1_077_436_416


def test_published_deepseek_v3_tflops_follow_from_its_tokens_per_second() -> None:
    tflops = 5262.68 * DEEPSEEK_V3_671B_MTP1.flops_per_token(4096).full / 1e12

    assert round(tflops, 2) == 1535.93


def test_published_muse_spark_tflops_and_mfu_follow_from_its_tokens_per_second() -> None:
    tflops = 813_168 / 512 * MUSE_SPARK.flops_per_token(196_608).full / 1e12

    assert tflops == pytest.approx(929.33, rel=1e-4)
    assert round(100 * tflops / 2500, 2) == 37.17


def test_a_window_longer_than_the_sequence_counts_as_the_sequence() -> None:
    layers = AttentionLayers(num_layers=1, num_heads=1, qk_head_dim=1, v_head_dim=1, window=2048)

    term = attention_term(layers, 1024)

    assert (term.full, term.causal) == (6 * 2 * 1024, 6 * 2 * 512)


def test_an_odd_sequence_length_is_refused() -> None:
    with pytest.raises(ValueError, match="even and positive, not 4095"):
        DEEPSEEK_V3_671B.flops_per_token(4095)


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (DEEPSEEK_V3_671B, {"num_expert_groups": 7}, "256 experts do not divide into 7 groups"),
        (DEEPSEEK_V3_671B, {"num_experts_per_token": 200}, "200 experts per token out of the 128"),
        (DEEPSEEK_V3_671B, {"num_dense_layers": 62}, "62 dense layers out of 61"),
        (DEEPSEEK_V3_671B, {"qk_rope_head_dim": 63}, r"must be even, not \(512, 128, 63\)"),
        (MUSE_SPARK, {"num_kv_heads": 24}, "128 query heads do not share 24"),
        (MUSE_SPARK, {"window": 0}, "window 0"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_and_named(
    config: ModelConfig, change: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(config, **change)


def test_an_unknown_routing_is_refused() -> None:
    with pytest.raises(ValueError, match="learned, balanced, balanced_strided, random, not 'even'"):
        DEEPSEEK_V3_PROXY.build("even")
