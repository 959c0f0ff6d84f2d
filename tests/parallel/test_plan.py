"""Plans that cannot run are refused, with the numbers and the nearest plan that could."""

from typing import Any

import pytest

from parallel.plan import ParallelPlan


class TestRefusals:
    """Before any rank starts, with the numbers and what would fit."""

    @pytest.mark.parametrize(
        "plan, message",
        [
            ({"pp": 1, "schedule": "GPipe"}, "plan.schedule=GPipe needs a pipeline"),
            ({"pp": 1, "stages_per_rank": 2}, "plan.stages_per_rank=2 needs a pipeline"),
            ({"pp": 4, "microbatches": 2}, "as many as ranks.*plan.microbatches=4 would"),
            (
                {"pp": 2, "schedule": "1F1B", "stages_per_rank": 2, "microbatches": 4},
                "1F1B has 1 on a rank; plan.stages_per_rank=1 would fit",
            ),
            (
                {"pp": 2, "schedule": "ZBVZeroBubble", "microbatches": 4},
                "ZBVZeroBubble has 2 on a rank; plan.stages_per_rank=2 would fit",
            ),
            (
                {"pp": 2, "schedule": "DualPipeV", "stages_per_rank": 2, "microbatches": 3},
                "as many as stages.*plan.microbatches=4 would",
            ),
            (
                {"pp": 4, "schedule": "Interleaved1F1B", "microbatches": 9},
                "rounds of equal size.*plan.microbatches=10 would",
            ),
            (
                {
                    "pp": 2,
                    "schedule": "InterleavedZeroBubble",
                    "microbatches": 2,
                    "reshard_after_forward": True,
                },
                "needs plan.reshard_after_forward=False",
            ),
            (
                {"pp": 2, "schedule": "InterleavedZeroBubble", "microbatches": 2, "remat": "full"},
                "needs plan.remat=none",
            ),
        ],
        ids=str,
    )
    def test_plan(self, plan: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            ParallelPlan(**plan)

    def test_more_ranks_than_the_run_has(self) -> None:
        message = r"needs 2 ranks, the run has 1; plan.pp=1 plan.dp_shard=1 would fit"
        with pytest.raises(ValueError, match=message):
            ParallelPlan(pp=2, microbatches=2).resolve(1)

    def test_sizes_that_do_not_multiply_to_the_ranks(self) -> None:
        message = r"needs 12 ranks, the run has 8; plan.tp=1 plan.dp_shard=4 would fit"
        with pytest.raises(ValueError, match=message):
            ParallelPlan(pp=2, tp=3, dp_shard=2, microbatches=2).resolve(8)
        ParallelPlan(pp=2, tp=1, dp_shard=4, microbatches=2).resolve(8)
        with pytest.raises(ValueError, match=r"the run has 2; plan.dp_shard=2 would fit"):
            ParallelPlan(dp_shard=4).resolve(2)

    def test_more_stages_than_parts(self) -> None:
        plan = ParallelPlan(
            pp=4, schedule="Interleaved1F1B", stages_per_rank=2, microbatches=4
        ).resolve(4)

        plan.check_stages(num_layers=5, num_mtp_layers=1)
        with pytest.raises(ValueError, match=r"8 stages, the model has 5 parts.*plan.pp=2 would"):
            plan.check_stages(num_layers=2, num_mtp_layers=1)
