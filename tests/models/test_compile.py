"""A block is one graph for torch.compile: no break, the same losses and gradients."""

import pytest

from models.deepseek_v3 import DEEPSEEK_V3_PROXY
from models.muse_spark import MUSE_SPARK_PROXY
from models.protocol import ModelConfig
from models.qwen3_5 import QWEN3_5_PROXY
from tests.models.helpers import build, pack, relative_error

CASES = {
    "deepseek_v3": (DEEPSEEK_V3_PROXY, -1),
    "muse_spark": (MUSE_SPARK_PROXY, -1),
    "qwen3_5": (QWEN3_5_PROXY, -1),
    "qwen3_5_linear": (QWEN3_5_PROXY, 0),
}


@pytest.mark.parametrize(("config", "layer"), CASES.values(), ids=CASES)
def test_a_block_compiles_whole_and_computes_the_same(config: ModelConfig, layer: int) -> None:
    batch = pack([[40, 88], [128]], config.vocab_size)
    eager, compiled = build(config), build(config)
    compiled.layers[layer].compile(backend="aot_eager", fullgraph=True)
    for model in (eager, compiled):
        model(*batch).total.backward()

    for mine, other in zip(compiled.parameters(), eager.parameters(), strict=True):
        assert relative_error(mine.grad, other.grad) < 1e-4
    for (_, mine), (_, other) in zip(compiled.moe_layers(), eager.moe_layers(), strict=True):
        assert mine.router.tokens_per_expert.tolist() == other.router.tokens_per_expert.tolist()
