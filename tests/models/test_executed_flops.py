"""The FLOPs ledger against a count of the operators that a real step runs."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from models.layers.attention import AttentionCore
from models.layers.delta_rule import DeltaRuleCore, ShortConvolution
from models.protocol import Model
from tests.models.families import PROXIES
from tests.models.helpers import build, pack

S = 256
QK_HEAD_DIMS = {
    "deepseek_v2": 128,
    "deepseek_v3": 128,
    "kimi_k2": 128,
    "gpt_oss": 64,
    "llama3_1": 64,
    "muse_glimmer": 64,
    "muse_spark": 64,
    "qwen3": 64,
    "qwen3_dense": 64,
    "qwen3_5": 64,
    "qwen3_5_dense": 64,
    "kimi_k3": 64,
}


def flash_extra_product(model: Model, qk_head_dim: int, num_heads: int) -> int:
    """The scores that backward computes again: 2 FLOPs per score and width."""
    windows = [m.window or S for m in model.modules() if isinstance(m, AttentionCore)]
    return sum(2 * num_heads * S * min(S, window) * qk_head_dim for window in windows)


def combine_products(model: Model) -> int:
    """The weighted sums over a token's experts, forward and twice backward; in no convention."""
    return sum(
        3 * 2 * S * moe.router.config.num_experts_per_token * moe.experts.down.shape[1]
        for _, moe in model.moe_layers()
    )


def recomputed_recurrences(model: Model) -> int:
    """The states and the convolutions that backward computes again."""
    cores = [m.flops_per_token for m in model.modules() if isinstance(m, DeltaRuleCore)]
    taps = [m.weight.numel() for m in model.modules() if isinstance(m, ShortConvolution)]
    return S * (sum(cores) + 2 * sum(taps))


def active_vectors(model: Model) -> int:
    """Gains, biases and sinks that work on a token; a convention counts them like matrices."""
    total = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    for _, moe in model.moe_layers():
        router = moe.router.config
        biases = sum(p.numel() for p in moe.experts.parameters() if p.dim() == 2)
        total += biases * router.num_experts_per_token // router.num_experts
    return total


@pytest.mark.parametrize("name", QK_HEAD_DIMS)
def test_ledger_equals_the_operators_of_a_step(name: str) -> None:
    """Exactly, once what no convention counts is taken off and vectors are put on."""
    config = PROXIES[name]
    model = build(config)
    batch = pack([[S]], config.vocab_size)
    with FlopCounterMode(display=False) as counter:
        model(*batch).total.backward()

    executed = counter.get_total_flops()
    executed -= flash_extra_product(model, QK_HEAD_DIMS[name], config.num_heads)
    executed -= combine_products(model) + recomputed_recurrences(model)
    assert executed + 6 * active_vectors(model) * S == config.flops_per_token(S).full * S


def test_the_count_on_the_meta_device_is_the_same() -> None:
    """Fake kernels and formulas agree with what runs."""
    counts = []
    for device in ("cpu", "meta"):
        model = build(PROXIES["deepseek_v3"], routing="balanced").to(device)
        batch = pack([[S]], 512)
        with FlopCounterMode(display=False) as counter:
            model(*(x.to(device) for x in batch)).total.backward()
        counts.append(counter.get_total_flops())

    assert counts[0] == counts[1]
    assert torch.device("meta") == next(model.parameters()).device
