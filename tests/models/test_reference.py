"""Forward and gradients against the implementations of transformers, with copied weights."""

import pytest
import torch
from torch import nn

from models.batch import Batch
from models.deepseek_v3 import DeepSeekV3Config
from models.muse_spark import MuseSparkConfig
from models.protocol import Model
from tests.models.helpers import build, pack, relative_error

transformers = pytest.importorskip("transformers")
from transformers.models.deepseek_v3 import modeling_deepseek_v3  # noqa: E402
from transformers.models.muse_spark import modeling_muse_spark  # noqa: E402

TOLERANCE = 1e-4
Names = list[tuple[str, str]]

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
DEEPSEEK_DENSE = {
    "feed_forward.gate_proj.weight": "mlp.gate_proj.weight",
    "feed_forward.up_proj.weight": "mlp.up_proj.weight",
    "feed_forward.down_proj.weight": "mlp.down_proj.weight",
}
EXPERTS = {
    "feed_forward.router.weight": "mlp.gate.weight",
    "feed_forward.experts.gate_up": "mlp.experts.gate_up_proj",
    "feed_forward.experts.down": "mlp.experts.down_proj",
}
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
TOP = [
    ("embedding.weight", "embed_tokens.weight"),
    ("norm.weight", "norm.weight"),
]


def layer_names(layer: int, names: dict[str, str]) -> Names:
    return [
        (f"layers.{layer}.{ours}", f"layers.{layer}.{theirs}") for ours, theirs in names.items()
    ]


def scatter_values(module: nn.Module) -> None:
    """Random values everywhere, around 1 for gains, so that no parameter hides behind a default."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            fan_in = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
            shift = 1.0 if name.endswith("norm.weight") or "layernorm" in name else 0.0
            parameter.copy_(shift + fan_in * noise)
        for name, buffer in module.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))


def copy_values(ours: Model, theirs: nn.Module, names: Names) -> None:
    """Copy every parameter and router bias; each of ours must have its counterpart."""
    mine, other = dict(ours.named_parameters()), dict(theirs.named_parameters())
    assert set(mine) == {name for name, _ in names} | {"head.weight"}
    with torch.no_grad():
        for name, counterpart in names:
            mine[name].copy_(other[counterpart])
        for name, moe in ours.moe_layers():
            gate = theirs.get_submodule(f"{name.removesuffix('.feed_forward')}.mlp.gate")
            moe.router.expert_bias.copy_(gate.e_score_correction_bias)


def compare(ours: Model, theirs: nn.Module, names: Names, batch: Batch, scale: tuple) -> None:
    """Same loss, same gradients, for the same values and tokens."""
    scatter_values(theirs)
    copy_values(ours, theirs, names)
    multiplier, cap = scale
    losses = ours(*batch)
    losses.total.backward()

    hidden = theirs(input_ids=batch.tokens_BS, position_ids=batch.positions_BS).last_hidden_state
    weight = ours.head.weight.detach().clone().requires_grad_()
    logits = nn.functional.linear(hidden, weight) * multiplier
    if cap:
        logits = cap * torch.tanh(logits / cap)
    loss = nn.functional.cross_entropy(
        logits.flatten(0, 1), batch.labels_BS.flatten(), reduction="sum"
    )
    loss.backward()

    assert relative_error(losses.total.detach(), loss.detach()) <= TOLERANCE
    assert relative_error(ours.head.weight.grad, weight.grad) <= TOLERANCE
    mine, other = dict(ours.named_parameters()), dict(theirs.named_parameters())
    errors = {a: relative_error(mine[a].grad, other[b].grad) for a, b in names}
    assert max(errors.values()) <= TOLERANCE, errors


def deepseek_reference(config: DeepSeekV3Config, mscale: float) -> nn.Module:
    reference = transformers.DeepseekV3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        intermediate_size=config.dense_hidden_dim,
        moe_intermediate_size=config.expert_hidden_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_heads,
        n_shared_experts=config.num_shared_experts,
        n_routed_experts=config.num_experts,
        routed_scaling_factor=config.route_scale,
        kv_lora_rank=config.kv_lora_rank,
        q_lora_rank=config.q_lora_rank or None,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        qk_nope_head_dim=config.qk_nope_head_dim,
        n_group=config.num_expert_groups,
        topk_group=config.num_limited_groups,
        num_experts_per_tok=config.num_experts_per_token,
        first_k_dense_replace=config.num_dense_layers,
        norm_topk_prob=config.normalize_weights,
        max_position_embeddings=int(config.rope_factor) * config.rope_original_context,
        num_mtp_layers=0,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": config.rope_theta,
            "factor": config.rope_factor,
            "original_max_position_embeddings": config.rope_original_context,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": mscale,
            "mscale_all_dim": mscale,
        },
        attn_implementation="eager",
    )
    return modeling_deepseek_v3.DeepseekV3Model(reference)


@pytest.mark.parametrize(("q_lora_rank", "mscale"), [(24, 1.0), (0, 0.7)])
def test_deepseek_v3_equals_transformers(q_lora_rank: int, mscale: float) -> None:
    """Forward and gradients, with and without a query latent, YaRN stretched and group-limited."""
    config = DeepSeekV3Config(
        vocab_size=96,
        dim=48,
        num_layers=3,
        num_dense_layers=1,
        num_heads=4,
        q_lora_rank=q_lora_rank,
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
        rope_mscale=mscale,
        loss_chunk_tokens=50,
    )
    queries = DEEPSEEK_Q_LATENT if q_lora_rank else DEEPSEEK_Q_DIRECT
    sparse = DEEPSEEK | queries | EXPERTS | DEEPSEEK_SHARED
    names = TOP + layer_names(0, DEEPSEEK | queries | DEEPSEEK_DENSE)
    names += layer_names(1, sparse) + layer_names(2, sparse)
    batch = pack([[150], [150]], config.vocab_size)

    compare(build(config), deepseek_reference(config, mscale), names, batch, (1.0, 0.0))


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
    names = TOP + [pair for layer in range(4) for pair in layer_names(layer, MUSE)]
    batch = pack([[150], [150]], config.vocab_size)

    compare(build(config), theirs, names, batch, (config.logit_scale, config.logit_soft_cap))
