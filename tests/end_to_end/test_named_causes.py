"""A slowdown put into one thing of a real run is what ``compare`` names first."""

from pathlib import Path

import pytest

from bench.runner import run
from bench.spec import RunSpec
from reports.account import COMPUTE, HOST, LATE, TRANSFER
from reports.comparison import Comparison, compare_all
from reports.sides import read_sides
from reports.verdict import largest

SETTINGS = [
    "precision.quantization=none",
    "model.num_layers=2",
    "workload.sequence_length=64",
    "workload.global_batch_size=2",
]

pytestmark = pytest.mark.end_to_end
exhaustive = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


def slowed_run(out: Path, what: str, monkeypatch) -> Path:
    """Run the proxy on two gloo ranks with ``what`` slowed down and return where it lies."""
    spec = RunSpec(
        workload="deepseek_v3_proxy",
        ranks=2,
        threads=1,
        steps=1,
        warmup_steps=1,
        device="cpu",
        instruments=False,
        set=SETTINGS,
    )
    monkeypatch.setenv("SLOWED", what)
    record, folder = run(spec, out / (what or "base"), worker="tests.end_to_end.slowed_worker")
    assert record.status == "ok", record.failure
    assert record.metrics["exposed_communication"].value is not None
    return folder.parent


@pytest.fixture(scope="module")
def base(out) -> Path:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return slowed_run(out, "", monkeypatch)


@pytest.mark.parametrize(
    ("what", "cause", "item", "words"),
    [
        ("attention", COMPUTE, "attention", "the operator class attention"),
        pytest.param(
            "collective", TRANSFER, "all_reduce", "the collective all_reduce", marks=exhaustive
        ),
        ("rank", LATE, "rank 1", "rank 1, which the others wait for"),
        pytest.param(
            "host",
            HOST,
            "",
            "the host, which leaves the device nothing to do",
            marks=exhaustive,
        ),
    ],
)
def test_what_was_slowed_down_is_named_first(out, base, monkeypatch, what, cause, item, words):
    slow = slowed_run(out, what, monkeypatch)

    (comparison,), reasons = compare_all(read_sides([base, slow]))

    top = largest(comparison.items)
    assert (top.group, top.name.partition(" over ")[0]) == (cause, item)
    assert f"the largest cause is {words}" in comparison.verdict
    assert reasons == {} and comparison.step.after > comparison.step.before
    assert_adds_up(comparison)


def assert_adds_up(comparison: Comparison) -> None:
    change = 1e3 * (comparison.step.after - comparison.step.before)
    for table in (comparison.causes, comparison.items):
        assert sum(row.change for row in table.rows) == pytest.approx(change, rel=1e-9)
    computing = comparison.classes.change
    assert comparison.operators.change == pytest.approx(computing, rel=1e-9)
