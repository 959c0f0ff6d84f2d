"""A block gathers the parameters of the next one before it computes, forward and backward."""

from typing import Any

import pytest
import torch

from bench.instruments.observation import Observation
from bench.trainer import Trainer
from tests.parallel.cases import tiny
from tests.rank_pool import RankPool
from workloads.workload import Workload

pytestmark = pytest.mark.distributed


class Order:
    """Notes gathers of parameters and attention, in the order in which they are dispatched."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def see(self, operator: Any, args: Any, kwargs: Any, output: Any) -> None:
        name = operator._schema.name
        if name == "titanbench::attention":
            self.seen.append("attention")
        elif "allgather" in name or "all_gather_into" in name:
            self.seen.append("gather")


def gathers_before_attention(workload: Workload) -> list[int]:
    """Return how many gathers were issued before each block's attention, in a second step."""
    trainer = Trainer(workload, torch.device("cpu"))
    trainer.step(0)
    order = Order()
    with Observation([order]):
        trainer.step(1)
    positions = [i for i, name in enumerate(order.seen) if name == "attention"]
    return [order.seen[:position].count("gather") for position in positions]


def test_a_block_is_gathered_while_the_one_before_it_computes(two_ranks: RankPool) -> None:
    """The root and the first two blocks before anything computes, then always one block ahead."""
    for counts in two_ranks.run(gathers_before_attention, tiny("deepseek_v3", 2)):
        assert counts == [3, 4, 4]


def test_experts_are_gathered_ahead_with_their_block(four_ranks: RankPool) -> None:
    """Of three blocks the last two have experts, which are gathered on a mesh of their own."""
    for counts in four_ranks.run(gathers_before_attention, tiny("deepseek_v3", 4, ep=2)):
        assert counts == [4, 6, 6]


def test_what_is_recomputed_gathers_nothing_ahead(two_ranks: RankPool) -> None:
    """In the backward its own order counts: one block ahead of the one that is recomputed."""
    workload = tiny("deepseek_v3", 2, remat="full")

    for counts in two_ranks.run(gathers_before_attention, workload):
        assert counts == [3, 4, 4, 6, 7, 7]
