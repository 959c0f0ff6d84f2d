"""Rematerialization recomputes what the policy says, and frees the activations for it."""

import hashlib
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from bench.trainer import Trainer
from models.layers.linear import local
from models.qwen3_5 import QWEN3_5_PROXY
from parallel.plan import ParallelPlan, Remat
from tests.parallel.cases import DEEPSEEK, MUSE, count_operators, peak_tensor_bytes, tiny
from tests.rank_pool import RankPool
from workloads.workload import Workload

pytestmark = pytest.mark.distributed
EACH_MODEL: list[Any] = ["deepseek_v3", pytest.param("muse_spark", marks=pytest.mark.exhaustive)]
REGIONS = ("attention", "delta_rule", "experts", "feed_forward", "projections")
POLICIES: list[dict[str, Any]] = [
    {"remat": "full"},
    {"remat": "selective"},
    {"remat": "selective", "remat_save": ()},
    {"remat": "selective", "remat_save": REGIONS},
    *({"remat": "selective", "remat_save": (region,)} for region in REGIONS),
]


def gradients(workload: Workload) -> dict[str, str]:
    """Return a digest of the gradient of each parameter's part on this rank."""
    trainer = Trainer(workload, torch.device("cpu"))
    trainer._accumulate([trainer._batch(0, 0)])
    return {
        name: hashlib.sha256(local(parameter.grad).numpy().tobytes()).hexdigest()
        for name, parameter in trainer.models[0].named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize(
    "model",
    [DEEPSEEK, pytest.param(MUSE, marks=pytest.mark.exhaustive), QWEN3_5_PROXY],
    ids=lambda x: type(x).__name__,
)
def test_every_policy_gives_the_same_gradients_to_the_bit(one_rank: RankPool, model: Any) -> None:
    base = replace(tiny("deepseek_v3", 1), model=model, sequence_length=64, global_batch_size=2)
    (expected,) = one_rank.run(gradients, base)

    assert len(set(expected.values())) > 10
    for policy in POLICIES:
        plan = ParallelPlan(**policy).resolve(1)
        assert one_rank.run(gradients, replace(base, plan=plan)) == [expected], policy


def test_saved_regions_hold_where_experts_are_spread(two_ranks: RankPool) -> None:
    expected = two_ranks.run(gradients, tiny("deepseek_v3", 2, ep=2))

    for saved in (("feed_forward", "projections"), ("experts",)):
        workload = tiny("deepseek_v3", 2, ep=2, remat="selective", remat_save=saved)
        assert two_ranks.run(gradients, workload) == expected


@pytest.mark.parametrize("model", EACH_MODEL)
def test_attention_and_experts_run_again_only_under_full(one_rank: RankPool, model: str) -> None:
    calls = {
        policy: one_rank.run(count_operators, tiny(model, 1, remat=policy))[0]
        for policy in ("none", "selective", "full")
    }

    for operator in ("titanbench::attention", "aten::topk"):
        once = calls["none"][operator]  # topk stands for the router, which is in the experts' layer
        assert calls["selective"][operator] == once
        assert calls["full"][operator] == 2 * once
    assert calls["none"]["aten::mm"] < calls["selective"]["aten::mm"] <= calls["full"]["aten::mm"]


@pytest.mark.parametrize("model", EACH_MODEL)
def test_peak_memory_falls_with_each_policy(one_rank: RankPool, model: str) -> None:
    policies: tuple[Remat, ...] = ("none", "selective", "full")
    none, selective, full = (
        one_rank.run(peak_tensor_bytes, tiny(model, 1, remat=policy))[0]["peak_tensor_bytes"]
        for policy in policies
    )

    assert full < selective < none
