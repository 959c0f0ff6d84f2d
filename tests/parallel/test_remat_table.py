"""The table of a block says what a whole training step really keeps and computes again."""

import pytest
import torch
from msgspec.structs import replace

from bench.instruments.memory import TensorBytes
from bench.instruments.observation import Observation
from bench.instruments.operators import OperatorCounter
from bench.remat_table import tabulate
from bench.trainer import Trainer
from models.batch import Batch
from models.qwen3_5 import QWEN3_5_PROXY
from parallel.plan import ParallelPlan
from tests.parallel.cases import DEEPSEEK, FP32, MUSE
from tests.rank_pool import RankPool
from workloads.workload import Workload

pytestmark = pytest.mark.distributed
MODELS = {"deepseek_v3": DEEPSEEK, "muse_spark": MUSE, "qwen3_5": QWEN3_5_PROXY}
REGIONS = {
    "deepseek_v3": ("attention", "experts", "feed_forward", "projections"),
    "muse_spark": ("attention", "experts", "projections"),
    "qwen3_5": ("attention", "delta_rule", "experts", "feed_forward", "projections"),
}
ROTARY_TABLES = {"deepseek_v3": 2 * (2 * 64) * 16 * 4}
"""Cosines and sines (2 x tokens x pairs, float32): recomputed blocks keep their context alive.

Families that rotate halves keep the tables anyway, as saved tensors of the products.
"""
CASES = [(model, region) for model, regions in REGIONS.items() for region in regions]


def workload(model: str, **plan: object) -> Workload:
    return Workload(
        name="tiny",
        model=MODELS[model],
        sequence_length=64,
        global_batch_size=2,
        precision=FP32,
        plan=ParallelPlan(**plan).resolve(1),
    )


def kept_and_executed(workload: Workload) -> tuple[int, int]:
    """Return the bytes alive after the forward pass of a step, and the step's executed FLOPs."""
    trainer = Trainer(workload, torch.device("cpu"))
    (model,) = trainer.models
    batch = Batch(*trainer._batch(0, 0))
    trainer.step(0)
    operators = OperatorCounter()
    with TensorBytes(trainer.standing_tensors()) as live, Observation([live, operators]):
        losses = model(*batch)
        kept = live.live_bytes
        losses.total.backward()
    return kept, operators.report()["executed_flops"]


@pytest.fixture(scope="module")
def full(one_rank: RankPool) -> dict[str, tuple[int, int]]:
    return {
        model: one_rank.run(kept_and_executed, workload(model, remat="full"))[0] for model in MODELS
    }


@pytest.mark.parametrize(("model", "region"), CASES)
def test_a_region_changes_a_step_as_the_tables_of_its_blocks_say(
    one_rank: RankPool, full: dict[str, tuple[int, int]], model: str, region: str
) -> None:
    """Under FSDP, after a step, with all layers: bytes between the passes, FLOPs of both."""
    tables = tabulate(workload(model)).values()
    rows = [table.regions[region] for table in tables if region in table.regions]
    saved = workload(model, remat="selective", remat_save=(region,))
    kept, executed = one_rank.run(kept_and_executed, saved)[0]

    assert kept - full[model][0] == sum(row.kept_bytes for row in rows) > 0
    assert full[model][1] - executed == sum(row.spared_flops for row in rows) > 0


@pytest.mark.parametrize("model", MODELS)
def test_full_recomputes_what_the_tables_say_and_keeps_nothing(
    one_rank: RankPool, model: str
) -> None:
    """Without MTP, one of whose outputs nobody reads: a step keeps it under one policy alone."""
    none, everything = (
        replace(case, model=replace(case.model, num_mtp_layers=0) if mtp else case.model)
        for case in (workload(model, remat="none"), workload(model, remat="full"))
        for mtp in [case.model.num_mtp_layers]
    )
    tables = tabulate(none).values()
    (kept, executed), (least, most) = (
        one_rank.run(kept_and_executed, case)[0] for case in (none, everything)
    )

    assert all(table.full.kept_bytes == 0 for table in tables)
    held = ROTARY_TABLES.get(model, 0)
    assert kept - least + held == sum(table.none.kept_bytes for table in tables)
    assert most - executed == sum(table.recomputed_flops for table in tables)


def test_a_table_has_the_regions_of_its_block_and_leaves_the_block_as_it_was() -> None:
    base = workload("deepseek_v3")
    tables = tabulate(base)

    assert [*tables] == ["layers.0", "layers.1", "mtp.0"]
    assert [*tables["layers.0"].regions] == ["attention", "feed_forward", "projections"]
    assert tables == tabulate(replace(base, plan=ParallelPlan(remat="full").resolve(1)))
