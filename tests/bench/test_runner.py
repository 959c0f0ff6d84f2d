"""The runner: a folder and a record for every run, also for those that fail."""

import json
from pathlib import Path

import pytest

from bench import runner
from bench.errors import UsageError
from bench.record import read_record
from bench.spec import RunSpec, read_job

SPEC = RunSpec(workload="muse_spark_proxy", ranks=2, device="cpu", timeout=60)
WORKER = "tests.bench.fake_worker"


@pytest.fixture(autouse=True)
def no_peak(monkeypatch):
    """These ranks compute nothing."""
    monkeypatch.setattr(runner, "cpu_peak", lambda threads: None)


def run_fake(monkeypatch, out: Path, ranks: list[list[str]], **options):
    monkeypatch.setenv("FAKE_RANKS", json.dumps(dict(enumerate(ranks))))
    return runner.run(SPEC, out, worker=WORKER, **options)


def test_a_failed_run_has_a_folder_with_a_record_that_names_the_rank(monkeypatch, tmp_path):
    record, folder = run_fake(monkeypatch, tmp_path, [["hang"], ["fail:loss is nan", "exit:1"]])

    assert read_record(folder) == record
    assert (record.status, record.failure.rank) == ("failed", 1)
    assert record.failure.error == "RuntimeError: loss is nan"
    assert folder == tmp_path / record.run_id
    assert record.environment["cpu"]["cores"] >= 1


def test_the_ranks_are_given_a_device_and_threads(monkeypatch, tmp_path):
    _, folder = run_fake(monkeypatch, tmp_path, [["exit:1"], ["exit:1"]])
    job = read_job(folder)

    assert job.device == "cpu"
    assert job.threads >= 1


def test_every_run_has_a_folder_of_its_own(monkeypatch, tmp_path):
    folders = {run_fake(monkeypatch, tmp_path, [["exit:1"], ["exit:1"]])[1] for _ in range(2)}

    assert len(folders) == 2


def test_steps_are_passed_on_as_rank_0_does_them(monkeypatch, tmp_path):
    seen = []
    run_fake(
        monkeypatch,
        tmp_path,
        [["step", "sleep:0.3", "step"], ["step", "step"]],
        on_step=lambda row: seen.append(row.loss),
    )

    assert seen == [2.0, 2.0]


def test_a_mistake_in_a_later_run_keeps_the_first_from_starting(tmp_path):
    out = tmp_path / "runs"
    with pytest.raises(UsageError, match="unknown workload nope"):
        runner.check([SPEC, RunSpec(workload="nope")], out)

    assert not out.exists()


@pytest.mark.parametrize("out", ["file/below", "file", "/proc/nowhere"])
def test_an_output_folder_that_cannot_be_written_is_a_usage_error(tmp_path, out):
    (tmp_path / "file").write_text("")

    with pytest.raises(UsageError, match="cannot write to output folder"):
        runner.check([SPEC], tmp_path / out)
