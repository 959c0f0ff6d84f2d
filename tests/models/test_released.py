"""Parameters and FLOPs per token of the families with softmax attention, as released."""

import pytest
import torch
from msgspec.structs import replace

from models.deepseek_v2 import DEEPSEEK_V2_16B, DEEPSEEK_V2_236B
from models.deepseek_v3 import DEEPSEEK_V3_671B, DEEPSEEK_V3_671B_MTP1
from models.gpt_oss import GPT_OSS_20B, GPT_OSS_120B
from models.kimi_k2 import KIMI_K2_7
from models.llama3_1 import LLAMA3_1_8B, LLAMA3_1_70B, LLAMA3_1_405B
from models.muse_glimmer import MUSE_GLIMMER_30B
from models.muse_spark import MUSE_SPARK
from models.protocol import ModelConfig
from models.qwen3 import (
    QWEN3_1_7B,
    QWEN3_4B,
    QWEN3_8B,
    QWEN3_30B_A3B,
    QWEN3_32B,
    QWEN3_235B_A22B,
)
from tests.models.families import PROXIES
from tests.models.model_facts import LENGTHS, facts_of

RELEASED = {
    "deepseek_v3_671b": DEEPSEEK_V3_671B_MTP1,
    "gpt_oss_20b": GPT_OSS_20B,
    "gpt_oss_120b": GPT_OSS_120B,
    "kimi_k2_7": KIMI_K2_7,
    "llama3_1_8b": LLAMA3_1_8B,
    "llama3_1_70b": LLAMA3_1_70B,
    "llama3_1_405b": LLAMA3_1_405B,
    "muse_glimmer_30b": MUSE_GLIMMER_30B,
    "muse_spark_open_816b_a42b": MUSE_SPARK,
    "qwen3_30b_a3b": QWEN3_30B_A3B,
    "qwen3_235b_a22b": QWEN3_235B_A22B,
    # The text part of Qwen3-VL is Qwen3 with another rotation.
    "qwen3_vl_2b": QWEN3_1_7B,
    "qwen3_vl_4b": QWEN3_4B,
    "qwen3_vl_8b": QWEN3_8B,
    "qwen3_vl_32b": QWEN3_32B,
    "qwen3_vl_30b_a3b": QWEN3_30B_A3B,
    "qwen3_vl_235b_a22b": QWEN3_235B_A22B,
}
# Without a file of facts: the parameters of the released checkpoints (text part), and FLOPs per
# token at 4096 tokens in both conventions, from the equations of models.counts by hand.
GOLDEN = {
    "deepseek_v2_16b": (DEEPSEEK_V2_16B, 15_706_484_224),
    "deepseek_v2_236b": (DEEPSEEK_V2_236B, 235_741_434_880),
    "deepseek_v3_671b": (DEEPSEEK_V3_671B, 671_026_404_352),
    "gpt_oss_20b": (GPT_OSS_20B, 20_914_757_184),
    "gpt_oss_120b": (GPT_OSS_120B, 116_829_156_672),
    "kimi_k2_7": (KIMI_K2_7, 1_026_408_209_408),
    "llama3_1_8b": (LLAMA3_1_8B, 8_030_261_248),
    "llama3_1_70b": (LLAMA3_1_70B, 70_553_706_496),
    "llama3_1_405b": (LLAMA3_1_405B, 405_853_388_800),
    "muse_glimmer_30b": (MUSE_GLIMMER_30B, 27_854_780_928),
    "qwen3_1_7b": (QWEN3_1_7B, 1_720_574_976),
    "qwen3_4b": (QWEN3_4B, 4_022_468_096),
    "qwen3_8b": (QWEN3_8B, 8_190_735_360),
    "qwen3_32b": (QWEN3_32B, 32_762_123_264),
    "qwen3_30b_a3b": (QWEN3_30B_A3B, 30_532_122_624),
    "qwen3_235b_a22b": (QWEN3_235B_A22B, 235_093_634_560),
}


