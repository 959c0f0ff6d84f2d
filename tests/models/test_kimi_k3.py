"""Kimi K3 against the released network's numbers, its equations, and KDA of transformers."""

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from models.batch import Context
from models.initialization import collect_inits, initialize
from models.kimi_k3 import KIMI_K3, KimiK3Config
from models.layers.attention_residual import AttentionResidual
from models.layers.kimi_delta_attention import KimiDeltaAttention
from models.layers.situ import situ_glu
from tests.models.helpers import build, pack, relative_error
from tests.models.kimi_k3_equations import loss_of
from tests.models.model_facts import LENGTHS, facts_of

TOLERANCE = 1e-4
TINY = KimiK3Config(
    vocab_size=96,
    dim=48,
    num_layers=5,
    residual_block=2,
    num_heads=3,
    q_lora_rank=24,
    kv_lora_rank=20,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    linear_head_dim=16,
    decay_rank=8,
    dense_hidden_dim=64,
    latent_dim=32,
    expert_hidden_dim=24,
    num_experts=8,
    num_experts_per_token=3,
    num_shared_experts=2,
    loss_chunk_tokens=50,
)


def test_the_preset_has_the_parameters_of_the_released_network() -> None:
    facts, counts = facts_of("kimi_k3"), KIMI_K3.counts()
    with torch.device("meta"):
        parameters = sum(p.numel() for p in KIMI_K3.build().parameters())

    assert parameters == counts.total == facts["params_text"] == 2_779_484_393_568
    assert counts.active == facts["active_no_embed"]
    assert counts.active_layers == facts["active_layers"]
    assert KIMI_K3.full_layers == facts["full_attn_layers_0based"]


