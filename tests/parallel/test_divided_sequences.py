"""Tensor and context parallelism train the same network as one rank."""

from typing import Any

import pytest
from msgspec.structs import replace

from tests.parallel.cases import peak_tensor_bytes, tiny, train
from tests.parallel.test_equivalence import Steps, assert_same
from tests.rank_pool import RankPool
from workloads.data import open_data
from workloads.workload import Precision, Training, Workload

pytestmark = pytest.mark.distributed

TWO_RANKS: list[dict[str, Any]] = [
    {"tp": 2},
    {"tp": 2, "ep": 2},
    {"tp": 2, "remat": "selective", "microbatches": 2},
    {"cp": 2},
    {"cp": 2, "ep": 2},
    {"cp": 2, "context": "ulysses"},
    {"cp": 2, "context": "ring"},
    {"cp": 2, "context": "ring", "remat": "full", "microbatches": 2},
]
TWO_RANKS_TOO: list[dict[str, Any]] = [
    {"tp": 2, "remat": "full"},
    {"cp": 2, "remat": "full", "microbatches": 2},
    {"cp": 2, "context": "ulysses", "remat": "selective"},
    {"cp": 2, "context": "ring", "ep": 2},
    {"cp": 2, "context": "ring", "remat": "selective"},
    {"cp": 2, "context": "ring", "remat": "selective", "remat_save": ("projections",)},
    {"cp": 2, "context": "ring", "reshard_after_forward": False},
]
INTERLEAVED = {"microbatches": 4, "schedule": "Interleaved1F1B", "stages_per_rank": 2}
IN_A_V = {"microbatches": 4, "schedule": "ZBVZeroBubble", "stages_per_rank": 2}
FOUR_RANKS: list[dict[str, Any]] = [
    {"tp": 2},
    {"tp": 2, "pp": 2, "microbatches": 2},
    {"cp": 2},
    {"cp": 2, "ep": 4},
    {"cp": 2, "tp": 2, "ep": 2},
    {"cp": 2, "tp": 2, "context": "ring"},
    {"cp": 4, "context": "ring"},
    {"cp": 2, "pp": 2, "context": "ring", **INTERLEAVED},
]
FOUR_RANKS_TOO: list[dict[str, Any]] = [
    {"tp": 2, "ep": 4},
    {"tp": 2, "dp_replicate": 2, "ep": 2},
    {"tp": 2, "pp": 2, **IN_A_V},
    {"cp": 4},
    {"cp": 2, "dp_replicate": 2, "context": "ulysses"},
    {"cp": 2, "pp": 2, **INTERLEAVED},
    {"cp": 2, "tp": 2},
    {"cp": 2, "context": "ring"},
    {"cp": 2, "context": "ring", "ep": 4},
    {"cp": 2, "context": "ring", "dp_replicate": 2, "remat": "selective"},
    {"cp": 4, "context": "ring", "remat": "full", "microbatches": 2},
    {"cp": 2, "tp": 2, "context": "ring", "remat": "selective", "ep": 2},
    {"cp": 2, "pp": 2, "context": "ring", **IN_A_V},
]
EIGHT_RANKS: list[dict[str, Any]] = [
    {"tp": 2, "cp": 2, "pp": 2, "microbatches": 2},
]
EIGHT_RANKS_TOO: list[dict[str, Any]] = [
    {"tp": 2, "cp": 2, "ep": 8},
    {"tp": 2, "cp": 2, "pp": 2, "context": "ring", **IN_A_V},
    {"tp": 2, "cp": 4, "ep": 8, "context": "ring"},
]
TENSOR_AND_CONTEXT: list[dict[str, Any]] = [
    {"tp": 2},
    {"cp": 2},
    {"cp": 2, "context": "ulysses"},
    {"cp": 2, "context": "ring"},
]
SMOOTH = Training(epsilon=1e-3)
"""AdamW whose update is proportional to small gradients.

With the usual epsilon an update is a sign: rounding decides the direction of parameters whose
gradient is nothing but rounding, and the next step's choice of experts with it.
"""
TOLERANCE = {"deepseek_v3": 1e-6, "muse_spark": 1e-4}
"""Muse Spark scales normed queries by 44: its softmax enlarges the rounding of every layer."""


