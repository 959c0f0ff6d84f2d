"""A block is one graph for torch.compile: no break, the same losses and gradients."""

import pytest
import torch

from tests.models.families import PROXIES
from tests.models.helpers import build, pack

pytestmark = pytest.mark.exhaustive

LAST = [(name, -1) for name in PROXIES]
OTHER_KINDS = [
    ("deepseek_v4", 0),
    ("deepseek_v4", 2),
    ("gpt_oss", 0),
    ("muse_glimmer", 0),
    ("muse_spark", 0),
    ("qwen3_5", 0),
    ("kimi_k3", 1),
]
"""First layers that are of another kind than the last: a window, linear attention."""


@pytest.mark.parametrize(("name", "layer"), LAST + OTHER_KINDS)
def test_a_block_compiles_whole_and_computes_the_same(name: str, layer: int) -> None:
    # Families share blocks, and what is compiled for one counts towards the limit of the next.
    torch._dynamo.reset()
    config = PROXIES[name]
    batch = pack([[40, 88], [128]], config.vocab_size)
    eager, compiled = build(config), build(config)
    compiled.layers[layer].compile(backend="aot_eager", fullgraph=True)
    for model in (eager, compiled):
        model(*batch).total.backward()

    for mine, other in zip(compiled.parameters(), eager.parameters(), strict=True):
        if other.grad is None:  # an indexer, which nothing trains
            assert mine.grad is None
        else:
            # The gain of a mixture whose query is zero has a gradient of zero on both sides.
            assert (mine.grad - other.grad).abs().max() <= 1e-4 * other.grad.abs().max()
    for (_, mine), (_, other) in zip(compiled.moe_layers(), eager.moe_layers(), strict=True):
        assert mine.router.tokens_per_expert.tolist() == other.router.tokens_per_expert.tolist()