def test_flops_per_token_without_the_state_are_the_golden_ones() -> None:
    """Golden values leave the state of linear attention out: the ledger has that term more."""
    facts = facts_of("kimi_k3")
    state = 3 * 69 * facts["linear_state_flops_fwd_per_layer"]
    for length in LENGTHS:
        ledger = KIMI_K3.flops_per_token(length)
        assert ledger.terms["linear_attention_state"].full == state
        assert ledger.full - state == facts[f"flops_per_token_s{length}"]
        assert ledger.full - ledger.causal == 6 * 24 * 96 * (192 + 128) * (length // 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_dense_layers": 94}, "94 dense layers out of 93"),
        ({"residual_block": 0}, "residual_block 0 must be at least 1"),
        ({"decay_bound": 0.5}, "decay_bound 0.5"),
        ({"num_experts_per_token": 900}, "900 experts per token out of the 896"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_and_named(
    change: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(KIMI_K3, **change)


def scatter(module: nn.Module) -> None:
    """Random values everywhere, around 1 for gains, so that none hides behind its default."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
            gain = name.endswith(("norm.weight", "gain", "exit.0.weight"))
            parameter.copy_((1.0 if gain else 0.0) + scale * noise)
        for name, buffer in module.named_buffers():
            if name.endswith("expert_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))


def test_forward_and_gradients_equal_the_equations_token_by_token() -> None:
    """Both layer kinds, dense and sparse, three residual blocks, packed documents."""
    model = build(TINY)
    scatter(model)
    batch = pack([[70, 3, 27], [100]], TINY.vocab_size)
    loss = model(*batch).total
    loss.backward()

    values = {n: p.detach().double().requires_grad_() for n, p in model.named_parameters()}
    expected = loss_of(values, {n: b.double() for n, b in model.named_buffers()}, TINY, batch)
    expected.backward()

    assert relative_error(loss.detach(), expected.detach()) <= TOLERANCE
    # One source alone has a share of 1 whatever its score.
    alone = {"layers.0.attention_residual.query", "layers.0.attention_residual.gain"}
    errors = {
        name: relative_error(parameter.grad, values[name].grad)
        for name, parameter in model.named_parameters()
        if name not in alone
    }
    assert max(errors.values()) <= TOLERANCE, errors


def in_our_form(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Values or gradients of Kimi Linear's layer under our names, without the output gate."""
    convolutions = theirs["conv1d.weight"].squeeze(1).chunk(3)
    return {
        "log_rate": theirs["forget_gate.A_log"].flatten(),
        "decay_bias": theirs["forget_gate.dt_bias"],
        "decay_proj.0.weight": theirs["forget_gate.f_a_proj.weight"],
        "decay_proj.1.weight": theirs["forget_gate.f_b_proj.weight"],
        "beta_proj.weight": theirs["b_proj.weight"],
        "norm.weight": theirs["o_norm.weight"],
        **{f"{x}_proj.weight": theirs[f"{x}_proj.weight"] for x in "qkvo"},
        **{f"{x}_convolution.weight": w for x, w in zip("qkv", convolutions, strict=True)},
    }


def test_kimi_delta_attention_equals_that_of_transformers() -> None:
    """The layer of Kimi Linear: no lower bound, and an output gate from a latent."""
    transformers = pytest.importorskip("transformers")
    module = transformers.models.kimi_linear.modeling_kimi_linear
    config = transformers.KimiLinearConfig(
        hidden_size=48, linear_num_heads=3, linear_head_dim=16, num_hidden_layers=2
    )
    theirs = module.KimiLinearDeltaAttention(config, 0)
    scatter(theirs)
    ours = KimiDeltaAttention(
        48,
        3,
        head_dim=16,
        decay_rank=16,
        decay_bound=None,
        convolution_width=4,
        norm_eps=config.rms_norm_eps,
        output_scale=1.0,
    )
    other = dict(theirs.named_parameters())
    values = in_our_form(other)
    values["gate_proj.weight"] = other["g_b_proj.weight"] @ other["g_a_proj.weight"]
    ours.load_state_dict(values)

    generator = torch.Generator().manual_seed(2)
    x, grad = (torch.randn(2, 150, 48, generator=generator) for _ in range(2))
    positions = torch.arange(150).repeat(2, 1)
    mine, reference = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, expected = ours(mine, Context(positions, positions, positions)), theirs(reference)
    out.backward(grad)
    expected.backward(grad)

    assert relative_error(out, expected) <= TOLERANCE
    assert relative_error(mine.grad, reference.grad) <= TOLERANCE
    gradients = {name: p.grad for name, p in ours.named_parameters()}
    # The gate's latent: its gradient is that of our whole matrix times the other factor.
    gate_gradient = gradients.pop("gate_proj.weight") @ other["g_a_proj.weight"].T
    assert relative_error(gate_gradient, other["g_b_proj.weight"].grad) <= TOLERANCE
    theirs_gradients = in_our_form({name: p.grad for name, p in other.items()})
    assert set(gradients) == set(theirs_gradients)
    for name, gradient in gradients.items():
        assert relative_error(gradient, theirs_gradients[name]) <= TOLERANCE, name


def test_situ_glu_keeps_its_inputs_alone_and_equals_its_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    gate, up = (8 * torch.randn(64, generator=generator) for _ in range(2))
    gate.requires_grad_(), up.requires_grad_()
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(x.data_ptr()) or x, lambda x: x
    ):
        out = situ_glu(gate, up, gate_bound=4.0, up_bound=25.0)
    formula = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)

    assert kept == [gate.data_ptr(), up.data_ptr()]
    assert relative_error(out, formula) < 1e-6
    gradients = (torch.autograd.grad(x.sum(), (gate, up)) for x in (out, formula))
    for mine, other in zip(*gradients, strict=True):
        assert relative_error(mine, other) < 1e-5


def test_an_attention_residual_keeps_sources_and_shares_alone() -> None:
    """Sources are states of the stream that exist anyway: nothing of their size is added."""
    residual = AttentionResidual(32, 1e-5)
    initialize(residual, collect_inits(residual), 0)
    sources = [torch.randn(2, 10, 32, requires_grad=True) for _ in range(3)]
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.data_ptr()] = x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        residual(*sources)

    others = [n for pointer, n in kept.items() if pointer not in {s.data_ptr() for s in sources}]
    assert sum(others) <= 3 * 2 * 10 + 4 * 32
