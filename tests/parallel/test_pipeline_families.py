"""Every family trains through a pipeline as on one rank."""

from typing import Any

import pytest
from msgspec.structs import replace

from models.deepseek_v4 import DEEPSEEK_V4_PROXY
from models.protocol import ModelConfig
from models.qwen3_5 import QWEN3_5_DENSE_PROXY
from parallel.check import check_layout
from parallel.plan import ParallelPlan
from tests.parallel.cases import train
from tests.parallel.test_equivalence import assert_same
from tests.parallel.test_families import FAMILIES, proxy
from tests.rank_pool import RankPool
from workloads.build import build_whole
from workloads.workload import Workload

pytestmark = [pytest.mark.distributed, pytest.mark.exhaustive]
ALL = {**FAMILIES, "deepseek_v4": DEEPSEEK_V4_PROXY}
SPLIT = {"schedule": "ZBVZeroBubble", "stages_per_rank": 2}
TIED_WITH_MTP = [name for name, config in ALL.items() if config is QWEN3_5_DENSE_PROXY]


def pipelined(model: ModelConfig, world_size: int, **plan: Any) -> Workload:
    return replace(proxy(model, world_size, microbatches=2, **plan), global_batch_size=2)


@pytest.mark.parametrize("plan", [{"schedule": "1F1B"}, SPLIT], ids=lambda plan: plan["schedule"])
@pytest.mark.parametrize("family", ALL)
def test_pipelines_equal_one_rank(
    one_rank: RankPool, two_ranks: RankPool, family: str, plan: dict[str, Any]
) -> None:
    model, plan = ALL[family], {"pp": 2, **plan}
    if family in TIED_WITH_MTP and plan["schedule"] == SPLIT["schedule"]:
        with pytest.raises(ValueError, match="a backward in two parts does not allow"):
            check_layout(
                build_whole(pipelined(model, 1)), ParallelPlan(microbatches=2, **plan).resolve(2)
            )
        return
    (alone,) = one_rank.run(train, pipelined(model, 1), 2)

    assert_same(two_ranks.run(train, pipelined(model, 2, **plan), 2), alone)