@pytest.fixture(scope="module", params=["deepseek_v3", "muse_spark"])
def model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of short texts: every sequence of 128 tokens holds several, cut anywhere."""
    folder = tmp_path_factory.mktemp("documents")
    words = ["the", "rank", "that", "holds", "a", "token", "sends", "its", "keys", "to", "others"]
    for index in range(60):
        text = " ".join(words[(index * step) % len(words)] for step in range(1, 2 + index % 12))
        (folder / f"{index:02}.txt").write_text(text)
    return str(folder)


@pytest.fixture(scope="module")
def reference(model: str, documents: str, one_rank: RankPool) -> Steps:
    (steps,) = one_rank.run(train, smooth(model, 1, data=documents))
    return steps


def plans(quick: list[dict[str, Any]], more: list[dict[str, Any]]) -> Any:
    """Return a mark that runs the quick plans always and more of them where all are asked for."""
    exhaustive = [pytest.param(plan, marks=pytest.mark.exhaustive) for plan in more]
    return pytest.mark.parametrize("plan", [*quick, *exhaustive], ids=str)


def smooth(model: str, world_size: int, **settings: Any) -> Workload:
    return replace(tiny(model, world_size, **settings), training=SMOOTH)


def test_every_sequence_holds_several_documents(documents: str) -> None:
    """What the tests below rely on: documents begin within chunks of every sequence."""
    data = open_data(documents, sequence_length=128, global_batch_size=4, vocab_size=512, seed=0)
    batch = data.batch(0, rank=0, num_ranks=1, microbatch=0, num_microbatches=1)
    starts_BS = batch.positions_BS[:, 1:] == 0

    assert (starts_BS.sum(1) > 2).all()
    assert len({tuple(row.nonzero().flatten().tolist()) for row in starts_BS}) == 4


@plans(TWO_RANKS, TWO_RANKS_TOO)
def test_two_ranks_equal_one(
    two_ranks: RankPool, reference: Steps, model: str, documents: str, plan: dict[str, Any]
) -> None:
    steps = two_ranks.run(train, smooth(model, 2, data=documents, **plan))
    assert_same(steps, reference, relative=TOLERANCE[model])


@plans(FOUR_RANKS, FOUR_RANKS_TOO)
def test_four_ranks_equal_one(
    four_ranks: RankPool, reference: Steps, model: str, documents: str, plan: dict[str, Any]
) -> None:
    steps = four_ranks.run(train, smooth(model, 4, data=documents, **plan))
    assert_same(steps, reference, relative=TOLERANCE[model])


@plans(EIGHT_RANKS, EIGHT_RANKS_TOO)
def test_eight_ranks_equal_one(
    eight_ranks: RankPool, reference: Steps, model: str, documents: str, plan: dict[str, Any]
) -> None:
    steps = eight_ranks.run(train, smooth(model, 8, data=documents, **plan))
    assert_same(steps, reference, relative=TOLERANCE[model])


@pytest.mark.exhaustive
@pytest.mark.parametrize("plan", TENSOR_AND_CONTEXT, ids=str)
def test_first_step_is_equal_to_rounding(
    one_rank: RankPool, two_ranks: RankPool, model: str, plan: dict[str, Any]
) -> None:
    (alone,) = one_rank.run(train, tiny(model, 1), 1)

    assert_same(two_ranks.run(train, tiny(model, 2, **plan), 1), alone, relative=1e-6)


@pytest.mark.parametrize("plan", TENSOR_AND_CONTEXT, ids=str)
def test_same_seed_and_plan_give_the_same_bits(
    two_ranks: RankPool, model: str, plan: dict[str, Any]
) -> None:
    workload = tiny(model, 2, **plan)

    first, second = (two_ranks.run(train, workload, 2) for _ in range(2))

    assert first == second
    assert first[0] == first[1]


@plans(TENSOR_AND_CONTEXT, [{"cp": 2, "context": "ring", "remat": "selective"}])
def test_mxfp8_products_divide(
    one_rank: RankPool, two_ranks: RankPool, plan: dict[str, Any]
) -> None:
    """Rows and columns are cut between blocks of 32: the same values are quantized alike."""
    mxfp8 = Precision(compute="bfloat16", quantization="mxfp8")

    alone = one_rank.run(train, tiny("deepseek_v3", 1, precision=mxfp8), 1)
    divided = two_ranks.run(train, tiny("deepseek_v3", 2, precision=mxfp8, **plan), 1)

    assert divided[0][0][:2] == pytest.approx(alone[0][0][:2], rel=1e-3)


@pytest.mark.parametrize("plan", TENSOR_AND_CONTEXT, ids=str)
def test_peak_memory_falls_as_sequences_are_divided(
    one_rank: RankPool, two_ranks: RankPool, model: str, plan: dict[str, Any]
) -> None:
    """Half of the tokens and half of the shards on each rank; gathered keys are a small rest."""
    (alone,) = one_rank.run(peak_tensor_bytes, tiny(model, 1))
    divided = two_ranks.run(peak_tensor_bytes, tiny(model, 2, **plan))

    for memory in divided:
        assert memory["peak_tensor_bytes"] < 0.7 * alone["peak_tensor_bytes"]
