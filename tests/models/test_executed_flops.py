"""The FLOPs ledger against a count of the operators that a real step runs."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from models.deepseek_v3 import DEEPSEEK_V3_PROXY
from models.layers.attention import AttentionCore
from models.layers.delta_rule import DeltaRuleCore, ShortConvolution
from models.muse_spark import MUSE_SPARK_PROXY
from models.protocol import Model, ModelConfig
from models.qwen3_5 import QWEN3_5_DENSE_PROXY, QWEN3_5_PROXY
from tests.models.helpers import build, pack

S = 256


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


@pytest.mark.parametrize(
    ("config", "qk_head_dim"),
    [
        (DEEPSEEK_V3_PROXY, 128),
        (MUSE_SPARK_PROXY, 64),
        (QWEN3_5_PROXY, 64),
        (QWEN3_5_DENSE_PROXY, 64),
    ],
)
def test_ledger_equals_the_operators_of_a_step(config: ModelConfig, qk_head_dim: int) -> None:
    """Exactly, once what no convention counts is taken off and norm parameters are put on."""
    model = build(config)
    batch = pack([[S]], config.vocab_size)
    with FlopCounterMode(display=False) as counter:
        model(*batch).total.backward()

    gains = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    executed = counter.get_total_flops()
    executed -= flash_extra_product(model, qk_head_dim, config.num_heads)
    executed -= combine_products(model) + recomputed_recurrences(model)
    assert executed + 6 * gains * S == config.flops_per_token(S).full * S


def test_the_count_on_the_meta_device_is_the_same() -> None:
    """Fake kernels and formulas agree with what runs."""
    counts = []
    for device in ("cpu", "meta"):
        model = build(DEEPSEEK_V3_PROXY, routing="balanced").to(device)
        batch = pack([[S]], 512)
        with FlopCounterMode(display=False) as counter:
            model(*(x.to(device) for x in batch)).total.backward()
        counts.append(counter.get_total_flops())

    assert counts[0] == counts[1]
    assert torch.device("meta") == next(model.parameters()).device
