"""Every family trains under tensor and context parallelism as on one rank."""

from typing import Any

import pytest
from msgspec.structs import replace

from models.deepseek_v2 import DEEPSEEK_V2_PROXY
from models.deepseek_v4 import DEEPSEEK_V4_PROXY
from models.gpt_oss import GPT_OSS_PROXY
from models.kimi_k2 import KIMI_K2_PROXY
from models.kimi_k3 import KIMI_K3_PROXY
from models.llama3_1 import LLAMA3_1_PROXY
from models.muse_glimmer import MUSE_GLIMMER_PROXY
from models.protocol import ModelConfig
from models.qwen3 import QWEN3_DENSE_PROXY, QWEN3_PROXY
from models.qwen3_5 import QWEN3_5_DENSE_PROXY, QWEN3_5_PROXY
from models.qwen3_vl import QWEN3_VL_DENSE_PROXY, QWEN3_VL_PROXY
from parallel.check import check_layout
from parallel.plan import ParallelPlan
from tests.parallel.cases import FP32, train
from tests.parallel.test_divided_sequences import SMOOTH
from tests.parallel.test_equivalence import assert_same
from tests.rank_pool import RankPool
from workloads.build import build_whole
from workloads.workload import Workload

pytestmark = [pytest.mark.distributed, pytest.mark.exhaustive]
FAMILIES = {
    "deepseek_v2": DEEPSEEK_V2_PROXY,
    "gpt_oss": GPT_OSS_PROXY,
    "kimi_k2": KIMI_K2_PROXY,
    "kimi_k3": KIMI_K3_PROXY,
    "llama3_1": LLAMA3_1_PROXY,
    "muse_glimmer": MUSE_GLIMMER_PROXY,
    "qwen3": QWEN3_PROXY,
    "qwen3_dense": QWEN3_DENSE_PROXY,
    "qwen3_5": QWEN3_5_PROXY,
    "qwen3_5_dense": QWEN3_5_DENSE_PROXY,
    # Images of 16 tokens across the cuts at 32 and 48.
    "qwen3_vl": replace(QWEN3_VL_PROXY, image_interval=20),
    "qwen3_vl_dense": replace(QWEN3_VL_DENSE_PROXY, image_interval=20),
}
PLANS: list[dict[str, Any]] = [
    {"tp": 2},
    {"cp": 2},
    {"cp": 2, "context": "ulysses"},
    {"cp": 2, "context": "ring"},
]


def proxy(model: ModelConfig, world_size: int, **plan: Any) -> Workload:
    return Workload(
        name="proxy",
        model=model,
        sequence_length=64,
        global_batch_size=2,
        precision=FP32,
        training=SMOOTH,
        plan=ParallelPlan(**plan).resolve(world_size),
    )


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_divided_steps_equal_one_rank(
    one_rank: RankPool, two_ranks: RankPool, family: str, plan: dict[str, Any]
) -> None:
    model = FAMILIES[family]
    if family == "gpt_oss" and "context" in plan:
        with pytest.raises(ValueError, match=r"plan\.context=gather works"):
            check_layout(build_whole(proxy(model, 2)), ParallelPlan(**plan).resolve(2))
        return
    check_layout(build_whole(proxy(model, 2)), ParallelPlan(**plan).resolve(2))
    (alone,) = one_rank.run(train, proxy(model, 1), 2)

    assert_same(two_ranks.run(train, proxy(model, 2, **plan), 2), alone, relative=1e-4)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_compressed_attention_refuses_to_be_divided(plan: dict[str, Any]) -> None:
    """DeepSeek V4: one shared key head, and entries made of tokens on both sides of a cut."""
    (axis, ranks), *_ = plan.items()

    with pytest.raises(ValueError, match=rf"plan\.{axis}={ranks}.*plan\.{axis}=1 wo"):
        check_layout(build_whole(proxy(DEEPSEEK_V4_PROXY, 2)), ParallelPlan(**plan).resolve(2))