def meta_parameters(config: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in config.build().parameters())


@pytest.mark.parametrize("name", GOLDEN)
def test_a_preset_has_exactly_the_released_parameters(name: str) -> None:
    """The network on the meta device and the count from the configuration alone."""
    config, parameters = GOLDEN[name]

    assert meta_parameters(config) == config.counts().total == parameters


@pytest.mark.parametrize("name", PROXIES)
def test_the_count_of_a_proxy_is_that_of_its_network(name: str) -> None:
    assert PROXIES[name].counts().total == meta_parameters(PROXIES[name])


@pytest.mark.parametrize("name", RELEASED)
def test_parts_and_active_parameters_are_those_of_the_facts(name: str) -> None:
    facts, counts = facts_of(name), RELEASED[name].counts()

    assert counts.total == facts["params_text"] + facts["params_mtp"]
    assert counts.embedding == facts["params_embed"]
    assert counts.layers == facts["params_layers"]
    assert counts.active_layers == facts["active_layers"]
    assert counts.mtp == facts["params_mtp"]
    assert counts.active == facts["active_no_embed"] + facts["active_mtp"]


@pytest.mark.parametrize("name", RELEASED)
@pytest.mark.parametrize("sequence_length", LENGTHS)
def test_full_flops_are_golden_and_causal_halves_what_has_no_window(
    name: str, sequence_length: int
) -> None:
    """`full` from the facts; `causal` by taking half of the full layers' attention off, by hand."""
    facts, ledger = facts_of(name), RELEASED[name].flops_per_token(sequence_length)
    num_full = len(facts["full_attn_layers_0based"])
    num_windowed = facts["n_layers"] - num_full
    width = facts["n_heads"] * (
        facts["qk_nope_head_dim"] + facts["qk_rope_head_dim"] + facts["v_head_dim"]
        if "v_head_dim" in facts
        else 2 * facts["head_dim"]
    )

    assert ledger.full == facts[f"flops_per_token_s{sequence_length}"]
    # All lengths are more than twice as long as a window: causality takes none of its keys away.
    num_full += facts["n_mtp"] if facts["params_mtp"] else 0
    assert ledger.full - ledger.causal == 6 * num_full * width * sequence_length // 2
    assert ledger.terms["head"].full == 6 * facts["params_lm_head"]
    windowed = 6 * num_windowed * width * facts.get("window", 0)
    assert sum(t.full for n, t in ledger.terms.items() if n == "attention_window") == windowed


@pytest.mark.parametrize(
    ("config", "sequence_length", "tokens_per_second", "tflops"),
    [
        # TorchTitan's published rates of Llama 3.1 and the TFLOPS that it prints for them.
        (LLAMA3_1_8B, 8192, 5762, 333.7),
        (LLAMA3_1_70B, 8192, 829, 399.1),
        (LLAMA3_1_405B, 8192, 128, 336.1),
    ],
)
def test_published_rates_give_the_published_tflops(
    config: ModelConfig, sequence_length: int, tokens_per_second: float, tflops: float
) -> None:
    found = tokens_per_second * config.flops_per_token(sequence_length).full / 1e12

    assert found == pytest.approx(tflops, abs=0.1)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama3_1", {"num_heads": 3}, "3 query heads do not share 2 key/value heads"),
        ("llama3_1", {"head_dim": 33}, "rotated in pairs: 33 is odd"),
        ("qwen3_dense", {"num_experts_per_token": 2}, "2 experts per token of a dense network"),
        ("qwen3", {"num_experts_per_token": 17}, "17 experts per token out of the 16"),
        ("gpt_oss", {"window": 0}, "window 0 must be at least 1"),
        ("muse_glimmer", {"full_attention_interval": 0}, "interval 0 must be at least 1"),
        ("kimi_k2", {"num_dense_layers": 4}, "4 dense layers out of 3"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(
    name: str, change: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(PROXIES[name], **change)
