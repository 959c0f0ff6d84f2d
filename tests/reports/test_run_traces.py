"""The traces of a run: written summaries are used, as long as they are newer than the traces."""

import os

import msgspec
import pytest

from bench.errors import UsageError
from reports.run_traces import read_traces, run_traces, summary_path, written_summary
from reports.traces.reduce import reduce_trace
from tests.reports.sample_traces import balanced, late


@pytest.fixture
def folder(tmp_path):
    return late(tmp_path / "traces")


def write_summary(trace):
    path = summary_path(trace)
    path.write_bytes(msgspec.json.encode(reduce_trace(trace)))
    return path


def test_summaries_of_all_ranks_give_the_same_as_the_traces(folder):
    from_traces = read_traces([folder], num_workers=1)
    for trace in sorted(folder.glob("*.json.gz")):
        write_summary(trace)

    assert read_traces([folder], num_workers=1) == from_traces


def test_the_ranks_summaries_are_enough_to_read_a_run(folder):
    """The traces are damaged after their summaries were written: they are not read again."""
    for trace in sorted(folder.glob("*.json.gz")):
        summary = write_summary(trace)
        stamp = summary.stat().st_mtime_ns
        trace.write_bytes(b"damaged")
        os.utime(trace, ns=(stamp - 1, stamp - 1))

    assert [summary.rank for summary in run_traces(folder.parent).ranks] == [0, 1]


def test_a_trace_that_changed_after_its_summary_is_read_again(tmp_path, folder):
    trace = folder / "rank0.json.gz"
    path = write_summary(trace)
    newer = path.stat().st_mtime_ns + 1
    os.utime(trace, ns=(newer, newer))

    assert written_summary(trace) is None


def test_a_summary_of_another_schema_is_read_again(folder):
    trace = folder / "rank0.json.gz"
    write_summary(trace).write_text('{"schema": 0}')

    assert written_summary(trace) is None


def test_a_run_without_traces_has_none(tmp_path):
    assert run_traces(tmp_path) is None


def test_files_that_are_no_traces_are_an_error_with_the_reason(tmp_path):
    (tmp_path / "notes.json").write_text("{}")

    with pytest.raises(UsageError, match="not a Kineto trace"):
        read_traces([tmp_path], num_workers=1)


def test_a_bad_file_does_not_take_the_others_down(tmp_path):
    folder = balanced(tmp_path / "traces")
    (folder / "rank2.json").write_text("")
    traces = read_traces([folder], num_workers=1)

    assert [summary.rank for summary in traces.ranks] == [0, 1]
    assert [failure.path for failure in traces.failures] == [str(folder / "rank2.json")]
