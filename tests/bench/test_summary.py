"""The summary of finished runs."""

from pathlib import Path

from bench.record import Failure, MetricValue
from bench.summary import failure_line, summarize, summary_table, text_table
from tests.bench.test_record import make_record

FOLDER = Path("runs/r1")
INVALID = MetricValue(value=None, unit="%", invalid="no peak is known")


def test_a_table_is_aligned_and_its_head_underlined():
    assert text_table([["a", "long"], ["wide", "b"]]).split("\n") == [
        "a     long",
        "----  ----",
        "wide  b",
    ]


def test_an_invalid_metric_is_no_number_and_its_reason_stands_below():
    record = make_record(metrics={"mfu.full": INVALID})
    lines = summary_table([(record, FOLDER)]).split("\n")

    assert "no peak" not in lines[2]
    assert lines[-1] == "w: no mfu.full: no peak is known"


def test_the_json_summary_has_each_metric_with_its_unit_and_reason():
    summary = summarize((make_record(metrics={"mfu.full": INVALID}), FOLDER))

    assert summary["metrics"] == {
        "mfu.full": {"value": None, "unit": "%", "invalid": "no peak is known"}
    }
    assert (summary["run_id"], summary["status"], summary["folder"]) == ("r1", "ok", "runs/r1")


def test_a_failure_is_one_line_with_rank_error_and_logs():
    failure = Failure(rank=1, error="ValueError: first\n  second")
    record = make_record(status="failed", failure=failure)

    assert failure_line(record, FOLDER) == (
        "w failed: rank 1: ValueError: first second; logs in runs/r1/ranks"
    )
