"""The split of a model into stages: optimal, complete, and with the parameters of the whole."""

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from models.counts import FORWARD_AND_BACKWARD
from models.deepseek_v3 import DEEPSEEK_V3_671B_MTP1
from models.initialization import collect_inits, initialize
from models.muse_spark import MUSE_SPARK
from models.protocol import Model
from models.qwen3_vl import QWEN3_VL_PROXY
from parallel.stages import (
    Boundary,
    boundary,
    cut,
    describe_parts,
    part_costs,
    part_names,
    place,
    split,
    stage_durations,
)
from tests.parallel.cases import MODELS as DECODERS
from workloads.data import open_data

MODELS = {**DECODERS, "qwen3_vl": replace(QWEN3_VL_PROXY, image_interval=20)}
LARGE = {"deepseek_v3": DEEPSEEK_V3_671B_MTP1, "muse_spark": MUSE_SPARK}
COSTS = st.lists(st.integers(0, 50), min_size=1, max_size=9)


def whole(model: str) -> Model:
    with torch.device("meta"):
        return MODELS[model].build()


@given(COSTS, st.data())
def test_split_is_contiguous_complete_and_without_empty_stages(
    costs: list[int], data: st.DataObject
) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))

    ranges = split(costs, num_stages)

    assert [i for indices in ranges for i in indices] == list(range(len(costs)))
    assert len(ranges) == num_stages
    assert all(indices for indices in ranges)


@given(COSTS, st.data())
def test_no_split_has_a_smaller_largest_stage_or_then_fewer_squares(
    costs: list[int], data: st.DataObject
) -> None:
    """Against every split there is."""
    num_stages = data.draw(st.integers(1, len(costs)))

    def value(ends: tuple[int, ...]) -> tuple[int, int]:
        bounds = (0, *ends, len(costs))
        sums = [sum(costs[a:b]) for a, b in pairwise(bounds)]
        return max(sums), sum(s * s for s in sums)

    best = min(map(value, combinations(range(1, len(costs)), num_stages - 1)))

    ranges = split(costs, num_stages)
    assert value(tuple(indices.stop for indices in ranges[:-1])) == best


def test_too_few_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="3 parts do not make 4 stages"):
        split([1, 2, 3], 4)


@pytest.mark.parametrize("model", LARGE)
@pytest.mark.parametrize("sequence_length", [4096, 196_608])
def test_costs_of_the_parts_add_up_to_the_ledger(model: str, sequence_length: int) -> None:
    """The embedding's own small cost apart: the ledger of FLOPs does not count lookups."""
    config = LARGE[model]
    with torch.device("meta"):
        costs = part_costs(config.build(), sequence_length)
    lookup = FORWARD_AND_BACKWARD * 2 * config.dim

    total = sum(cost.total for cost in costs.values())

    ledger = config.flops_per_token(sequence_length)
    assert total - lookup == ledger.causal


def test_published_layout_places_mtp_and_head_by_weight() -> None:
    """671B with MTP over 4 ranks of 4 stages: the last stages hold fewer layers."""
    with torch.device("meta"):
        placement = place(DEEPSEEK_V3_671B_MTP1.build(), 16, 4096)
    sizes = [len(parts) for parts in placement.stages]
    costs = [sum(placement.costs[part].total for part in parts) for parts in placement.stages]

    assert placement.stages[-1][-1] == "head"
    assert sum(sizes) == 64
    assert max(sizes) - min(sizes[:-1]) <= 2
    assert max(costs) <= 1.35 * sum(costs) / len(costs)
    assert describe_parts(placement).startswith("embedding to layers.")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_stages_hold_every_parameter_once_but_the_embedding(model: str, num_stages: int) -> None:
    names = set(collect_inits(whole(model)))
    placement = place(whole(model), num_stages, 128)

    stages = [cut(whole(model), placement, index) for index in range(num_stages)]

    held = [set(collect_inits(stage.model)) for stage in stages]
    assert set.union(*held) == names
    twice = {name for name in names if sum(name in stage for stage in held) > 1}
    copies = [i for i, stage in enumerate(held) if "embedding.weight" in stage]
    assert twice == ({"embedding.weight"} if len(copies) > 1 else set())
    assert copies == placement.embedding_stages


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_stages", [2, 4, 5])
def test_stages_one_after_another_compute_the_whole(model: str, num_stages: int) -> None:
    """Without ranks: the losses of a chain of stages are, bit for bit, those of the model."""
    config = MODELS[model]
    data = open_data(
        "text", sequence_length=64, global_batch_size=2, vocab_size=config.vocab_size, seed=0
    )
    tokens, labels, positions = data.batch(0, 0, 1, 0, 1)
    placement = place(whole(model), num_stages, 64)

    def filled(network: Model) -> Model:
        inits = collect_inits(network)
        network.to_empty(device="cpu")
        initialize(network, inits, seed=1)
        return network

    expected = filled(whole(model))(tokens, labels, positions)
    state: tuple[torch.Tensor, ...] = ()
    for index in range(num_stages):
        stage = cut(whole(model), placement, index)
        assert len(state) == sum(stage.enters)
        state = filled(stage.model).advance(state, tokens, positions)
        assert len(state) == (sum(stage.leaves) if stage.leaves else 1 + config.num_mtp_layers)
    losses = stage.model.losses(state, labels, positions)

    assert losses.total.item() == expected.total.item()
    assert losses.mtp_sum.item() == expected.mtp_sum.item()


def test_what_crosses_a_boundary() -> None:
    """The stream; from the final norm on a hidden state per head; the stream ends with the MTP."""
    config = replace(MODELS["deepseek_v3"], num_mtp_layers=2)

    with torch.device("meta"):
        network = config.build()
    crossing = {name: boundary(network, name) for name in part_names(config)}

    assert crossing["embedding"] == Boundary(0, 0)
    assert crossing["layers.1"] == Boundary(1, 0)
    assert crossing["mtp.0"] == Boundary(1, 0)
    assert crossing["mtp.1"] == Boundary(1, 2)
    assert crossing["head"] == Boundary(0, 3)


def test_backward_is_twice_forward_and_the_first_stage_has_it_in_one() -> None:
    durations = stage_durations(place(whole("muse_spark"), 3, 128))

    for times in durations:
        assert times.backward == 2 * times.forward
    assert durations[0].backward_input == 0
    assert durations[1].backward_input > durations[1].backward_weight
