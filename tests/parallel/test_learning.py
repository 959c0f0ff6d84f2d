"""Training learns: the loss falls on real text, and the router's load evens out."""

import math

import pytest
from msgspec.structs import replace

from tests.parallel.cases import expert_loads, tiny, train
from tests.rank_pool import RankPool
from workloads.workload import Precision, Training

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("model", "precision"),
    [
        ("deepseek_v3", Precision(quantization="mxfp8")),
        pytest.param("muse_spark", Precision(), marks=pytest.mark.exhaustive),
    ],
)
def test_loss_falls_on_text(two_ranks: RankPool, model: str, precision: Precision) -> None:
    """From no knowledge (the log of the vocabulary) to below that of 26 equally likely bytes."""
    workload = replace(
        tiny(model, 2, ep=2, precision=precision), training=Training(learning_rate=3e-3)
    )
    losses = [step[0] for step in two_ranks.run(train, workload, 30)[0]]

    assert losses[0] == pytest.approx(math.log(workload.model.vocab_size), rel=0.2)
    assert losses[-1] < math.log(26)


def test_bias_balancing_evens_the_load(two_ranks: RankPool) -> None:
    """The fullest expert's share of the tokens falls when the bias moves against the load."""
    base = tiny("deepseek_v3", 2, ep=2)
    still = replace(base, training=Training(expert_bias_rate=0.0))
    moving = replace(base, training=Training(expert_bias_rate=0.02))

    unbalanced = two_ranks.run(expert_loads, still, 30)[0]
    balanced = two_ranks.run(expert_loads, moving, 30)[0]

    for before, after in zip(unbalanced, balanced, strict=True):
        assert max(after) / sum(after) < max(before) / sum(before)
