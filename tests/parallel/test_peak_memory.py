"""Tracked bytes of real steps equal the closed forms, and fall as these say with each dimension.

Routing is balanced, so that ranks differ in nothing but their layout. Parameters, moments and
gradients are exact. Activations are those of one rank divided by the ranks that share a batch, up
to what the tests name: nothing here allows for an unexplained rest of more than a few kilobytes
a rank (ids, positions, rotary tables, scalars).
"""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from parallel.memory_forms import ParameterNumbers, gradients_between_microbatches, states
from tests.parallel.cases import FP32, MODELS, tiny
from tests.parallel.memory_cases import Memory, memory_of_a_step, parameters_of_a_rank
from tests.rank_pool import RankPool
from workloads.workload import Precision, Workload

pytestmark = pytest.mark.distributed
FLOAT32_BYTES = 4
SCALARS_BYTES = 64
BF16_STATES = Precision(compute="float32", optimizer_states="bfloat16")
EACH_MODEL: list[Any] = ["deepseek_v3", pytest.param("muse_spark", marks=pytest.mark.exhaustive)]
Run = Callable[..., list[Memory]]

NO_MTP: dict[str, dict[str, int]] = {"deepseek_v3": {"num_mtp_layers": 0}, "muse_spark": {}}
FURTHER_STREAMS = {"deepseek_v3": 1, "muse_spark": 2}
ROTARY_AND_IDS_BYTES = 160_000
STATES: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {}),
    (2, {"dp_replicate": 2}),
    (2, {"ep": 2}),
    (2, {"tp": 2}),
    (2, {"cp": 2}),
    (2, {"pp": 2, "microbatches": 4}),
    (4, {"dp_replicate": 2, "ep": 2}),
    (4, {"tp": 2, "cp": 2, "ep": 4}),
]


@pytest.fixture(scope="module")
def pools(one_rank: RankPool, two_ranks: RankPool, four_ranks: RankPool) -> dict[int, RankPool]:
    return {1: one_rank, 2: two_ranks, 4: four_ranks}


@pytest.fixture(scope="module")
def run(pools: dict[int, RankPool]) -> Run:
    """Return the memory of every rank under a plan; a plan runs once for all tests."""
    seen: dict[str, list[Memory]] = {}

    def memory(world_size: int, model: str = "deepseek_v3", **plan: Any) -> list[Memory]:
        case = balanced(world_size, model, **plan)
        if str(case) not in seen:
            seen[str(case)] = pools[world_size].run(memory_of_a_step, case)
        return seen[str(case)]

    return memory


def balanced(world_size: int, model: str = "deepseek_v3", **plan: Any) -> Workload:
    return replace(tiny(model, world_size, **plan), routing="balanced")


def after_forward(memory: Memory, microbatch: int = 0) -> int:
    """Return the bytes of activations after a forward: what is neither a weight nor a state."""
    forwards = [kinds for name, _, kinds in memory.after_chunks if name == "forward"]
    return forwards[microbatch]["other"]


def head_gradient(model: str = "deepseek_v3") -> int:
    """Return the bytes of the head's gradient, which its forward computes and keeps."""
    return FLOAT32_BYTES * MODELS[model].vocab_size * MODELS[model].dim


@pytest.mark.parametrize(
    "precision",
    [FP32, pytest.param(BF16_STATES, marks=pytest.mark.exhaustive)],
    ids=["float32", "bfloat16"],
)
@pytest.mark.parametrize(("world_size", "plan"), STATES, ids=str)
def test_states_are_those_of_the_closed_form(
    pools: dict[int, RankPool],
    run: Run,
    world_size: int,
    plan: dict[str, Any],
    precision: Precision,
) -> None:
    """When the optimizer steps, to the byte, on every rank; nothing stays gathered until then."""
    case = balanced(world_size, **plan)
    memories = run(world_size, precision=precision, **plan)
    numbers = pools[world_size].run(parameters_of_a_rank, case)
    moment_bytes = 2 if precision is BF16_STATES else 4

    for memory, (whole, divided, experts, _) in zip(memories, numbers, strict=True):
        expected = states(
            ParameterNumbers(whole, divided, experts), case.plan, moment_bytes=moment_bytes
        )
        found = memory.at_update
        assert found["parameters"] == expected.parameters
        assert found["gradients"] == expected.gradients
        assert found["moments"] == expected.moments
        assert found.get("gathered", 0) == 0
        assert memory.peak["parameters"] == expected.parameters
        assert memory.peak["moments"] == expected.moments


