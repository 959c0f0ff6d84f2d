"""Qwen3-VL divided: images cross the cuts of sequences, their features travel between stages."""

from typing import Any

import pytest
import torch
from msgspec.structs import replace

from models.layers.images import place_images
from models.qwen3_vl import QWEN3_VL_DENSE_PROXY, QWEN3_VL_PROXY, Qwen3VLConfig
from parallel.check import check_layout
from parallel.plan import ParallelPlan
from parallel.stages import boundary, part_costs
from tests.parallel.cases import FP32, train
from tests.parallel.test_divided_sequences import SMOOTH
from tests.parallel.test_equivalence import assert_same
from tests.rank_pool import RankPool
from workloads.build import build_whole, place_stages
from workloads.data import open_data
from workloads.workload import Workload

S, INTERVAL = 128, 20
MODELS = {
    "experts": replace(QWEN3_VL_PROXY, image_interval=INTERVAL),
    "dense": replace(QWEN3_VL_DENSE_PROXY, image_interval=INTERVAL),
}
BETWEEN_FEATURES = {"schedule": "Interleaved1F1B", "stages_per_rank": 2}
IN_A_V = {"schedule": "ZBVZeroBubble", "stages_per_rank": 2}


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of texts of 15 to 105 tokens: with no image, with one, with several."""
    folder = tmp_path_factory.mktemp("documents")
    for index in range(40):
        (folder / f"{index:02}.txt").write_text(
            "patches of an image "[: 15 + index % 6] * (index % 5 + 1)
        )
    return str(folder)


def workload(model: Qwen3VLConfig, world_size: int, data: str, **plan: Any) -> Workload:
    return Workload(
        name="images",
        model=model,
        sequence_length=S,
        global_batch_size=4,
        data=data,
        precision=FP32,
        training=SMOOTH,
        plan=ParallelPlan(**plan).resolve(world_size),
    )


def case(model: str, more: bool = False, **plan: Any) -> Any:
    marks = [pytest.mark.exhaustive] if more else []
    return pytest.param(model, plan, marks=marks, id=f"{model}-{plan}")


def test_images_stand_on_both_sides_of_every_cut(documents: str) -> None:
    """What the tests below rely on; and documents without images are there, too."""
    vision = QWEN3_VL_PROXY.vision
    data = open_data(documents, sequence_length=S, global_batch_size=4, vocab_size=512, seed=0)
    batches = [data.batch(step, 0, 1, 0, 1) for step in range(3)]
    positions_BS = torch.cat([batch.positions_BS for batch in batches])
    images = place_images(positions_BS, INTERVAL, vision)

    for cut in (S // 4, S // 2, 3 * S // 4):
        assert (images.mask_BS[:, cut - 1] & images.mask_BS[:, cut]).any()
    assert (positions_BS[:, 1:] == 0).any(1).all()
    assert not images.valid_BC.all()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("model", "plan"),
    [
        case("experts", tp=2),
        case("dense", cp=2),
        case("experts", pp=2, microbatches=2, **BETWEEN_FEATURES),
        case("experts", True, tp=2, ep=2, remat="selective"),
        case("experts", True, cp=2, context="ring", remat="full"),
        case("dense", True, pp=2, microbatches=4, **IN_A_V),
    ],
)
def test_two_ranks_equal_one(
    one_rank: RankPool, two_ranks: RankPool, documents: str, model: str, plan: dict[str, Any]
) -> None:
    divided = workload(MODELS[model], 2, documents, **plan)
    check_layout(build_whole(divided), divided.plan)
    (alone,) = one_rank.run(train, workload(MODELS[model], 1, documents))

    assert_same(two_ranks.run(train, divided), alone)


@pytest.mark.distributed
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "plan"),
    [
        case("experts", tp=2, cp=2),
        case("dense", tp=2, cp=2, context="ring"),
        case("experts", tp=2, pp=2, microbatches=2),
        case("dense", cp=2, pp=2, microbatches=4, **IN_A_V),
    ],
)
def test_four_ranks_equal_one(
    one_rank: RankPool, four_ranks: RankPool, documents: str, model: str, plan: dict[str, Any]
) -> None:
    (alone,) = one_rank.run(train, workload(MODELS[model], 1, documents))

    assert_same(four_ranks.run(train, workload(MODELS[model], 4, documents, **plan)), alone)


@pytest.mark.distributed
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "plan",
    [{"tp": 2}, {"cp": 2}, {"pp": 2, "microbatches": 2}, {"pp": 2, "microbatches": 4, **IN_A_V}],
    ids=str,
)
def test_text_alone_is_divided_as_that_of_any_decoder(
    one_rank: RankPool, two_ranks: RankPool, documents: str, plan: dict[str, Any]
) -> None:
    """With an idle tower, which has no gradients."""
    text = replace(QWEN3_VL_DENSE_PROXY, image_interval=0)
    (alone,) = one_rank.run(train, workload(text, 1, documents))

    assert_same(two_ranks.run(train, workload(text, 2, documents, **plan)), alone)


def test_features_cross_a_boundary_until_they_have_been_added() -> None:
    """Two features, for after the first and the second of three layers."""
    with torch.device("meta"):
        model = MODELS["experts"].build()
        text = replace(MODELS["experts"], image_interval=0).build()
    parts = [f"layers.{i}" for i in range(3)] + ["head"]

    assert [boundary(model, part).streams for part in parts[:3]] == [3, 2, 1]
    assert [boundary(text, part).streams for part in parts[:3]] == [1, 1, 1]
    assert boundary(model, "head") == boundary(text, "head") == (1, 0)


def test_the_schedule_of_the_equality_above_cuts_between_the_features() -> None:
    plan = {"pp": 2, "microbatches": 2, **BETWEEN_FEATURES}
    stages = place_stages(workload(MODELS["experts"], 2, "text", **plan)).stages

    assert any(parts[0] == "layers.1" for parts in stages), stages


@pytest.mark.parametrize("num_sequence_parts", [1, 4])
def test_the_first_part_bears_a_tower_for_each_rank_of_a_sequence(num_sequence_parts: int) -> None:
    """All parts together cost what the ledger says, to its whole numbers."""
    config = MODELS["experts"]
    with torch.device("meta"):
        costs = part_costs(config.build(), S, num_sequence_parts=num_sequence_parts)
    ledger = config.flops_per_token(S)
    lookup = 3 * 2 * config.dim
    repeated = (num_sequence_parts - 1) * ledger.terms["vision"].full

    total = sum(cost.total for cost in costs.values())

    assert 0 <= ledger.causal + repeated - (total - lookup) < 3
    assert costs["embedding"].total - lookup == pytest.approx(
        num_sequence_parts * ledger.terms["vision"].full, abs=3
    )
