"""The DeepSeek and Muse Spark networks against transformers, with copied weights."""

import pytest
from msgspec.structs import replace
from torch import nn

from models.deepseek_v3 import DeepSeekV3Config
from models.muse_spark import MuseSparkConfig
from tests.models.helpers import build, pack
from tests.models.reference import DENSE, EXPERTS, TOP, compare, layer_pairs

transformers = pytest.importorskip("transformers")
from transformers.models.deepseek_v2 import modeling_deepseek_v2  # noqa: E402
from transformers.models.deepseek_v3 import modeling_deepseek_v3  # noqa: E402
from transformers.models.muse_spark import modeling_muse_spark  # noqa: E402

DEEPSEEK = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.kv_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attention.kv_up_proj.weight": "self_attn.kv_b_proj.weight",
    "attention.o_proj.weight": "self_attn.o_proj.weight",
    "feed_forward_norm.weight": "post_attention_layernorm.weight",
}
DEEPSEEK_Q_LATENT = {
    "attention.q_proj.0.weight": "self_attn.q_a_proj.weight",
    "attention.q_proj.1.weight": "self_attn.q_a_layernorm.weight",
    "attention.q_proj.2.weight": "self_attn.q_b_proj.weight",
}
DEEPSEEK_Q_DIRECT = {"attention.q_proj.weight": "self_attn.q_proj.weight"}
DEEPSEEK_SHARED = {
    "feed_forward.shared.gate_proj.weight": "mlp.shared_experts.gate_proj.weight",
    "feed_forward.shared.up_proj.weight": "mlp.shared_experts.up_proj.weight",
    "feed_forward.shared.down_proj.weight": "mlp.shared_experts.down_proj.weight",
}
MUSE = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.q_proj.weight": "self_attn.q_proj.weight",
    "attention.k_proj.weight": "self_attn.k_proj.weight",
    "attention.v_proj.weight": "self_attn.v_proj.weight",
    "attention.gate_proj.weight": "self_attn.gate_proj.weight",
    "attention.o_proj.weight": "self_attn.o_proj.weight",
    "attention_gate.weight": "post_attention_residual_gate.gate",
    "feed_forward_norm.weight": "pre_feedforward_layernorm.weight",
    "feed_forward.output_norm.weight": "mlp.experts.post_expert_norm.weight",
    "feed_forward.entry.0.weight": "mlp.pre_expert_proj.weight",
    "feed_forward.entry.1.weight": "mlp.pre_expert_norm.weight",
    "feed_forward.exit.weight": "mlp.post_expert_proj.weight",
    "feed_forward_post_norm.weight": "post_feedforward_layernorm.weight",
    "feed_forward_gate.weight": "post_feedforward_residual_gate.gate",
    **EXPERTS,
}

TINY = DeepSeekV3Config(
    vocab_size=96,
    dim=48,
    num_layers=3,
    num_dense_layers=1,
    num_heads=4,
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=12,
    dense_hidden_dim=80,
    expert_hidden_dim=24,
    num_experts=16,
    num_experts_per_token=3,
    num_shared_experts=2,
    num_expert_groups=4,
    num_limited_groups=2,
    route_scale=2.5,
    rope_factor=4.0,
    rope_original_context=64,
    loss_chunk_tokens=50,
)
KIMI_K2 = replace(
    TINY,
    num_experts=24,
    num_expert_groups=1,
    num_limited_groups=1,
    num_shared_experts=1,
    route_scale=2.827,
    norm_eps=1e-5,
    rope_theta=50_000.0,
    rope_factor=64.0,
)
SOFTMAX = replace(TINY, score_function="softmax", normalize_weights=False, rope_mscale=0.707)