@pytest.mark.parametrize(
    ("world_size", "plan"),
    [(2, {}), (2, {"ep": 2}), (2, {"tp": 2}), (4, {"tp": 2, "ep": 4})],
    ids=str,
)
@pytest.mark.parametrize("when", ["step", "microbatch"])
def test_between_microbatches_gradients_are_whole_or_in_shards(
    pools: dict[int, RankPool], run: Run, world_size: int, plan: dict[str, Any], when: str
) -> None:
    """The second forward ends with the first microbatch's gradients beside its activations."""
    plan = {**plan, "microbatches": 2, "reduce_gradients": when}
    case = balanced(world_size, **plan)
    memories = run(world_size, **plan)
    numbers = pools[world_size].run(parameters_of_a_rank, case)

    for memory, (*numbers_of_rank, _) in zip(memories, numbers, strict=True):
        expected = gradients_between_microbatches(ParameterNumbers(*numbers_of_rank), case.plan)
        waiting = after_forward(memory, 1) - after_forward(memory, 0)
        assert 0 <= waiting - expected <= SCALARS_BYTES


@pytest.mark.parametrize("model", EACH_MODEL)
@pytest.mark.parametrize("plan", [{}, {"ep": 2}], ids=str)
def test_the_peak_halves_over_two_shards(run: Run, model: str, plan: dict[str, Any]) -> None:
    """But for what is whole on every rank while it is used: weights that were gathered, their
    gradients, and what the reduction sends of them; 12 bytes a parameter if all were there at once.
    """
    (alone,) = run(1, model)
    whole = 3 * alone.peak["parameters"]

    for memory in run(2, model, **plan):
        beyond_half = 2 * sum(memory.peak.values()) - sum(alone.peak.values())
        assert 0 <= beyond_half <= whole


@pytest.mark.parametrize("model", EACH_MODEL)
@pytest.mark.parametrize("plan", [{}, {"dp_replicate": 2}, {"ep": 2}], ids=str)
def test_activations_are_divided_by_data_ranks(run: Run, model: str, plan: dict[str, Any]) -> None:
    """All but the head's gradient, which has the size of its weight.

    Expert parallelism adds the indices of its exchange: less than a percent.
    """
    (alone,) = run(1, model)
    expected = (after_forward(alone) - head_gradient(model)) / 2 + head_gradient(model)

    for memory in run(2, model, **plan):
        found = after_forward(memory)
        assert found == pytest.approx(expected, rel=0.01 if "ep" in plan else 0.001)


@pytest.mark.parametrize("model", EACH_MODEL)
@pytest.mark.parametrize(
    ("plan", "most"),
    [
        ({"tp": 2}, 0.59),
        ({"cp": 2}, 0.63),
        ({"cp": 2, "context": "ulysses"}, 0.54),
        ({"cp": 2, "context": "ring"}, 0.55),
    ],
    ids=str,
)
def test_activations_are_divided_by_tensor_and_context_ranks(
    run: Run, model: str, plan: dict[str, Any], most: float
) -> None:
    """Half of one rank's, and what is gathered for the backward: a layer's inputs over tensor
    ranks, keys and values over context ranks, of which the exchange of heads and the ring have
    none. The ring keeps less: what it expands from latents it expands once more.
    """
    (alone,) = run(1, model)
    least = 0.42 if plan.get("context") == "ring" else 0.5

    for memory in run(2, model, **plan):
        share = (after_forward(memory) - head_gradient(model) / 2) / (
            after_forward(alone) - head_gradient(model)
        )
        assert least <= share <= most


@pytest.mark.parametrize("model", EACH_MODEL)
def test_full_rematerialization_keeps_the_inputs_of_blocks(
    pools: dict[int, RankPool], model: str
) -> None:
    """And what the final norm and the embedding keep; of the head the gradients of its inputs."""
    case = balanced(1, model, remat="full")
    case = replace(case, model=replace(case.model, **NO_MTP[model]))
    (memory,) = pools[1].run(memory_of_a_step, case)
    stream = FLOAT32_BYTES * case.tokens_per_step * case.model.dim

    num_streams = case.model.num_layers + 2 + FURTHER_STREAMS[model]
    expected = num_streams * stream + head_gradient(model)
    assert 0 <= after_forward(memory) - expected <= ROTARY_AND_IDS_BYTES
