"""Finding runs on disk, and their steps."""

import pytest

from bench.errors import UsageError
from reports.load import find_records, read_steps
from tests.reports.sample_records import measured_record, step_rows, write_run


def test_runs_are_found_below_a_suite_folder_and_only_once(tmp_path):
    folders = [write_run(tmp_path, measured_record(name)) for name in ("a_proxy", "b_proxy")]

    found = find_records([tmp_path, folders[1], folders[0] / "run.json"])

    assert [(folder, record.workload.name) for folder, record in found] == [
        (folders[0], "a_proxy"),
        (folders[1], "b_proxy"),
    ]


def test_folder_without_runs_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="no run record at"):
        find_records([tmp_path])


def test_missing_path_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="no run record at"):
        find_records([tmp_path / "nothing"])


def test_file_that_is_no_record_is_a_usage_error(tmp_path):
    (tmp_path / "run.json").write_text('{"schema": 1}')

    with pytest.raises(UsageError, match="not a run record"):
        find_records([tmp_path])


def test_steps_of_an_unfinished_line_are_left_out(tmp_path):
    folder = write_run(tmp_path, measured_record(), step_rows(num_measured=4))
    with (folder / "steps.jsonl").open("a") as file:
        file.write('{"step": 99, "phase": "mea')

    assert [step.step for step in read_steps(folder)] == list(range(3 + 4 + 2))


def test_run_without_steps_has_none(tmp_path):
    assert read_steps(tmp_path) == []


def test_steps_file_with_something_else_is_a_usage_error(tmp_path):
    (tmp_path / "steps.jsonl").write_text('{"step": "one"}\n')

    with pytest.raises(UsageError, match="one step a line"):
        read_steps(tmp_path)
