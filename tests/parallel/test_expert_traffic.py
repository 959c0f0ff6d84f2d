"""What experts' exchanges move, counted in real steps, equals what the choices of tokens say."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from msgspec.structs import replace

from bench.expert_load import combine_routing
from bench.instruments.collectives import CollectiveCounter
from bench.instruments.observation import Observation
from bench.instruments.routing import RoutingCounter
from bench.trainer import Trainer
from models.layers.router import Routes
from parallel.expert_per_rank import find_visits
from tests.parallel.cases import count_collectives, tiny
from tests.rank_pool import RankPool
from workloads.workload import Workload

distributed = pytest.mark.distributed
FLOAT32_BYTES = INT32_BYTES = 4


class Traffic(NamedTuple):
    """What a rank saw of one step."""

    all_to_all: dict[str, int]
    routing: dict[str, Any]
    choices: list[list[list[int]]]
    """The experts of each token, layer by layer."""


def watch(workload: Workload) -> Traffic:
    """Count the second step's exchanges, and keep what its routers choose."""
    trainer = Trainer(workload, torch.device("cpu"))
    trainer.step(0)
    choices: list[list[list[int]]] = []
    collectives = CollectiveCounter()
    for _, moe in trainer.moe_layers():
        moe.router.register_forward_hook(lambda _, args, r: choices.append(r.experts_TK.tolist()))
    routing = RoutingCounter(trainer.moe_layers(), workload.plan.ep)
    with routing, Observation([collectives]):
        trainer.step(1)
    return Traffic(collectives.report()["ep"]["all_to_all"], routing.report(), choices)


class Sent(NamedTuple):
    """What a rank sends to each rank in a layer."""

    rows: list[int]
    tickets: list[int]


def sent_by(choices: list[list[int]], num_experts: int, num_ranks: int) -> Sent:
    """Return a row for each token and rank that it visits, a ticket for each of its experts."""
    visits = [[expert * num_ranks // num_experts for expert in experts] for experts in choices]
    return Sent(
        [sum(rank in ranks for ranks in visits) for rank in range(num_ranks)],
        [sum(ranks.count(rank) for ranks in visits) for rank in range(num_ranks)],
    )


def busiest(numbers: Sequence[list[int]], rank: int) -> int:
    """Return what a rank sends, or receives if that is more: ``numbers[source][destination]``."""
    return max(sum(numbers[rank]), sum(row[rank] for row in numbers))


@distributed
@pytest.mark.parametrize(
    ("N", "routing"),
    [(2, "learned"), (2, "balanced"), (2, "balanced_strided"), (2, "random"), (4, "learned")],
)
def test_a_token_travels_once_to_each_rank_it_visits(
    two_ranks: RankPool, four_ranks: RankPool, N: int, routing: str
) -> None:
    """Rows there and back, forward and backward; a ticket of 8 bytes for each expert and its
    gradient; the counts of each rank's experts and its rows once.

    And as many rows as the ranks per token say that the record has.
    """
    workload = replace(tiny("deepseek_v3", N, ep=N), routing=routing)
    config = workload.model
    ranks = (two_ranks if N == 2 else four_ranks).run(watch, workload)
    layers = [
        [sent_by(choices, config.num_experts, N) for choices in layer]
        for layer in zip(*(traffic.choices for traffic in ranks), strict=True)
    ]
    counts_bytes = (config.num_experts + N) * INT32_BYTES

    for rank, traffic in enumerate(ranks):
        moved = len(layers) * counts_bytes
        for layer in layers:
            rows, tickets = (busiest(numbers, rank) for numbers in zip(*layer, strict=True))
            moved += (4 * rows * config.dim + 2 * tickets * 2) * FLOAT32_BYTES
        assert traffic.all_to_all == {"count": 7 * len(layers), "bytes": moved}
    routed = combine_routing([traffic.routing for traffic in ranks])
    num_rows = sum(sum(sent.rows) for layer in layers for sent in layer)
    assert routed["ranks_per_token"] == num_rows / (workload.tokens_per_step * len(layers))
    assert routed["dropped_tokens"] == 0


@distributed
@pytest.mark.parametrize("exchange", ["per_rank", "per_expert"])
def test_chunks_move_the_same_rows_in_more_exchanges(two_ranks: RankPool, exchange: str) -> None:
    """All counts go together, so that the host waits once; nothing else is added."""
    whole = tiny("deepseek_v3", 2, ep=2, expert_exchange=exchange)
    whole = replace(whole, routing="balanced")
    chunks = replace(whole, plan=replace(whole.plan, expert_chunks=4))
    first, second = (two_ranks.run(watch, workload)[0] for workload in (whole, chunks))
    layers, config = len(first.choices), whole.model
    counts = layers * (config.num_experts + 2 * (exchange == "per_rank")) * INT32_BYTES

    assert second.all_to_all["count"] - layers == 4 * (first.all_to_all["count"] - layers)
    assert second.all_to_all["bytes"] == first.all_to_all["bytes"] + 3 * counts


@distributed
def test_chunks_gather_and_reduce_sharded_experts_once(four_ranks: RankPool) -> None:
    whole = tiny("deepseek_v3", 4, ep=2)
    chunks = replace(whole, plan=replace(whole.plan, expert_chunks=4))
    first, second = (
        [rank["efsdp"] for rank in four_ranks.run(count_collectives, workload)]
        for workload in (whole, chunks)
    )

    assert first == second
    assert all(counts["reduce_scatter"]["count"] > 0 for counts in first)


@pytest.mark.parametrize(("stride", "visits"), [(1, 2), (33, 8)])
def test_the_published_routing_visits_a_quarter_of_the_ranks(stride: int, visits: int) -> None:
    """256 experts on 64 ranks, 8 per token: neighbours live on 2 ranks, distant ones on 8."""
    T, K, E, N = 512, 8, 256, 64
    experts_TK = (torch.arange(T * K) * stride % E).view(T, K)

    counts_NX = find_visits(Routes(torch.ones(T, K), experts_TK), E, N).counts_NX

    assert counts_NX[:, -1].sum() == visits * T
    assert counts_NX[:, :-1].tolist() == [[T * K // E] * (E // N)] * N


def random_routes(T: int, K: int, E: int, generator: torch.Generator) -> Routes:
    experts = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(T)])
    weights = torch.rand(T, K, generator=generator, dtype=torch.float64)
    return Routes(weights.requires_grad_(), experts)


def test_tickets_lead_to_the_rows_of_their_tokens() -> None:
    """In order of the expert, each with its weight and the number of its token's row."""
    T, K, E, N = 23, 5, 12, 3
    routes = random_routes(T, K, E, torch.Generator().manual_seed(0))

    visits = find_visits(routes, E, N)

    found = {}
    tickets = iter(visits.tickets_P2.tolist())
    for rank in range(N):
        tokens = visits.visited_NT[rank].nonzero().flatten().tolist()
        assert len(tokens) == visits.counts_NX[rank, -1]
        for expert, count in enumerate(visits.counts_NX[rank, :-1].tolist(), rank * E // N):
            for _ in range(count):
                weight, number = next(tickets)
                found[tokens[int(number)], expert] = weight
    assert next(tickets, None) is None
    expected = [
        ((token, expert), weight)
        for token in range(T)
        for expert, weight in zip(
            routes.experts_TK[token].tolist(), routes.weights_TK[token].tolist(), strict=True
        )
    ]
    assert found == dict(expected)