def shared_arguments(config: DeepSeekV3Config) -> dict[str, object]:
    """What the configurations of both generations have in common."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.dense_hidden_dim,
        "moe_intermediate_size": config.expert_hidden_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "n_shared_experts": config.num_shared_experts,
        "n_routed_experts": config.num_experts,
        "routed_scaling_factor": config.route_scale,
        "kv_lora_rank": config.kv_lora_rank,
        "q_lora_rank": config.q_lora_rank or None,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "n_group": config.num_expert_groups,
        "topk_group": config.num_limited_groups,
        "num_experts_per_tok": config.num_experts_per_token,
        "first_k_dense_replace": config.num_dense_layers,
        "norm_topk_prob": config.normalize_weights,
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": int(config.rope_factor) * config.rope_original_context,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": config.rope_theta,
            "factor": config.rope_factor,
            "original_max_position_embeddings": config.rope_original_context,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": config.rope_mscale,
            "mscale_all_dim": config.rope_mscale,
        },
        "attn_implementation": "eager",
    }


def check_deepseek(config: DeepSeekV3Config, theirs: nn.Module) -> None:
    queries = DEEPSEEK_Q_LATENT if config.q_lora_rank else DEEPSEEK_Q_DIRECT
    sparse = DEEPSEEK | queries | EXPERTS | DEEPSEEK_SHARED
    pairs = TOP + layer_pairs(0, DEEPSEEK | queries | DENSE)
    pairs += layer_pairs(1, sparse) + layer_pairs(2, sparse)

    compare(build(config), theirs, pairs, pack([[150], [150]], config.vocab_size))


@pytest.mark.parametrize(
    "config",
    [TINY, replace(TINY, q_lora_rank=0, rope_mscale=0.7), KIMI_K2],
    ids=["latent", "direct", "kimi_k2"],
)
def test_deepseek_v3_and_kimi_k2_equal_transformers(config: DeepSeekV3Config) -> None:
    """Forward and gradients, with and without a query latent and groups, YaRN stretched."""
    reference = transformers.DeepseekV3Config(**shared_arguments(config), num_mtp_layers=0)

    check_deepseek(config, modeling_deepseek_v3.DeepseekV3Model(reference))


@pytest.mark.parametrize(
    ("config", "method"),
    [
        (replace(SOFTMAX, num_group_votes=1), "group_limited_greedy"),
        (replace(SOFTMAX, q_lora_rank=0, num_expert_groups=1, num_limited_groups=1), "greedy"),
    ],
    ids=["236b", "16b"],
)
def test_deepseek_v2_equals_transformers(config: DeepSeekV3Config, method: str) -> None:
    """Forward and gradients: softmax scores as they are, groups by their best expert."""
    reference = transformers.DeepseekV2Config(**shared_arguments(config), topk_method=method)

    check_deepseek(config, modeling_deepseek_v2.DeepseekV2Model(reference))


def test_muse_spark_equals_transformers() -> None:
    """Forward and gradients: both attention kinds, latent experts, gates, soft cap."""
    config = MuseSparkConfig(
        vocab_size=96,
        dim=64,
        num_layers=4,
        num_heads=8,
        num_kv_heads=2,
        head_dim=8,
        window=40,
        latent_dim=32,
        expert_hidden_dim=24,
        num_experts=8,
        num_experts_per_token=3,
        query_key_scale=6.0,
        loss_chunk_tokens=50,
    )
    reference = transformers.models.muse_spark.MuseSparkTextConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        sliding_window=config.window,
        qk_scale_factor=config.query_key_scale / config.head_dim**0.5,
        output_multiplier=config.logit_scale,
        moe_intermediate_size=config.expert_hidden_dim,
        num_local_experts=config.num_experts,
        num_experts_per_tok=config.num_experts_per_token,
        moe_hidden_size=config.latent_dim,
        eos_token_id=None,
        bos_token_id=None,
        attn_implementation="eager",
    )
    theirs = modeling_muse_spark.MuseSparkTextModel(reference)
    pairs = TOP + [pair for layer in range(4) for pair in layer_pairs(layer, MUSE)]
    batch = pack([[150], [150]], config.vocab_size)

    compare(
        build(config),
        theirs,
        pairs,
        batch,
        multiplier=config.logit_scale,
        cap=config.logit_soft_cap,
    )
