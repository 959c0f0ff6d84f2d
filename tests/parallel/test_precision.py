"""What runs in MXFP8 is what was named; bfloat16 moments take half the bytes and still train."""

import pytest
import torch
from msgspec.structs import replace

from models.initialization import collect_inits, fan_in, initialize
from models.layers.head import OutputHead
from models.layers.linear import Linear
from parallel.mxfp8 import mxfp8_linear
from parallel.optimizer import LowPrecisionAdamW
from parallel.quantization import linear_maps, quantize
from tests.models.helpers import relative_error
from tests.parallel.cases import FP32, count_operators, peak_tensor_bytes, tiny, train
from tests.rank_pool import RankPool
from workloads.build import build_whole
from workloads.workload import Precision, Training, Workload

D, V, T = 64, 96, 100
BF16_STATES = Precision(compute="float32", optimizer_states="bfloat16")


def quantized(*parts: str) -> Workload:
    precision = Precision(compute="bfloat16", quantization="mxfp8", quantize=parts)
    return tiny("deepseek_v3", 1, precision=precision)


@pytest.mark.distributed
@pytest.mark.parametrize("part", ["attention", "feed_forward", "experts", "head"])
def test_the_products_of_a_part_run_in_mxfp8_and_no_others(one_rank: RankPool, part: str) -> None:
    """Expected calls: two grouped products of a mixture, one per linear map, one per chunk."""
    model = build_whole(quantized(part))
    maps = [name for _, block in model.blocks() for name, _ in linear_maps(block)]
    tokens = 4 * 128 * 2  # of the main head and of one MTP depth
    linear = -(-tokens // model.head.chunk_tokens) if part == "head" else maps.count(part)
    grouped = 2 * len(model.moe_layers()) if part == "experts" else 0
    calls = one_rank.run(count_operators, quantized(part))[0]

    assert linear + grouped > 0
    assert calls.get("titanbench::mxfp8_linear", 0) == linear
    assert calls.get("titanbench::mxfp8_grouped_mm", 0) == grouped


def test_every_linear_map_of_a_block_belongs_to_one_part() -> None:
    model = build_whole(quantized("head"))
    for _, block in model.blocks():
        found = [linear for _, linear in linear_maps(block)]
        expected = [module for module in block.modules() if isinstance(module, Linear)]
        assert len(found) == len(expected) and set(found) == set(expected)


def make_head(chunk_tokens: int) -> OutputHead:
    head = OutputHead(D, V, init=fan_in(D), chunk_tokens=chunk_tokens)
    initialize(head, collect_inits(head), seed=0)
    return head


def quantize_head(head: OutputHead) -> OutputHead:
    model = build_whole(quantized("head"))
    model.head = head
    quantize(model, ("head",))
    return head


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, T, D, generator=generator).requires_grad_()
    return hidden, torch.randint(0, V, (1, T), generator=generator)


def test_a_head_in_mxfp8_is_the_cross_entropy_of_one_mxfp8_product() -> None:
    """Chunks of whole 32-token blocks quantize as the sequence does; the last one is padded."""
    hidden, labels = inputs()
    head = quantize_head(make_head(chunk_tokens=64))
    mine = torch.autograd.grad(head([hidden], [labels]).total, [hidden, head.weight])
    weight = head.weight.detach().clone().requires_grad_()
    logits = mxfp8_linear(hidden[0], weight).float()
    loss = torch.nn.functional.cross_entropy(logits, labels[0], reduction="sum")
    expected = torch.autograd.grad(loss, [hidden, weight])

    assert head([hidden], [labels]).total.item() == pytest.approx(loss.item(), rel=1e-6)
    for ours, theirs in zip(mine, expected, strict=True):
        assert relative_error(ours, theirs) < 1e-3


def test_a_head_in_mxfp8_is_as_far_from_exact_as_the_format() -> None:
    """Two factors of 3 mantissa bits: an error of a few percent in logits and in gradients."""
    hidden, labels = inputs()
    exact, rough = make_head(chunk_tokens=48), quantize_head(make_head(chunk_tokens=48))
    gradients = [
        torch.autograd.grad(head([hidden], [labels]).total, [hidden, head.weight])
        for head in (exact, rough)
    ]

    assert 0.01 < relative_error(rough.logits(hidden), exact.logits(hidden)) < 0.04
    for ours, theirs in zip(gradients[1], gradients[0], strict=True):
        assert 0.01 < relative_error(ours, theirs) < 0.08


@pytest.mark.distributed
def test_a_head_in_mxfp8_trains_close_to_one_that_is_not(one_rank: RankPool) -> None:
    (rough,) = one_rank.run(train, quantized("head"), 5)
    (exact,) = one_rank.run(train, tiny("deepseek_v3", 1, precision=Precision()), 5)

    assert rough != exact
    assert rough[-1][0] == pytest.approx(exact[-1][0], rel=0.04)


def test_moments_in_bfloat16_are_those_of_adamw_rounded() -> None:
    """From no moments on the first step is AdamW's to the bit; the second starts rounded."""
    generator = torch.Generator().manual_seed(0)
    start, gradient = (torch.randn(40, 24, generator=generator) for _ in range(2))
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
    mine, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    low = LowPrecisionAdamW([{"params": [mine], "weight_decay": 0.1}], **options)
    high = torch.optim.AdamW([theirs], weight_decay=0.1, fused=True, **options)

    for step in range(2):
        mine.grad, theirs.grad = gradient.clone(), gradient.clone()
        low.step()
        high.step()
        if step == 0:
            assert torch.equal(mine, theirs)
            for name in ("exp_avg", "exp_avg_sq"):
                rounded = high.state[theirs][name].bfloat16()
                assert torch.equal(low.state[mine][name], rounded)
                high.state[theirs][name].copy_(rounded)
    assert torch.equal(mine, theirs)


@pytest.mark.distributed
def test_moments_in_bfloat16_halve_the_states(one_rank: RankPool, two_ranks: RankPool) -> None:
    """Two moments of each parameter: 8 bytes become 4, on one rank and on a shard."""
    for pool, world_size in ((one_rank, 1), (two_ranks, 2)):
        high, low = (
            pool.run(peak_tensor_bytes, tiny("deepseek_v3", world_size, precision=precision))
            for precision in (FP32, BF16_STATES)
        )
        bytes_high, bytes_low = (sum(x["standing_tensor_bytes"] for x in y) for y in (high, low))
        num_parameters = sum(p.numel() for p in build_whole(tiny("deepseek_v3", 1)).parameters())
        assert bytes_high - bytes_low == 4 * num_parameters


@pytest.mark.distributed
def test_training_with_bfloat16_moments_is_close_and_repeatable(two_ranks: RankPool) -> None:
    training = Training(learning_rate=3e-3)
    low = replace(tiny("deepseek_v3", 2, precision=BF16_STATES, ep=2), training=training)
    high = replace(low, precision=FP32)
    first, again, exact = (two_ranks.run(train, case, 10) for case in (low, low, high))

    assert first == again
    assert first[0][-1][0] < 0.95 * first[0][0][0]
    assert first[0][-1] != exact[0][-1]
    assert first[0][-1][0] == pytest.approx(exact[0][-1][0], rel=0.02)
