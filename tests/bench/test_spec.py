"""Specifications: overrides and suites, and how their mistakes are named."""

from pathlib import Path

import msgspec
import pytest

from bench.errors import UsageError
from bench.spec import (
    RunSpec,
    override,
    parse_overrides,
    read_job,
    read_suite,
    write_job,
)
from parallel.plan import ParallelPlan
from workloads.workload import Workload

REPOSITORY = Path(__file__).resolve().parents[2]
WORKLOAD = Workload(name="w", model=ParallelPlan(), sequence_length=8, global_batch_size=2)


class Range(msgspec.Struct, frozen=True, kw_only=True):
    """Two fields that only fit together."""

    low: int = 1
    high: int = 2

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low={self.low} is over high={self.high}")


def changed(*texts: str) -> Workload:
    return override(WORKLOAD, parse_overrides(list(texts)))


def test_overrides_reach_into_nested_structs_and_leave_the_rest():
    workload = changed("plan.ep=2", "plan.remat=full", "sequence_length=16")

    assert workload.plan == ParallelPlan(ep=2, remat="full")
    assert workload.sequence_length == 16
    assert workload.training == WORKLOAD.training


@pytest.mark.parametrize(("text", "value"), [("1e-3", 0.001), ("0.5", 0.5), ("2", 2.0)])
def test_numbers_are_read_as_people_write_them(text, value):
    """YAML 1.1 takes 1e-3 for text."""
    assert changed(f"training.learning_rate={text}").training.learning_rate == value


def test_the_last_of_two_equal_keys_counts():
    assert changed("plan.ep=2", "plan.ep=4").plan.ep == 4


def test_values_that_fit_each_other_may_come_in_any_order():
    texts = ["high=9", "low=5"]
    for order in (texts, texts[::-1]):
        assert override(Range(), parse_overrides(order)) == Range(low=5, high=9)


def test_values_that_do_not_fit_each_other_are_refused():
    with pytest.raises(UsageError, match="low=5 is over high=2"):
        override(Range(), parse_overrides(["low=5"]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("plan.eps=2", r"unknown key plan\.eps; did you mean plan\.ep\?"),
        ("plan.ep.size=2", r"unknown key plan\.ep\.size; plan\.ep has no parts"),
        ("plan=2", "plan is a group; set one of pp, dp_replicate"),
        ("plan.ep=two", "Expected `int`"),
        ("plan.ep=0", r"plan\.ep=0: must be at least 1"),
        ("plan.remat=ful", "did you mean full"),
        ("precision.compute=float16", "bfloat16"),
        ("plan.ep", "expected KEY=VALUE"),
        ("=2", "expected KEY=VALUE"),
        ("plan.ep=[1", r"--set plan\.ep=\[1"),
        ("training.learning_rate=.nan", "finite"),
        ("training.learning_rate=.inf", "finite"),
    ],
)
def test_a_wrong_override_is_named_with_what_would_do(text, message):
    with pytest.raises(UsageError, match=message) as caught:
        changed(text)
    assert "\n" not in str(caught.value)


def test_the_job_file_hands_the_specification_on(tmp_path):
    spec = RunSpec(workload="w", set=["plan.ep=2"], ranks=2, timeout=5.5)
    write_job(tmp_path, spec)

    assert read_job(tmp_path) == spec


def test_a_suite_gives_its_defaults_to_runs_that_do_not_say_otherwise(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text(
        "name: s\ndefaults: {ranks: 2, steps: 5, set: [plan.ep=2]}\n"
        "runs: [{workload: a}, {workload: b, steps: 7, set: [workload.routing=balanced]}]"
    )

    assert read_suite(path).runs == [
        RunSpec(workload="a", ranks=2, steps=5, set=["plan.ep=2"]),
        RunSpec(workload="b", ranks=2, steps=7, set=["plan.ep=2", "workload.routing=balanced"]),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read suite"),
        ("runs: [", "cannot read suite"),
        ("name: s", "has no list of runs"),
        ("- a", "has no list of runs"),
        ("name: s\nruns: [{workload: a, rank: 2}]", "unknown field `rank`"),
        ("name: s\nruns: [{ranks: 2}]", "workload"),
        ("name: s\nruns: [{workload: a, ranks: 0}]", "ranks=0: must be at least 1"),
        ("name: s\nruns: [{workload: a, timeout: 0}]", "must be more than 0 s"),
        ("name: s\nruns: [a]", "Expected `object`"),
        ("name: s\ndefaults: 3\nruns: [{workload: a}]", "defaults"),
        ("name: s\nruns: []", "has no list of runs"),
        ("name: s\nruns: [{workload: a, set: 3}]", "suite"),
    ],
)
def test_a_wrong_suite_is_named_in_one_line(tmp_path, content, message):
    path = tmp_path / "s.yaml"
    if content is not None:
        path.write_text(content)

    with pytest.raises(UsageError, match=message) as caught:
        read_suite(path)
    assert "\n" not in str(caught.value)


def test_every_suite_that_is_shipped_can_be_read():
    paths = sorted((REPOSITORY / "workloads" / "suites").glob("*.yaml"))

    assert "quick" in [read_suite(path).name for path in paths]
