"""DeepSeek V4 against the released networks' numbers and the implementation of transformers."""

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from models.batch import Batch
from models.deepseek_v4 import (
    DEEPSEEK_V4_FLASH,
    DEEPSEEK_V4_PRO,
    DEEPSEEK_V4_PROXY,
    DeepSeekV4Config,
)
from models.layers.hyper_connections import doubly_stochastic
from models.layers.router import hashed_experts
from models.protocol import Model
from parallel.check import check_layout
from parallel.plan import ParallelPlan
from tests.models.helpers import build, pack, relative_error
from tests.models.model_facts import LENGTHS, facts_of

PRESETS = {"deepseek_v4_flash": DEEPSEEK_V4_FLASH, "deepseek_v4_pro": DEEPSEEK_V4_PRO}
TOLERANCE = 1e-4
TINY = DeepSeekV4Config(
    vocab_size=96,
    dim=48,
    num_layers=5,
    blocks=(0, 4, 16, 4, 16),
    heavy_block=16,
    num_heads=4,
    head_dim=32,
    rope_dim=8,
    q_lora_rank=24,
    num_output_groups=2,
    o_lora_rank=12,
    window=24,
    num_index_heads=16,
    index_head_dim=16,
    num_chosen_entries=6,
    expert_hidden_dim=24,
    num_experts=8,
    num_experts_per_token=3,
    num_hashed_layers=2,
    route_scale=1.5,
    swiglu_limit=0.7,
    num_sinkhorn_iterations=5,
    rope_factor=4.0,
    rope_original_context=64,
    loss_chunk_tokens=50,
)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_parameters_of_the_released_network(name: str) -> None:
    """Network and MTP module, on the meta device and from the configuration, exactly."""
    facts, config = facts_of(name), replace(PRESETS[name], num_mtp_layers=1)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in config.build().parameters())
    counts = config.counts()

    assert list(config.blocks) == facts["compress_ratios"]
    assert parameters == counts.total == facts["params_total"] + facts["params_mtp"]
    assert counts.mtp == facts["params_mtp"]
    assert counts.active == facts["active_no_embed"] + facts["active_mtp"]


