"""Qwen3.5 against the released networks' numbers and the implementation of transformers."""

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from models import qwen3_5
from models.qwen3_5 import QWEN3_5_35B_A3B, Qwen35Config
from tests.models.helpers import build, pack, relative_error
from tests.models.model_facts import LENGTHS, facts_of

SIZES = ["0_8b", "2b", "4b", "9b", "27b", "35b_a3b", "122b_a10b", "397b_a17b"]
TOLERANCE = 1e-4
DENSE = Qwen35Config(
    vocab_size=96,
    dim=48,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rotary_dim=8,
    num_linear_heads=4,
    num_linear_qk_heads=2,
    linear_head_dim=16,
    hidden_dim=80,
    tied=True,
    loss_chunk_tokens=50,
)
SPARSE = replace(DENSE, hidden_dim=24, num_experts=8, num_experts_per_token=3, tied=False)


def preset(size: str) -> Qwen35Config:
    return getattr(qwen3_5, f"QWEN3_5_{size.upper()}")


@pytest.mark.parametrize("size", SIZES)
def test_a_preset_has_the_parameters_of_the_released_network(size: str) -> None:
    """Text and MTP, on the meta device and from the configuration, exactly."""
    facts, config = facts_of(f"qwen3_5_{size}"), replace(preset(size), num_mtp_layers=1)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in config.build().parameters())
    counts = config.counts()

    assert parameters == counts.total == facts["params_text"] + facts["params_mtp"]
    assert counts.mtp == facts["params_mtp"]
    assert counts.active == facts["active_no_embed"] + facts["active_mtp"]


