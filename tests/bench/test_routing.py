"""The routing of a record: loads, ranks per token and dropped tokens, against closed forms."""

import pytest
import torch
from msgspec.structs import replace

from bench.expert_load import combine_routing
from bench.instruments.observation import Observation
from bench.instruments.operators import OperatorCounter
from bench.instruments.routing import RoutingCounter, count_visits
from models.batch import Batch
from models.initialization import collect_inits, initialize
from models.protocol import Model
from models.qwen3 import QWEN3_PROXY
from parallel.remat import rematerialize

TOKENS, EXPERTS, LAYERS = 128, 16, 3


def make_model(routing: str) -> Model:
    model = QWEN3_PROXY.build(routing)
    initialize(model, collect_inits(model), seed=0)
    return model


def make_batch() -> Batch:
    tokens = torch.randint(0, 512, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    return Batch(tokens, torch.roll(tokens, -1, 1), torch.arange(TOKENS)[None])


def observe(model: Model, expert_ranks: int) -> dict[str, object]:
    """The combined routing of a step."""
    with RoutingCounter(model.moe_layers(), expert_ranks) as counter:
        model(*make_batch()).total.backward()
    return combine_routing([counter.report()])


@pytest.mark.parametrize(
    ("routing", "expert_ranks", "ranks_per_token"),
    [
        # 4 neighbouring experts of 16, 4 on each of 4 ranks: turns begin on a rank's first.
        ("balanced", 4, 1.0),
        ("balanced", 8, 2.0),
        ("balanced", 16, 4.0),
        # The stride is 5: experts 0 5 10 15 and so on, each on a rank of its own.
        ("balanced_strided", 4, 4.0),
        ("balanced_strided", 16, 4.0),
        ("balanced_strided", 1, 1.0),
    ],
)
def test_balanced_modes_load_alike_and_differ_in_ranks_per_token(
    routing: str, expert_ranks: int, ranks_per_token: float
) -> None:
    found = observe(make_model(routing), expert_ranks)

    assert found == {
        "expert_ranks": expert_ranks,
        "max_load": TOKENS * 4 // EXPERTS,
        "mean_load": TOKENS * 4 / EXPERTS,
        "max_over_mean": 1.0,
        "ranks_per_token": ranks_per_token,
        "dropped_tokens": 0,
    }


def test_random_routing_visits_the_expected_number_of_ranks() -> None:
    """K draws without return of 16 experts on 4 ranks: 4 * (1 - C(12,4)/C(16,4)) ranks."""
    found = observe(make_model("random"), 4)

    assert found["ranks_per_token"] == pytest.approx(4 * (1 - 495 / 1820), abs=0.15)
    assert found["max_over_mean"] > 1 and found["dropped_tokens"] == 0


def test_recomputation_is_not_counted_twice() -> None:
    plain, again = make_model("learned"), make_model("learned")
    rematerialize(again, "full", ())

    assert observe(again, 4) == observe(plain, 4)


def test_looking_on_adds_no_operator() -> None:
    counts = []
    for watched in (False, True):
        model, operators = make_model("learned"), OperatorCounter()
        counter = RoutingCounter(model.moe_layers() if watched else [], 4)
        with counter, Observation([operators]):
            model(*make_batch()).total.backward()
        counts.append(operators.report())

    assert counts[0] == counts[1]


def test_a_lost_row_is_a_dropped_token() -> None:
    model = make_model("balanced")
    layers = model.moe_layers()
    dispatch = layers[0].moe.dispatcher.dispatch

    def lose_two(x, experts_TK):  # type: ignore[no-untyped-def]
        found = dispatch(x, experts_TK)
        return found._replace(offsets_E=found.offsets_E.clamp_max(TOKENS * 4 - 2))

    layers[0].moe.dispatcher.dispatch = lose_two
    with torch.no_grad(), RoutingCounter(layers, 1) as counter:
        model(*make_batch())

    assert combine_routing([counter.report()])["dropped_tokens"] == 2


def test_ranks_add_up() -> None:
    """Two ranks with a layer in common, one of them with a layer of its own, as in a pipeline."""
    layer = {"tokens_per_expert": [6, 2], "tokens": 8, "rank_visits": 8, "rows": 3}
    other = {"tokens_per_expert": [0, 4], "tokens": 4, "rank_visits": 4, "rows": 9}
    alone = {"tokens_per_expert": [5, 5], "tokens": 5, "rank_visits": 10, "rows": 10}
    parts = [
        {"expert_ranks": 2, "layers": {"layers.0": layer, "layers.1": alone}},
        {"expert_ranks": 2, "layers": {"layers.0": other}},
    ]

    assert combine_routing(parts) == {
        "expert_ranks": 2,
        "max_load": 6,
        "mean_load": 22 / 4,
        "max_over_mean": 1.0,
        "ranks_per_token": 22 / 17,
        "dropped_tokens": 0,
    }


def test_a_dense_network_has_no_routing_to_report() -> None:
    config = replace(QWEN3_PROXY, num_experts=0, num_experts_per_token=0)
    model = config.build()
    initialize(model, collect_inits(model), seed=0)
    with RoutingCounter(model.moe_layers(), 1) as counter:
        model(*make_batch())

    assert counter.report() == {}


def test_visits_count_different_ranks() -> None:
    assert count_visits(torch.tensor([[0, 0, 0], [2, 0, 2], [3, 1, 2]])) == 1 + 2 + 3
