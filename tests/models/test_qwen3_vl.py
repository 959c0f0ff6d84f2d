"""Qwen3-VL against the released networks' numbers and the implementation of transformers."""

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from models import qwen3_vl
from models.layers.attention import AttentionCore
from models.layers.images import place_images, synthetic_patches
from models.layers.vision import VisionConfig
from models.ops.attention import attention
from models.protocol import Model
from models.qwen3_vl import (
    QWEN3_VL_8B,
    QWEN3_VL_DENSE_PROXY,
    QWEN3_VL_PROXY,
    Qwen3VLConfig,
)
from tests.models.helpers import build, pack, relative_error
from tests.models.model_facts import LENGTHS, facts_of

SIZES = ["2b", "4b", "8b", "32b", "30b_a3b", "235b_a22b"]
TOLERANCE = 1e-4
IMAGE = 95
DENSE = Qwen3VLConfig(
    vocab_size=96,
    dim=48,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    hidden_dim=80,
    tied=True,
    rope_sections=(4, 2, 2),
    loss_chunk_tokens=50,
    image_interval=40,
    vision=VisionConfig(
        dim=32,
        num_layers=4,
        num_heads=2,
        hidden_dim=48,
        out_dim=48,
        deepstack_layers=(0, 2, 3),
        patch_size=4,
        positions=7,
        grid=(4, 10),
    ),
)
SPARSE = replace(DENSE, hidden_dim=24, num_experts=8, num_experts_per_token=3, tied=False)


def preset(size: str) -> Qwen3VLConfig:
    return getattr(qwen3_vl, f"QWEN3_VL_{size.upper()}")


@pytest.mark.parametrize("size", SIZES)
def test_a_preset_has_the_parameters_of_the_released_network(size: str) -> None:
    """Language model and tower, on the meta device and from the configuration, exactly."""
    facts, config = facts_of(f"qwen3_vl_{size}"), preset(size)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in config.build().parameters())
    counts = config.counts()

    assert parameters == counts.total == facts["params_total"]
    assert counts.vision == facts["params_vision"]
    assert counts.active == facts["active_no_embed"]


@pytest.mark.parametrize("size", SIZES)
def test_flops_per_token_of_text_are_the_golden_ones(size: str) -> None:
    facts, config = facts_of(f"qwen3_vl_{size}"), preset(size)
    for length in LENGTHS:
        ledger = config.flops_per_token(length)
        assert ledger.full == facts[f"flops_per_token_s{length}"]
        products = 6 * facts["n_layers"] * facts["n_heads"] * 2 * facts["head_dim"]
        assert ledger.full - ledger.causal == products * length // 2


def test_flops_of_images_are_those_of_the_patches_that_a_sequence_has() -> None:
    """By hand for the tower of the 8B size: 1024 patches and 256 features per 2048 tokens."""
    config = replace(QWEN3_VL_8B, image_interval=2048)
    block = 4 * 1152 * 1152 + 4 * 1152 + 2 * 1152 * 4304 + 4304 + 1152 + 4 * 1152
    patch = 1152 * (3 * 2 * 16 * 16 + 1) + 27 * (block + 2 * 1152 * 1024)
    merger = 4608 * 4609 + 4609 * 4096
    feature = (merger + 2 * 1152) + 3 * (merger + 2 * 4608)

    term = config.flops_per_token(8192).terms["vision"]

    assert term.full == term.causal == 6 * (1024 * patch + 256 * feature) * 4 // 8192


@pytest.mark.parametrize("config", [QWEN3_VL_PROXY, QWEN3_VL_DENSE_PROXY], ids=["moe", "dense"])
def test_ledger_equals_the_operators_of_a_step(config: Qwen3VLConfig) -> None:
    """Exactly, once what no convention counts is taken off and what has no product is put on."""
    S, vision = 256, config.vision
    model = build(config)
    with FlopCounterMode(display=False) as counter:
        model(*pack([[S]], config.vocab_size)).total.backward()

    executed = counter.get_total_flops()
    # Scores again in backward, and weighted sums over experts.
    cores = sum(isinstance(module, AttentionCore) for module in model.modules())
    executed -= cores * 2 * S * S * config.num_heads * config.head_dim
    images, patches = S // config.image_interval, vision.num_patches
    executed -= images * vision.num_layers * 2 * patches * patches * vision.dim
    executed -= len(model.moe_layers()) * 6 * S * config.num_experts_per_token * config.dim
    # Pixels need no gradient.
    executed += 2 * images * patches * vision.patch_width * vision.dim
    vectors = sum(
        p.numel() for n, p in model.named_parameters() if p.dim() == 1 and "vision" not in n
    )
    tower = dict(model.vision.named_parameters())
    by_patch = {n: p for n, p in tower.items() if p.dim() == 1}
    merged = sum(p.numel() for n, p in by_patch.items() if n.startswith(("merger", "deepstack")))
    others = sum(p.numel() for p in by_patch.values()) - merged
    executed += 6 * (S * vectors + images * (patches * others + vision.num_features * merged))
    assert executed == config.flops_per_token(S).full * S


