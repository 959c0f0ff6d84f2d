"""What families add to layers is spread and sharded over ranks: biases, sinks, tied embeddings.

Losses and gradient norms under each layout equal those of one rank.
"""

from typing import Any

import pytest

from models.gpt_oss import GPT_OSS_PROXY
from models.protocol import ModelConfig
from models.qwen3 import QWEN3_DENSE_PROXY
from parallel.plan import ParallelPlan
from tests.parallel.cases import FP32, train
from tests.rank_pool import RankPool
from workloads.workload import Workload

pytestmark = pytest.mark.distributed

CASES: list[tuple[ModelConfig, dict[str, Any]]] = [
    # Biases of experts are spread with them; those of columns and the sinks are divided.
    (GPT_OSS_PROXY, {"ep": 2}),
    (GPT_OSS_PROXY, {"tp": 2, "ep": 2, "remat": "selective"}),
    # Embedding and head are one parameter, sharded as one.
    (QWEN3_DENSE_PROXY, {}),
    (QWEN3_DENSE_PROXY, {"dp_replicate": 2, "microbatches": 2}),
]


def make(model: ModelConfig, world_size: int, **plan: Any) -> Workload:
    return Workload(
        name="tiny",
        model=model,
        sequence_length=256,
        global_batch_size=4,
        precision=FP32,
        plan=ParallelPlan(**plan).resolve(world_size),
    )


@pytest.mark.parametrize(("model", "plan"), CASES, ids=lambda value: str(value)[:40])
def test_two_ranks_equal_one(
    one_rank: RankPool, two_ranks: RankPool, model: ModelConfig, plan: dict[str, Any]
) -> None:
    (reference,) = one_rank.run(train, make(model, 1))

    for steps in two_ranks.run(train, make(model, 2, **plan)):
        for step, expected in zip(steps, reference, strict=True):
            assert step == pytest.approx(expected, rel=1e-5)
