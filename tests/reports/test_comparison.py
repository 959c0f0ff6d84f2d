"""Comparisons: they add up, name the largest cause, and say what cannot be compared."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.errors import NotComparableError, UsageError
from bench.record import RunRecord
from reports.account import COMPUTE, LATE
from reports.changes import changes
from reports.comparison import compare, compare_all
from reports.sides import read_sides
from reports.verdict import largest
from tests.reports.sample_records import failed_record, measured_record, step_rows, write_run
from tests.reports.sample_traces import balanced, late, write_pair

TABLES = st.dictionaries(
    st.tuples(st.sampled_from("ab"), st.sampled_from("uvwxyz")),
    st.floats(min_value=0.001, max_value=1e6),
)


def sides_of(*paths):
    return read_sides(list(paths))


def slower(factor: float, name: str = "deepseek_v3_proxy", **changed) -> RunRecord:
    rows = [row | {"step_time": factor * row["step_time"]} for row in step_rows()]
    record = measured_record(name, rows=rows)
    return msgspec.structs.replace(record, **changed) if changed else record


def runs(folder, *records):
    for number, record in enumerate(records):
        numbered = msgspec.structs.replace(record, run_id=f"{record.run_id}-{number}")
        write_run(folder, numbered)
    return folder


@settings(deadline=None)
@given(TABLES, TABLES, st.integers(1, 4))
def test_rows_add_up_to_the_whole_however_many_are_shown(before, after, most):
    table = changes(before, after, most=most)
    whole = sum(after.values()) - sum(before.values())

    assert sum(row.change for row in table.rows) == pytest.approx(whole, abs=1e-6)
    assert table.change == pytest.approx(whole, abs=1e-6)
    assert len(table.rows) <= most + 1 or len({*before, *after}) == len(table.rows)
    shares = [row.share_percent for row in table.rows if row.share_percent is not None]
    if shares and abs(whole) > 1:
        assert sum(shares) == pytest.approx(100, rel=1e-6, abs=1e-3)


def test_what_only_one_side_has_is_new_or_vanished_and_not_zero():
    table = changes({("", "a"): 2.0, ("", "b"): 1.0}, {("", "b"): 1.5, ("", "c"): 3.0})
    states = {row.name: (row.state, row.before, row.after) for row in table.rows}

    assert states == {
        "a": ("vanished", 2.0, None),
        "b": ("both", 1.0, 1.5),
        "c": ("new", None, 3.0),
    }


def test_a_longer_class_is_the_cause_and_the_step_adds_up(tmp_path):
    """The norm is 250 us longer, which comes out of the idle time before the all-reduce."""
    a = balanced(tmp_path / "a", gemm_us=300.0, norm_us=50.0)
    b = balanced(tmp_path / "b", gemm_us=300.0, norm_us=300.0)
    comparison = compare(*sides_of(a, b))
    rows = {(row.group, row.name): row.change for row in comparison.items.rows}

    assert rows[COMPUTE, "norm_pointwise"] == pytest.approx(0.25)
    assert sum(rows.values()) == pytest.approx(0.0, abs=1e-12)
    assert comparison.verdict.startswith("B (b) is as fast as A (a) within 1 %")


def test_a_late_rank_is_named_with_what_it_does_longer(tmp_path):
    a = balanced(tmp_path / "a")
    b = late(tmp_path / "b")
    comparison = compare(*sides_of(a, b))
    row = next(row for row in comparison.items.rows if row.group == LATE)

    assert (row.name, row.state, row.change) == ("rank 1", "new", pytest.approx(0.4))


def test_kernel_names_of_other_tiles_are_the_same_work(tmp_path):
    a = balanced(tmp_path / "a", gemm="nvjet_tst_128x256_64x4")
    b = balanced(tmp_path / "b", gemm="nvjet_tst_64x64_32x2")
    comparison = compare(*sides_of(a, b))

    assert {row.state for row in comparison.kernels.rows} == {"both"}


def test_memory_and_causes_are_absent_without_traces_and_said_to_be(tmp_path):
    a = runs(tmp_path / "a", slower(1.0))
    b = runs(tmp_path / "b", slower(1.5))
    comparison = compare(*sides_of(a, b))

    assert comparison.causes is comparison.memory is None
    assert comparison.step.percent == pytest.approx(50.0)
    assert "50.0 % slower" in comparison.verdict and "cannot be told" in comparison.verdict
    assert any("has no traces" in note for note in comparison.notes)


def test_the_profilers_slowdown_is_a_row_of_its_own(tmp_path):
    a = runs(tmp_path / "a", slower(1.0))
    b = runs(tmp_path / "b", slower(1.5))
    balanced(next(a.iterdir()) / "traces")
    late(next(b.iterdir()) / "traces")
    comparison = compare(*sides_of(a, b))
    change = 1e3 * (comparison.step.after - comparison.step.before)

    assert sum(row.change for row in comparison.causes.rows) == pytest.approx(change)
    assert comparison.causes.rows[0].group == "not in the traces"
    assert largest(comparison.items).group == LATE


def test_several_runs_are_tested_over_their_medians(tmp_path):
    a = runs(tmp_path / "a", *(slower(1.0 + 0.01 * k) for k in range(5)))
    b = runs(tmp_path / "b", *(slower(1.5 + 0.01 * k) for k in range(3)))
    step = compare(*sides_of(a, b)).step

    assert (len(step.before_runs), len(step.after_runs)) == (5, 3)
    assert step.p_value == pytest.approx(1 / 56)


def test_a_prediction_is_compared_but_never_tested(tmp_path):
    a = runs(tmp_path / "a", slower(1.0), slower(1.1))
    b = runs(tmp_path / "b", slower(1.3, kind="predicted"))
    balanced(next(a.iterdir()) / "traces")
    late(next(b.iterdir()) / "traces")
    comparison = compare(*sides_of(a, b))

    assert comparison.step.basis == "measured against predicted"
    assert comparison.step.p_value is None and "no sample" in comparison.step.test
    assert next(s for s in comparison.settings if s.name == "kind").after == "predicted"
    assert comparison.items is not None


def test_settings_that_differ_come_first_and_only_those(tmp_path):
    record = slower(1.0)
    plan = {**record.plan, "ep": 1}
    a = runs(tmp_path / "a", record)
    b = runs(tmp_path / "b", msgspec.structs.replace(record, plan=plan))
    (setting,) = compare(*sides_of(a, b)).settings

    assert (setting.group, setting.name) == ("plan", "ep")
    assert (setting.before, setting.after) == ("2", "1")


def test_suites_are_compared_workload_by_workload(tmp_path):
    a = runs(tmp_path / "a", slower(1.0), slower(1.0, "muse_spark_proxy"))
    b = runs(tmp_path / "b", slower(1.2), slower(1.3, "muse_spark_proxy"))
    c = runs(tmp_path / "c", slower(0.8))
    comparisons, reasons = compare_all(sides_of(a, b, c))

    found = [(c.after, c.workload, round(c.step.percent)) for c in comparisons]
    assert found == [
        ("B: b", "deepseek_v3_proxy", 20),
        ("B: b", "muse_spark_proxy", 30),
        ("C: c", "deepseek_v3_proxy", -20),
    ]
    assert reasons == {}


def test_different_families_are_not_comparable(tmp_path):
    record = slower(1.0, "muse_spark_proxy")
    family = msgspec.structs.replace(record.model, family="muse_spark")
    a = runs(tmp_path / "a", slower(1.0))
    b = runs(tmp_path / "b", msgspec.structs.replace(record, model=family))

    with pytest.raises(NotComparableError, match="deepseek_v3_proxy"):
        compare_all(sides_of(a, b))


def test_failed_runs_have_nothing_to_compare(tmp_path):
    a = runs(tmp_path / "a", failed_record())
    b = runs(tmp_path / "b", failed_record())

    with pytest.raises(NotComparableError, match="no quantity"):
        compare_all(sides_of(a, b))


def test_two_files_of_one_rank_are_an_error_in_one_line(tmp_path):
    folder = write_pair(tmp_path / "a", {"gemm_us": 300.0, "arrival_us": 700.0})
    (folder / "copy.json.gz").write_bytes((folder / "rank0.json.gz").read_bytes())

    with pytest.raises(UsageError, match="two files of rank 0"):
        sides_of(folder)