def reference(config: Qwen3VLConfig) -> nn.Module:
    """The model of transformers, with random values that hide behind no default."""
    transformers = pytest.importorskip("transformers")
    vision = config.vision
    text = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.hidden_dim,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "mrope_section": list(config.rope_sections),
            "mrope_interleaved": True,
        },
    }
    tower = {
        "depth": vision.num_layers,
        "hidden_size": vision.dim,
        "intermediate_size": vision.hidden_dim,
        "num_heads": vision.num_heads,
        "patch_size": vision.patch_size,
        "out_hidden_size": vision.out_dim,
        "num_position_embeddings": vision.positions**2,
        "deepstack_visual_indexes": list(vision.deepstack_layers),
    }
    whole = {"text_config": text, "vision_config": tower, "image_token_id": IMAGE}
    if config.num_experts:
        text |= {
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.num_experts_per_token,
            "moe_intermediate_size": config.hidden_dim,
        }
        module = transformers.models.qwen3_vl_moe
        model = module.Qwen3VLMoeModel(
            module.Qwen3VLMoeConfig(**whole, attn_implementation="eager")
        )
    else:
        module = transformers.models.qwen3_vl
        model = module.Qwen3VLModel(module.Qwen3VLConfig(**whole, attn_implementation="eager"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scale = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.3
            gain = "norm" in name and name.endswith("weight")
            parameter.copy_((1.0 if gain else 0.0) + scale * noise)
    return model


RENAMES = [
    ("language_model.embed_tokens.", "embedding."),
    ("language_model.", ""),
    ("visual.", "vision."),
    ("patch_embed.proj.", "patch_proj."),
    ("pos_embed.weight", "position"),
    ("vision.blocks.", "vision.layers."),
    ("deepstack_merger_list.", "deepstack."),
    ("attn.qkv.", "qkv_proj."),
    ("attn.proj.", "o_proj."),
    ("norm1.", "attention_norm."),
    ("norm2.", "feed_forward_norm."),
    ("mlp.linear_fc1.", "up_proj."),
    ("mlp.linear_fc2.", "down_proj."),
    ("linear_fc1.", "up_proj."),
    ("linear_fc2.", "down_proj."),
    ("input_layernorm.", "attention_norm."),
    ("post_attention_layernorm.", "feed_forward_norm."),
    ("self_attn.q_norm", "attention.query_norm"),
    ("self_attn.k_norm", "attention.key_norm"),
    ("self_attn.", "attention."),
    ("mlp.gate.", "feed_forward.router."),
    ("mlp.experts.gate_up_proj", "feed_forward.experts.gate_up"),
    ("mlp.experts.down_proj", "feed_forward.experts.down"),
    ("mlp.", "feed_forward."),
]


def in_our_form(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Values, or gradients, under our names."""
    ours = {}
    for name, value in theirs.items():
        for old, new in RENAMES:
            name = name.replace(old, new)
        ours[name] = value.flatten(1) if name == "vision.patch_proj.weight" else value
    return ours


@pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "experts"])
def test_forward_and_gradients_equal_transformers(config: Qwen3VLConfig) -> None:
    """Text with images: tower, merged features, DeepStack, positions on three axes."""
    theirs, ours = reference(config), build(config)
    values = in_our_form(dict(theirs.named_parameters()))
    if not config.tied:
        values["head.weight"] = ours.head.weight.detach().clone().requires_grad_()
    mine = dict(ours.named_parameters())
    assert set(mine) == set(values)
    with torch.no_grad():
        for name, value in values.items():
            mine[name].copy_(value)

    # Three complete blocks of 40 tokens, each with an image of 10 features, and 20 more.
    batch = pack([[140], [140]], config.vocab_size - 1)
    losses = ours(*batch)
    losses.total.backward()
    images = place_images(batch.positions_BS, config.image_interval, config.vision)
    tokens = batch.tokens_BS.masked_fill(images.mask_BS, IMAGE)
    seeds = batch.tokens_BS[:, :120:40].flatten()
    out = theirs(
        input_ids=tokens,
        pixel_values=synthetic_patches(seeds, config.vision).flatten(0, 1),
        image_grid_thw=torch.tensor([[1, *config.vision.grid]] * 6),
        mm_token_type_ids=images.mask_BS.int(),
    ).last_hidden_state
    weight = theirs.language_model.embed_tokens.weight if config.tied else values["head.weight"]
    logits = nn.functional.linear(out, weight)
    loss = nn.functional.cross_entropy(logits.mT, batch.labels_BS, reduction="sum")
    loss.backward()

    expected = in_our_form({name: p.grad for name, p in theirs.named_parameters()})
    if not config.tied:
        expected["head.weight"] = weight.grad
    assert relative_error(losses.total.detach(), loss.detach()) <= TOLERANCE
    errors = {name: relative_error(mine[name].grad, grad) for name, grad in expected.items()}
    assert max(errors.values()) <= TOLERANCE, errors


def test_text_alone_equals_transformers_and_leaves_the_tower_idle() -> None:
    config = replace(DENSE, image_interval=0)
    theirs, ours = reference(config), build(config)
    mine = dict(ours.named_parameters())
    with torch.no_grad():
        for name, value in in_our_form(dict(theirs.named_parameters())).items():
            mine[name].copy_(value)
    batch = pack([[60]], config.vocab_size - 1)

    (hidden,) = ours.advance((), batch.tokens_BS, batch.positions_BS)
    ours(*batch).total.backward()

    expected = theirs(input_ids=batch.tokens_BS).last_hidden_state
    assert relative_error(hidden, expected) <= TOLERANCE
    assert all((p.grad is None) == name.startswith("vision.") for name, p in mine.items())


def test_complete_blocks_of_a_document_begin_with_an_image() -> None:
    """Documents of 5, 9 and 13 tokens, blocks of 5: none but whole blocks; 2 x 2 features."""
    vision = replace(DENSE.vision, grid=(4, 4))
    positions = pack([[5, 9, 13]], 8).positions_BS
    images = place_images(positions, 5, vision)

    assert images.starts_BC.tolist() == [[0, 5, 14, 19, 0]]
    assert images.valid_BC.tolist() == [[True] * 4 + [False]]
    picture = [1] * 4 + [0]
    assert images.mask_BS.int().tolist() == [[*picture, *picture, *[0] * 4, *picture * 2, 0, 0, 0]]
    # A picture of 2 x 2 features advances the positions by 2.
    time, row, column = images.axes_ABS[:, 0, 14:].tolist()
    assert time == [0, 0, 0, 0, 2, 3, 3, 3, 3, 5, 6, 7, 8]
    assert row == [0, 0, 1, 1, 2, 3, 3, 4, 4, 5, 6, 7, 8]
    assert column == [0, 1, 0, 1, 2, 3, 4, 3, 4, 5, 6, 7, 8]


def test_an_image_depends_on_the_token_at_its_start_alone() -> None:
    seeds = torch.tensor([3, 4, 3])
    patches = synthetic_patches(seeds, DENSE.vision)

    assert patches.shape == (3, 40, 96)
    assert patches[0].equal(patches[2])
    assert abs(torch.corrcoef(patches[:2].flatten(1))[0, 1]) < 0.05
    assert patches.abs().max() <= 1 and abs(patches.mean()) < 0.05
    assert patches.std() == pytest.approx(3**-0.5, rel=0.05)


def test_attention_between_patches_is_a_plain_softmax() -> None:
    """Output and gradients of all patches as keys before all patches, against the formula."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 20, 2, 8, generator=generator).requires_grad_() for _ in range(3))
    out, _ = attention(q, k, v, torch.arange(40).expand(3, -1), 0.3, 0)
    scores = 0.3 * torch.einsum("iphd,iqhd->ihpq", q.double(), k.double())
    expected = torch.einsum("ihpq,iqhd->iphd", scores.softmax(-1), v.double())
    grad = torch.randn(out.shape, generator=generator)

    ours = torch.autograd.grad(out, (q, k, v), grad)
    theirs = torch.autograd.grad(expected, (q, k, v), grad.double())

    assert relative_error(out, expected) < 1e-5
    assert max(relative_error(a, b) for a, b in zip(ours, theirs, strict=True)) < 1e-5


def saved_bytes(model: Model, S: int) -> int:
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    batch = pack([[S]], model.config.vocab_size)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model.advance((), batch.tokens_BS, batch.positions_BS)
    del hidden
    return sum(saved.values())


def test_what_is_kept_for_backward_grows_linearly_with_the_sequence_and_its_images() -> None:
    model = build(QWEN3_VL_DENSE_PROXY)
    small, middle, large = (saved_bytes(model, S) for S in (256, 512, 1024))

    assert (large - middle) == pytest.approx(2 * (middle - small), rel=0.02)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 5120}, "features of width 4096 for a model of 5120"),
        ({"num_layers": 2}, "2 layers do not take 3 features"),
        ({"rope_sections": (24, 20, 21)}, "for heads of 128"),
        ({"image_interval": 100}, "an image of 256 tokens every 100 tokens"),
        ({"num_kv_heads": 3}, "32 query heads"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_and_named(
    change: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(QWEN3_VL_8B, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 15}, "15 heads of a tower of width 1152"),
        ({"grid": (32, 31)}, "has no squares of side 2"),
        ({"deepstack_layers": (8, 27)}, "of 27"),
    ],
)
def test_towers_that_do_not_fit_are_refused_and_named(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(QWEN3_VL_8B.vision, **change)


def test_a_layer_of_the_tower_compiles_whole_and_computes_the_same() -> None:
    batch = pack([[140]], DENSE.vocab_size)
    eager, compiled = build(DENSE), build(DENSE)
    compiled.vision.layers[1].compile(backend="aot_eager", fullgraph=True)
    for model in (eager, compiled):
        model(*batch).total.backward()

    for mine, other in zip(compiled.parameters(), eager.parameters(), strict=True):
        assert relative_error(mine.grad, other.grad) < 1e-4
