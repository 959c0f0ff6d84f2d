"""Rematerialization recomputes what the policy says, and frees the activations for it."""

import pytest

from parallel.plan import Remat
from tests.parallel.cases import count_operators, peak_tensor_bytes, tiny
from tests.rank_pool import RankPool

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("model", ["deepseek_v3", "muse_spark"])
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


@pytest.mark.parametrize("model", ["deepseek_v3", "muse_spark"])
def test_peak_memory_falls_with_each_policy(one_rank: RankPool, model: str) -> None:
    policies: tuple[Remat, ...] = ("none", "selective", "full")
    none, selective, full = (
        one_rank.run(peak_tensor_bytes, tiny(model, 1, remat=policy))[0]["peak_tensor_bytes"]
        for policy in policies
    )

    assert full < selective < none
