"""Collectives by axis, counted in a real step, equal the closed forms of each dimension."""

import pytest
import torch
from msgspec.structs import replace

from models.initialization import collect_inits
from tests.parallel.cases import MODELS, count_collectives, tiny
from tests.rank_pool import RankPool

pytestmark = pytest.mark.distributed
FLOAT32_BYTES = 4
INT32_BYTES = 4


def parameter_numbers(model: str) -> tuple[int, int, int]:
    """Return the parameters of the blocks without experts, of the experts, and of the root."""
    with torch.device("meta"):
        network = MODELS[model].build(routing="learned")
    assert collect_inits(network)
    experts = sum(p.numel() for _, moe in network.moe_layers() for p in moe.experts.parameters())
    blocks = sum(p.numel() for _, block in network.blocks() for p in block.parameters())
    total = sum(p.numel() for p in network.parameters())
    return blocks - experts, experts, total - blocks


@pytest.mark.parametrize("model", ["deepseek_v3", "muse_spark"])
def test_fsdp_gathers_blocks_twice_root_once_and_reduces_once(
    two_ranks: RankPool, model: str
) -> None:
    """ZeRO-3 with resharded blocks: all-gather in forward and in backward, one reduce-scatter."""
    dense, experts, root = parameter_numbers(model)
    counts = two_ranks.run(count_collectives, tiny(model, 2))[0]["dp_shard"]
    num_blocks = len(MODELS[model].build(routing="learned").blocks())

    assert counts["all_gather"]["count"] == 2 * num_blocks + 1
    assert counts["reduce_scatter"]["count"] == num_blocks + 1
    gathered = FLOAT32_BYTES * (2 * (dense + experts) + root)
    reduced = FLOAT32_BYTES * (dense + experts + root)
    assert counts["all_gather"]["bytes"] == pytest.approx(gathered, rel=0.01)
    assert counts["reduce_scatter"]["bytes"] == pytest.approx(reduced, rel=0.01)


@pytest.mark.parametrize("model", ["deepseek_v3", "muse_spark"])
def test_experts_exchange_every_chosen_row_four_times(two_ranks: RankPool, model: str) -> None:
    """Dispatch and combine, forward and backward, plus the integer counts once a layer.

    Under balanced routing every rank receives as many rows as it sends: T x K rows each way.
    """
    workload = replace(tiny(model, 2, ep=2), routing="balanced")
    config = workload.model
    counts = two_ranks.run(count_collectives, workload)[0]["ep"]["all_to_all"]
    num_layers = len(config.build(routing="balanced").moe_layers())
    tokens = workload.tokens_per_step // 2
    width = getattr(config, "latent_dim", config.dim)
    rows = 4 * tokens * config.num_experts_per_token * width * FLOAT32_BYTES

    assert counts["count"] == 5 * num_layers
    assert counts["bytes"] == num_layers * (rows + INT32_BYTES * config.num_experts)


def test_one_rank_exchanges_nothing(one_rank: RankPool) -> None:
    (counts,) = one_rank.run(count_collectives, tiny("deepseek_v3", 1))

    assert counts == {}