@pytest.mark.parametrize("name", PRESETS)
def test_flops_per_token_are_the_golden_ones_term_by_term(name: str) -> None:
    facts, config = facts_of(name), replace(PRESETS[name], num_mtp_layers=1)
    heads, sparse = 6 * facts["n_heads"] * 2 * facts["head_dim"], config.blocks.count(4)
    for S in LENGTHS:
        ledger = config.flops_per_token(S)
        terms = {part: (term.full, term.causal) for part, term in ledger.terms.items()}
        assert ledger.full == facts[f"flops_per_token_s{S}"]
        assert terms["attention_window"] == (heads * config.num_layers * 128,) * 2
        assert terms["attention_heavily_compressed"] == (
            heads * config.blocks.count(128) * S // 128,
            heads * config.blocks.count(128) * S // 256,
        )
        # Choosing few is causal already: half of all entries only where that is fewer.
        few = facts["idx_topk"]
        assert terms["attention_compressed_sparse"] == (
            heads * sparse * min(few, S // 4),
            heads * sparse * min(few, S // 8),
        )
        index = 6 * facts["idx_heads"] * facts["idx_head_dim"] * sparse
        assert terms["indexer"] == (index * S // 4, index * S // 8)
    assert PRESETS[name].flops_per_token(4096).full == facts["flops_per_token_s4096_nomtp"]


def test_fewer_layers_are_the_first_ones() -> None:
    cut, whole = replace(DEEPSEEK_V4_FLASH, num_layers=4), DEEPSEEK_V4_FLASH
    shorter = replace(whole, num_layers=4, blocks=(0, 0, 4, 128))

    assert cut.counts() == shorter.counts()
    assert cut.flops_per_token(8192) == shorter.flops_per_token(8192)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_ledger_equals_the_operators_of_a_step(device: str) -> None:
    """Exactly, once what no convention counts is taken off and what nothing executes is put on."""
    config, S = DEEPSEEK_V4_PROXY, 256
    model = build(config, routing="balanced").to(device)
    with FlopCounterMode(display=False) as counter:
        model(*(x.to(device) for x in pack([[S]], config.vocab_size))).total.backward()

    layers, sparse = config.num_layers + config.num_mtp_layers, config.blocks.count(4)
    N, D, width = config.num_streams, config.dim, config.num_heads * config.head_dim
    executed = counter.get_total_flops()
    # Backward computes the scores again, of the window and of the entries.
    keys = layers * config.window
    keys += sum(min(S // 4, 32) if b == 4 else S // b for b in config.blocks if b)
    executed -= 2 * S * width * keys
    # Weighted sums over experts, and streams mixed by small matrices.
    executed -= 3 * 2 * S * layers * config.num_experts_per_token * D
    executed -= 3 * 2 * S * layers * 2 * N * N * D
    # The MTP module projects every stream by one matrix, the ledger counts it once.
    executed -= 6 * S * (N - 1) * D * D
    # The indexer has no backward: two thirds of its products, and of its scores, are not executed.
    matrices = sum(p.numel() for n, p in model.named_parameters() if _is_indexer_matrix(n))
    scores = sparse * config.num_index_heads * config.index_head_dim * (S // 4)
    executed += 4 * S * (matrices + scores)
    # Gains, biases and sinks are parameters without a product.
    others = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 1 or "position" in n)
    assert executed + 6 * S * others == config.flops_per_token(S).full * S


def _is_indexer_matrix(name: str) -> bool:
    return ".indexer." in name and name.endswith("proj.weight")


def reference(config: DeepSeekV4Config) -> nn.Module:
    """The model of transformers, with random values that hide behind no default."""
    transformers = pytest.importorskip("transformers")
    kinds = {
        0: "sliding_attention",
        config.sparse_block: "compressed_sparse_attention",
        config.heavy_block: "heavily_compressed_attention",
    }
    theirs = transformers.DeepseekV4Config(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        moe_intermediate_size=config.expert_hidden_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        q_lora_rank=config.q_lora_rank,
        num_experts_per_tok=config.num_experts_per_token,
        n_routed_experts=config.num_experts,
        routed_scaling_factor=config.route_scale,
        layer_types=[kinds[block] for block in config.blocks],
        compress_rates={kind: block for block, kind in kinds.items() if block},
        compress_rope_theta=config.compressed_rope_theta,
        hc_sinkhorn_iters=config.num_sinkhorn_iterations,
        num_hash_layers=config.num_hashed_layers,
        swiglu_limit=config.swiglu_limit,
        sliding_window=config.window,
        o_groups=config.num_output_groups,
        o_lora_rank=config.o_lora_rank,
        index_n_heads=config.num_index_heads,
        index_head_dim=config.index_head_dim,
        index_topk=config.num_chosen_entries,
        partial_rotary_factor=config.rope_dim / config.head_dim,
        rope_parameters={
            "rope_type": "yarn",
            "factor": config.rope_factor,
            "original_max_position_embeddings": config.rope_original_context,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
        max_position_embeddings=256,
        attn_implementation="eager",
    )
    model = transformers.models.deepseek_v4.modeling_deepseek_v4.DeepseekV4Model(theirs)
    scatter(model, config)
    return model


def scatter(model: nn.Module, config: DeepSeekV4Config) -> None:
    """Gains around 1, everything else around 0; experts of token ids as ours."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.arange(config.vocab_size)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scale = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.3
            parameter.copy_(
                (1.0 if name.endswith(("norm.weight", "scale")) else 0.0) + scale * noise
            )
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                experts = hashed_experts(ids, config.num_experts, config.num_experts_per_token)
                buffer.copy_(experts)
            elif name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))


RENAMES = [
    ("embed_tokens.", "embedding."),
    ("hc_head.hc_", "norm.projection."),
    ("attn_hc.", "attention_streams.projection."),
    ("ffn_hc.", "feed_forward_streams.projection."),
    ("projection.fn", "projection.weight"),
    ("projection.base", "projection.bias"),
    ("input_layernorm.", "attention_norm."),
    ("post_attention_layernorm.", "feed_forward_norm."),
    ("self_attn.compressor.indexer.scorer.weights_proj", "attention.indexer.weight_proj"),
    ("self_attn.compressor.indexer.q_b_proj", "attention.indexer.q_up_proj"),
    ("self_attn.compressor.indexer.", "attention.indexer.compressor."),
    ("compressor.kv_norm", "compressor.norm"),
    ("compressor.kv_proj", "compressor.value_proj"),
    ("self_attn.sinks", "attention.core.sinks"),
    ("self_attn.", "attention."),
    ("q_a_proj", "q_down_proj"),
    ("q_a_norm", "q_norm"),
    ("q_b_proj", "q_up_proj"),
    ("o_a_proj", "group_proj"),
    ("o_b_proj", "o_proj"),
    ("mlp.gate.", "feed_forward.router."),
    ("mlp.experts.gate_up_proj", "feed_forward.experts.gate_up"),
    ("mlp.experts.down_proj", "feed_forward.experts.down"),
    ("mlp.shared_experts.", "feed_forward.shared."),
]


def our_name(theirs: str) -> str:
    for old, new in RENAMES:
        theirs = theirs.replace(old, new)
    return theirs


def copy_values(ours: Model, theirs: nn.Module) -> None:
    """Copy every parameter but the head, and the biases of learned routers."""
    mine = dict(ours.named_parameters())
    values = {our_name(name): value for name, value in theirs.named_parameters()}
    assert set(mine) == {*values, "head.weight"}
    with torch.no_grad():
        for name, value in values.items():
            mine[name].copy_(value)
        for name, moe in ours.moe_layers():
            gate = theirs.get_submodule(name.replace("feed_forward", "mlp.gate"))
            if hasattr(gate, "e_score_correction_bias"):
                moe.router.expert_bias.copy_(gate.e_score_correction_bias)


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        replace(TINY, num_chosen_entries=64, window=7),
        replace(TINY, sparse_block=2, blocks=(0, 2, 16, 2, 2)),
    ],
    ids=["few chosen", "all chosen", "shorter blocks"],
)
def test_forward_and_gradients_equal_transformers(config: DeepSeekV4Config) -> None:
    """All three kinds of attention, hashed and learned routing, streams, sinks, clamped experts."""
    theirs, ours = reference(config), build(config)
    copy_values(ours, theirs)
    # 150 tokens: the last block of 16 and the last of 4 are not complete.
    batch = pack([[150], [150]], config.vocab_size)
    losses = ours(*batch)
    losses.total.backward()
    out = theirs(input_ids=batch.tokens_BS, position_ids=batch.positions_BS).last_hidden_state
    weight = ours.head.weight.detach().clone().requires_grad_()
    logits = nn.functional.linear(out, weight)
    loss = nn.functional.cross_entropy(logits.mT, batch.labels_BS, reduction="sum")
    loss.backward()

    assert relative_error(losses.total.detach(), loss.detach()) <= TOLERANCE
    gradients = {our_name(name): p.grad for name, p in theirs.named_parameters()}
    gradients["head.weight"] = weight.grad
    mine = dict(ours.named_parameters())
    untrained = {name for name, gradient in gradients.items() if gradient is None}
    assert untrained == {name for name in gradients if ".indexer." in name}
    assert all(mine[name].grad is None for name in untrained)
    errors = {
        name: relative_error(mine[name].grad, gradient)
        for name, gradient in gradients.items()
        if gradient is not None
    }
    assert max(errors.values()) <= TOLERANCE, errors


def hidden(model: Model, batch: Batch) -> tuple[Tensor, ...]:
    return model.advance((), batch.tokens_BS, batch.positions_BS)


def test_mtp_projects_each_stream_and_adds_the_next_embedding() -> None:
    """The module written out, with the reference's block and head in its place of the last layer.

    Its block is that of a layer with a window alone, so a network of one such layer computes it.
    """
    config = replace(TINY, num_layers=1, blocks=(0,), num_hashed_layers=0, num_mtp_layers=1)
    model = build(config)
    batch = pack([[40, 20]], config.vocab_size)
    _, predicted = hidden(model, batch)

    context = model.context(batch.positions_BS)._replace(tokens_BS=batch.tokens_BS)
    streams = model.layers[0](model.embed(batch.tokens_BS), context)
    module, D, N = model.mtp[0], config.dim, config.num_streams
    following = torch.roll(batch.tokens_BS, -1, 1)
    following[:, [39, 59]] = -1
    later = module.embedding_proj(module.embedding_norm(model.embedding(following)))
    merged = [
        module.hidden_proj(module.hidden_norm(streams[..., i * D : (i + 1) * D])) + later
        for i in range(N)
    ]
    single = build(replace(config, num_mtp_layers=0))
    single.layers[0].load_state_dict(module.block.state_dict())
    single.norm.load_state_dict(module.norm.state_dict())
    expected = single.norm(single.layers[0](torch.cat(merged, -1), context))
    torch.testing.assert_close(predicted, expected)


def test_mixing_matrices_are_doubly_stochastic() -> None:
    generator = torch.Generator().manual_seed(0)
    matrices = doubly_stochastic(torch.randn(64, 4, 4, generator=generator), 20, 1e-6)

    assert (matrices >= 0).all()
    for dim in (-1, -2):
        torch.testing.assert_close(matrices.sum(dim), torch.ones(64, 4), atol=1e-3, rtol=0)


def test_a_token_id_has_different_experts_and_all_experts_have_tokens() -> None:
    experts = hashed_experts(torch.arange(4096), 64, 6)

    assert all(len(set(row)) == 6 for row in experts.tolist())
    load = experts.flatten().bincount(minlength=64)
    assert load.min() > 0.7 * load.float().mean() and load.max() < 1.3 * load.float().mean()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 44}, "blocks has 43 entries for 44 layers"),
        ({"heavy_block": 64}, "each one of 0, 4, 64"),
        ({"num_output_groups": 7}, "64 heads do not divide into 7 output groups"),
        ({"rope_dim": 63}, "63 of 512 dimensions"),
        ({"window": 0}, "window 0"),
        ({"num_experts_per_token": 300}, "300 experts per token"),
        ({"num_mtp_layers": -1}, "-1 MTP layers"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_and_named(
    change: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(DEEPSEEK_V4_FLASH, **change)


@pytest.mark.parametrize(
    ("axis", "reason"),
    [("tp", "does not divide the 1 heads of layers.0.attention"), ("cp", "tokens of layers.1")],
)
def test_a_plan_that_would_divide_a_sequence_is_refused(axis: str, reason: str) -> None:
    with torch.device("meta"):
        model = DEEPSEEK_V4_PROXY.build()
    with pytest.raises(ValueError, match=reason):
        check_layout(model, ParallelPlan(**{axis: 2}))
