"""The families with grouped queries against transformers, with copied weights."""

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from models.gpt_oss import GptOssConfig
from models.llama3_1 import Llama31Config
from models.muse_glimmer import MuseGlimmerConfig
from models.protocol import ModelConfig
from models.qwen3 import Qwen3Config
from tests.models.helpers import build, pack
from tests.models.reference import DENSE, EXPERTS, TOP, Pair, compare, layer_pairs

transformers = pytest.importorskip("transformers")
from transformers.models.gpt_oss import modeling_gpt_oss  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402
from transformers.models.muse_glimmer import modeling_muse_glimmer  # noqa: E402
from transformers.models.qwen3 import modeling_qwen3  # noqa: E402
from transformers.models.qwen3_moe import modeling_qwen3_moe  # noqa: E402

PROJECTIONS = {f"attention.{name}_proj.weight": f"self_attn.{name}_proj.weight" for name in "qkvo"}
BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    "feed_forward_norm.weight": "post_attention_layernorm.weight",
    **PROJECTIONS,
}
QWEN3 = {
    **BLOCK,
    "attention.query_norm.weight": "self_attn.q_norm.weight",
    "attention.key_norm.weight": "self_attn.k_norm.weight",
}
GLIMMER = {
    **PROJECTIONS,
    **DENSE,
    "attention.gate_proj.weight": "self_attn.gate_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "attention_post_norm.weight": "post_attention_layernorm.weight",
    "feed_forward_norm.weight": "pre_feedforward_layernorm.weight",
    "feed_forward_post_norm.weight": "post_feedforward_layernorm.weight",
}
GPT_OSS = {
    **BLOCK,
    **{f"attention.{name}_proj.bias": f"self_attn.{name}_proj.bias" for name in "qkv"},
    "attention.output_bias": "self_attn.o_proj.bias",
    "attention.core.sinks": "self_attn.sinks",
    "feed_forward.router.weight": "mlp.router.weight",
    "feed_forward.router.bias": "mlp.router.bias",
    "feed_forward.experts.gate_up": "mlp.experts.gate_up_proj",
    "feed_forward.experts.gate_up_bias": "mlp.experts.gate_up_proj_bias",
    "feed_forward.experts.down": "mlp.experts.down_proj",
    "feed_forward.experts.down_bias": "mlp.experts.down_proj_bias",
}
SIZES = {"vocab_size": 96, "dim": 48, "num_layers": 4, "num_heads": 4, "head_dim": 16}
BATCH = pack([[150], [150]], 96)


def arguments(config: ModelConfig, **more: object) -> dict[str, object]:
    """What the configurations of transformers have in common."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": 8192,
        "pad_token_id": None,
        "attn_implementation": "eager",
        **more,
    }


def all_layers(names: dict[str, str], **converts: object) -> list[Pair]:
    pairs = [layer_pairs(layer, names, converts.get("converts")) for layer in range(4)]
    return TOP + [pair for layer in pairs for pair in layer]


def test_llama3_1_equals_transformers() -> None:
    """Frequencies of all three kinds: kept, stretched, between."""
    config = Llama31Config(**SIZES, num_kv_heads=2, hidden_dim=80, rope_original_context=64)
    reference = transformers.LlamaConfig(
        **arguments(config, intermediate_size=80),
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": config.rope_theta,
            "factor": config.rope_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )

    compare(build(config), modeling_llama.LlamaModel(reference), all_layers(BLOCK | DENSE), BATCH)


@pytest.mark.parametrize("tied", [False, True])
def test_qwen3_dense_equals_transformers(tied: bool) -> None:
    config = Qwen3Config(**SIZES, num_kv_heads=2, hidden_dim=80, tied=tied)
    reference = transformers.Qwen3Config(
        **arguments(config, intermediate_size=80),
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
    )

    compare(build(config), modeling_qwen3.Qwen3Model(reference), all_layers(QWEN3 | DENSE), BATCH)


def test_qwen3_mixture_equals_transformers() -> None:
    config = Qwen3Config(
        **SIZES, num_kv_heads=1, hidden_dim=24, num_experts=8, num_experts_per_token=3
    )
    reference = transformers.Qwen3MoeConfig(
        **arguments(config, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=3),
        norm_topk_prob=True,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
    )

    compare(
        build(config),
        modeling_qwen3_moe.Qwen3MoeModel(reference),
        all_layers(QWEN3 | EXPERTS),
        BATCH,
    )


def test_muse_glimmer_equals_transformers() -> None:
    """Both attention kinds, norms before and after, output gate, soft cap."""
    config = MuseGlimmerConfig(**SIZES, num_kv_heads=2, hidden_dim=80, window=40, query_scale=2.5)
    reference = transformers.models.muse_glimmer.MuseGlimmerTextConfig(
        **arguments(config, intermediate_size=80, eos_token_id=None, bos_token_id=None),
        sliding_window=config.window,
        qk_scale_factor=config.query_scale,
        output_multiplier=config.logit_scale,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
    )

    compare(
        build(config),
        modeling_muse_glimmer.MuseGlimmerTextModel(reference),
        all_layers(GLIMMER),
        BATCH,
        multiplier=config.logit_scale,
        cap=config.logit_soft_cap,
    )


def halves(gate_up: Tensor) -> Tensor:
    """Gate and up in turn (E,2F,...) to gate, then up."""
    return torch.cat([gate_up[:, ::2], gate_up[:, 1::2]], dim=1)


@pytest.mark.parametrize("limit", [7.0, 0.5])
def test_gpt_oss_equals_transformers(limit: float) -> None:
    """Sinks, windows, every bias, YaRN by fractions of a pair, experts clamped or not."""
    config = GptOssConfig(
        **SIZES,
        num_kv_heads=2,
        window=40,
        expert_hidden_dim=24,
        num_experts=8,
        num_experts_per_token=3,
        swiglu_limit=limit,
        rope_original_context=64,
    )
    reference = transformers.GptOssConfig(
        **arguments(config, intermediate_size=24, num_local_experts=8, num_experts_per_tok=3)
        | {"max_position_embeddings": 32 * 64},
        sliding_window=config.window,
        swiglu_limit=limit,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": config.rope_theta,
            "factor": config.rope_factor,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    )
    converts = {
        "feed_forward.experts.gate_up": lambda weight: halves(weight.transpose(1, 2)),
        "feed_forward.experts.gate_up_bias": halves,
        "feed_forward.experts.down": lambda weight: weight.transpose(1, 2),
    }

    compare(
        build(config),
        modeling_gpt_oss.GptOssModel(reference),
        all_layers(GPT_OSS, converts=converts),
        BATCH,
    )


def test_a_stretch_moves_the_result() -> None:
    """The counterpart: what the tests above compare depends on the scaling of the frequencies."""
    config = Llama31Config(**SIZES, num_kv_heads=2, hidden_dim=80, rope_original_context=64)
    plain = replace(config, rope_factor=1.0)

    sums = [build(c)(*BATCH).main_sum.item() for c in (config, plain)]

    assert abs(sums[0] - sums[1]) > 1e-3