@pytest.mark.parametrize("size", SIZES)
def test_flops_per_token_without_the_state_are_the_golden_ones(size: str) -> None:
    """Golden values leave the state of linear attention out: the ledger has that term more."""
    facts = facts_of(f"qwen3_5_{size}")
    state = 3 * facts["linear_state_flops_fwd_per_layer"]
    num_linear = facts["n_layers"] - len(facts["full_attn_layers_0based"])
    for length in LENGTHS:
        ledger = replace(preset(size), num_mtp_layers=1).flops_per_token(length)
        assert ledger.terms["linear_attention_state"].full == num_linear * state
        assert ledger.full - num_linear * state == facts[f"flops_per_token_s{length}"]
        # Half of the keys, in the layers and in the MTP module; nothing else depends on them.
        products = 6 * facts["n_heads"] * 2 * facts["head_dim"] * (length // 2)
        num_full = facts["n_layers"] - num_linear + 1
        assert ledger.full - ledger.causal == num_full * products
    without_mtp = preset(size).flops_per_token(4096)
    golden = facts["flops_per_token_s4096_nomtp"]
    assert without_mtp.full - num_linear * state == golden


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_linear_heads": 40}, "16 query heads do not serve 40 linear heads"),
        ({"rotary_dim": 258}, "258 of 256 dimensions"),
        ({"num_kv_heads": 3}, "16 query heads"),
        ({"full_attention_interval": 0}, "full_attention_interval 0 must be at least 1"),
        ({"num_experts": 0}, "8 experts per token of a dense network"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_and_named(
    change: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(QWEN3_5_35B_A3B, **change)


def reference(config: Qwen35Config) -> nn.Module:
    """The text model of transformers, with random values that hide behind no default."""
    transformers = pytest.importorskip("transformers")
    common = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "linear_key_head_dim": config.linear_head_dim,
        "linear_value_head_dim": config.linear_head_dim,
        "linear_num_key_heads": config.num_linear_qk_heads,
        "linear_num_value_heads": config.num_linear_heads,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "partial_rotary_factor": config.rotary_dim / config.head_dim,
            "mrope_section": [2, 1, 1],
        },
        "attn_implementation": "eager",
    }
    if config.num_experts:
        module = transformers.models.qwen3_5_moe
        sparse = module.Qwen3_5MoeTextConfig(
            num_experts=config.num_experts,
            num_experts_per_tok=config.num_experts_per_token,
            moe_intermediate_size=config.hidden_dim,
            shared_expert_intermediate_size=config.hidden_dim,
            **common,
        )
        model = module.Qwen3_5MoeTextModel(sparse)
    else:
        module = transformers.models.qwen3_5
        dense = module.Qwen3_5TextConfig(intermediate_size=config.hidden_dim, **common)
        model = module.Qwen3_5TextModel(dense)
    scatter(model)
    return model


def scatter(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scale = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.3
            parameter.copy_(
                (1.0 if name.endswith("linear_attn.norm.weight") else 0.0) + scale * noise
            )


def in_our_form(theirs: dict[str, Tensor], config: Qwen35Config) -> dict[str, Tensor]:
    """Values, or gradients, under our names: fused projections cut into ours."""
    ours = {"embedding.weight": theirs["embed_tokens.weight"], "norm.weight": theirs["norm.weight"]}
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        part = {k.removeprefix(prefix): v for k, v in theirs.items() if k.startswith(prefix)}
        fully = config.attends_fully(layer)
        named = {
            "attention_norm.weight": part["input_layernorm.weight"],
            "feed_forward_norm.weight": part["post_attention_layernorm.weight"],
            **(
                attention_in_our_form(part, config)
                if fully
                else delta_net_in_our_form(part, config)
            ),
            **(
                experts_in_our_form(part) if config.num_experts else dense_in_our_form(part, "mlp.")
            ),
        }
        ours |= {prefix + name: value for name, value in named.items()}
    return ours


def attention_in_our_form(part: dict[str, Tensor], config: Qwen35Config) -> dict[str, Tensor]:
    heads = part["self_attn.q_proj.weight"].unflatten(0, (config.num_heads, 2, config.head_dim))
    return {
        "attention.q_proj.weight": heads[:, 0].flatten(0, 1),
        "attention.gate_proj.weight": heads[:, 1].flatten(0, 1),
        "attention.k_proj.weight": part["self_attn.k_proj.weight"],
        "attention.v_proj.weight": part["self_attn.v_proj.weight"],
        "attention.o_proj.weight": part["self_attn.o_proj.weight"],
        "attention.query_norm.weight": part["self_attn.q_norm.weight"],
        "attention.key_norm.weight": part["self_attn.k_norm.weight"],
    }


def delta_net_in_our_form(part: dict[str, Tensor], config: Qwen35Config) -> dict[str, Tensor]:
    qk_width = config.num_linear_qk_heads * config.linear_head_dim
    widths = [qk_width, qk_width, config.num_linear_heads * config.linear_head_dim]
    projections = part["linear_attn.in_proj_qkv.weight"].split(widths)
    convolutions = part["linear_attn.conv1d.weight"].squeeze(1).split(widths)
    return {
        **{f"attention.{x}_proj.weight": w for x, w in zip("qkv", projections, strict=True)},
        **{
            f"attention.{x}_convolution.weight": w for x, w in zip("qkv", convolutions, strict=True)
        },
        "attention.gate_proj.weight": part["linear_attn.in_proj_z.weight"],
        "attention.beta_proj.weight": part["linear_attn.in_proj_b.weight"],
        "attention.decay_proj.weight": part["linear_attn.in_proj_a.weight"],
        "attention.log_rate": part["linear_attn.A_log"],
        "attention.decay_bias": part["linear_attn.dt_bias"],
        "attention.norm.weight": part["linear_attn.norm.weight"],
        "attention.o_proj.weight": part["linear_attn.out_proj.weight"],
    }


def dense_in_our_form(part: dict[str, Tensor], theirs: str, ours: str = "") -> dict[str, Tensor]:
    names = ("gate_proj", "up_proj", "down_proj")
    return {f"feed_forward.{ours}{x}.weight": part[f"{theirs}{x}.weight"] for x in names}


def experts_in_our_form(part: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        "feed_forward.router.weight": part["mlp.gate.weight"],
        "feed_forward.experts.gate_up": part["mlp.experts.gate_up_proj"],
        "feed_forward.experts.down": part["mlp.experts.down_proj"],
        "feed_forward.shared.output_gate_proj.weight": part["mlp.shared_expert_gate.weight"],
        **dense_in_our_form(part, "mlp.shared_expert.", "shared."),
    }


@pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "experts"])
def test_forward_and_gradients_equal_transformers(config: Qwen35Config) -> None:
    """Both layer kinds with copied values, over more than two chunks of the delta rule."""
    theirs, ours = reference(config), build(config)
    values = in_our_form(dict(theirs.named_parameters()), config)
    if not config.tied:
        values["head.weight"] = ours.head.weight.detach().clone().requires_grad_()
    mine = dict(ours.named_parameters())
    assert set(mine) == set(values)
    with torch.no_grad():
        for name, value in values.items():
            mine[name].copy_(value)

    batch = pack([[150], [150]], config.vocab_size)
    losses = ours(*batch)
    losses.total.backward()
    out = theirs(input_ids=batch.tokens_BS, position_ids=batch.positions_BS).last_hidden_state
    weight = theirs.embed_tokens.weight if config.tied else values["head.weight"]
    logits = nn.functional.linear(out, weight)
    loss = nn.functional.cross_entropy(logits.mT, batch.labels_BS, reduction="sum")
    loss.backward()

    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    expected = in_our_form(gradients, config)
    if not config.tied:
        expected["head.weight"] = weight.grad
    assert relative_error(losses.total.detach(), loss.detach()) <= TOLERANCE
    errors = {name: relative_error(mine[name].grad, grad) for name, grad in expected.items()}
    assert max(errors.values()) <= TOLERANCE, errors
