"""Collectives by axis, counted in a real step, equal the closed forms of each dimension."""

import pytest
import torch
from msgspec.structs import replace

from models.initialization import collect_inits
from parallel.tensor import planned_layers
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
    workload = tiny(model, 2, ep=2, expert_exchange="per_expert")
    workload = replace(workload, routing="balanced")
    config = workload.model
    counts = two_ranks.run(count_collectives, workload)[0]["ep"]["all_to_all"]
    num_layers = len(config.build(routing="balanced").moe_layers())
    tokens = workload.tokens_per_step // 2
    width = getattr(config, "latent_dim", config.dim)
    rows = 4 * tokens * config.num_experts_per_token * width * FLOAT32_BYTES

    assert counts["count"] == 5 * num_layers
    assert counts["bytes"] == num_layers * (rows + INT32_BYTES * config.num_experts)


ATTENTION_WIDTHS = {"deepseek_v3": [32, 32 + 32], "muse_spark": [256]}
"""What tensor ranks gather for attention: query latent, key/value latent with its key; input."""


@pytest.mark.parametrize("model", ["deepseek_v3", "muse_spark"])
def test_tensor_ranks_gather_inputs_and_scatter_outputs(two_ranks: RankPool, model: str) -> None:
    """Each gather of a forward is a reduce-scatter of the backward, and the other way round.

    Per token: the widths of what attention and dense layers gather and of what they give back, the
    embedding's and the head's; the head also gathers two numbers a token and rank, per chunk. The
    gradients of what every rank holds travel in one all-reduce.
    """
    workload = tiny(model, 2, tp=2)
    config = workload.model
    network = config.build(routing="learned")
    counts = two_ranks.run(count_collectives, workload)[0]["tp"]
    attention, num_blocks = ATTENTION_WIDTHS[model], len(network.blocks())
    num_dense = num_blocks - len(network.moe_layers())
    heads = 1 + config.num_mtp_layers
    tokens = workload.tokens_per_step
    chunks = -(-tokens * heads // config.loss_chunk_tokens)
    gathered = num_blocks * sum(attention) + (num_dense + heads) * config.dim
    scattered = (num_blocks + num_dense + heads) * config.dim
    sums = 2 * 2 * heads

    num_gathers = num_blocks * len(attention) + num_dense + heads
    num_scatters = num_blocks + num_dense + 1
    assert counts["all_gather"]["count"] == num_gathers + num_scatters + chunks
    assert counts["reduce_scatter"]["count"] == num_gathers + num_scatters
    assert counts["reduce_scatter"]["bytes"] == FLOAT32_BYTES * tokens * (gathered + scattered)
    assert counts["all_gather"]["bytes"] == FLOAT32_BYTES * tokens * (gathered + scattered + sums)
    divided = sum(
        layer.linear(name).weight.numel()
        for layer in planned_layers(network)
        for name in (*layer.plan.columns, *layer.plan.rows)
    )
    _, experts, _ = parameter_numbers(model)
    total = sum(parameter.numel() for parameter in network.parameters())
    replicated = total - experts - divided - 2 * config.vocab_size * config.dim
    assert counts["all_reduce"] == {"count": 1, "bytes": FLOAT32_BYTES * replicated}


def test_context_ranks_gather_latents_for_latent_attention(two_ranks: RankPool) -> None:
    """kv_lora_rank + qk_rope_head_dim values a token and layer, not the keys and values of heads.

    Gathered in the forward, their gradients scattered in the backward: nothing else travels.
    """
    workload = tiny("deepseek_v3", 2, cp=2)
    config = workload.model
    counts = two_ranks.run(count_collectives, workload)[0]["cp"]
    layers = config.num_layers + config.num_mtp_layers
    width = config.kv_lora_rank + config.qk_rope_head_dim
    moved = {"count": layers, "bytes": layers * workload.tokens_per_step * width * FLOAT32_BYTES}

    assert counts == {"all_gather": moved, "reduce_scatter": moved}


def test_context_ranks_send_the_halo_of_a_window_alone(two_ranks: RankPool) -> None:
    """window - 1 tokens of keys and values to the other rank; whole sequences in full layers.

    Of two ranks each has two chunks, one of which borders on a chunk of the other rank before it.
    """
    workload = tiny("muse_spark", 2, cp=2)
    workload = replace(workload, model=replace(workload.model, window=9))
    config = workload.model
    counts = two_ranks.run(count_collectives, workload)[0]["cp"]
    width = 2 * config.num_kv_heads * config.head_dim * FLOAT32_BYTES
    full = config.num_full_layers
    halos = 2 * (config.num_layers - full)
    moved = {"count": full, "bytes": full * workload.tokens_per_step * width}

    assert counts["all_gather"] == counts["reduce_scatter"] == moved
    halo = workload.global_batch_size * (config.window - 1) * width
    assert counts["all_to_all"] == {"count": halos, "bytes": halos * halo}


@pytest.mark.parametrize("model", ["deepseek_v3", "muse_spark"])
def test_ulysses_exchanges_queries_keys_values_and_outputs(two_ranks: RankPool, model: str) -> None:
    """Twice forward and twice backward a layer: all that a rank's tokens have of them."""
    workload = tiny(model, 2, cp=2, context="ulysses")
    config = workload.model
    counts = two_ranks.run(count_collectives, workload)[0]["cp"]
    layers = len(config.build(routing="learned").blocks())
    qk = getattr(config, "qk_nope_head_dim", 0) + getattr(config, "qk_rope_head_dim", 0)
    qk, v = (qk, config.v_head_dim) if qk else (config.head_dim, config.head_dim)
    kv_heads = getattr(config, "num_kv_heads", config.num_heads)
    width = config.num_heads * (qk + v) + kv_heads * (qk + v)
    tokens = workload.tokens_per_step // 2

    assert counts == {
        "all_to_all": {"count": 4 * layers, "bytes": 2 * layers * tokens * width * FLOAT32_BYTES}
    }


@pytest.mark.parametrize(
    ("num_ranks", "model"), [(2, "deepseek_v3"), (2, "muse_spark"), (4, "deepseek_v3")]
)
def test_what_keys_are_made_of_goes_around_the_ring_twice_and_its_gradients_once(
    two_ranks: RankPool, four_ranks: RankPool, num_ranks: int, model: str
) -> None:
    """To cp - 1 further ranks in forward, in backward, and there with float32 gradients.

    Latents where there are some, keys and values elsewhere; halos for layers with a window.
    """
    workload = tiny(model, num_ranks, cp=num_ranks, context="ring")
    config = workload.model
    pool = two_ranks if num_ranks == 2 else four_ranks
    counts = pool.run(count_collectives, workload)[0]["cp"]
    if model == "deepseek_v3":
        layers = config.num_layers + config.num_mtp_layers
        width = config.kv_lora_rank + config.qk_rope_head_dim
    else:
        layers = config.num_full_layers
        width = 2 * config.num_kv_heads * config.head_dim
    journeys = 3 * (num_ranks - 1) * layers
    block = workload.tokens_per_step // num_ranks * width * FLOAT32_BYTES
    moved = {"count": journeys, "bytes": journeys * block}

    assert counts["send"] == counts["recv"] == moved
    assert set(counts) <= {"send", "recv", "all_to_all"}
    assert ("all_to_all" in counts) == (model == "muse_spark")


def test_one_rank_exchanges_nothing(one_rank: RankPool) -> None:
    (counts,) = one_rank.run(count_collectives, tiny("deepseek_v3", 1))

    assert counts == {}
