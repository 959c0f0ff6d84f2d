"""The local launcher: whatever happens to a rank, all end and the first failure is named."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.launch import local
from bench.launch.local import Outcome, launch
from bench.rank_report import RANKS_FOLDER, read_steps
from bench.record import Failure

REPOSITORY = Path(__file__).resolve().parents[2]
WORKER = "tests.bench.fake_worker"
DEADLINE_SECONDS = 30


def run(monkeypatch, folder: Path, *ranks: list[str], timeout: float = 60, **options) -> Outcome:
    """Launch one rank for each list of actions."""
    monkeypatch.setenv("FAKE_RANKS", json.dumps(dict(enumerate(ranks))))
    monkeypatch.setattr(local, "GRACE_SECONDS", 0.5)
    return launch(folder, ranks=len(ranks), threads=1, timeout=timeout, worker=WORKER, **options)


def failure(outcome: Outcome) -> Failure:
    assert outcome.failure is not None
    return outcome.failure


def pid_of(folder: Path, name: str) -> int:
    """Return the process id that a rank has noted, once it is there."""
    path = folder / RANKS_FOLDER / f"{name}.pid"
    wait_until(lambda: path.exists() and path.read_text() != "")
    return int(path.read_text())


def is_running(pid: int) -> bool:
    """Say whether the process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def start_launcher(folder: Path, *ranks: list[str]) -> "subprocess.Popen[str]":
    """Start a launcher as a process of its own and wait until its ranks are there."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.fake_launcher", str(folder), str(len(ranks))],
        cwd=REPOSITORY,
        env={**os.environ, "FAKE_RANKS": json.dumps(dict(enumerate(ranks)))},
        stdout=subprocess.PIPE,
        text=True,
    )
    for rank in range(len(ranks)):
        pid_of(folder, f"rank{rank}")
    return process


def test_ranks_that_end_well_are_ok_and_every_step_is_seen(monkeypatch, tmp_path):
    seen = []
    outcome = run(
        monkeypatch,
        tmp_path,
        ["step", "sleep:0.3", "step"],
        ["step"],
        on_tick=lambda: seen.append(len(read_steps(tmp_path, 0))),
    )

    assert outcome == Outcome(status="ok")
    assert seen[-1] == 2
    assert seen == sorted(seen)


def test_a_rank_that_raises_ends_the_others_and_is_named(monkeypatch, tmp_path):
    outcome = run(monkeypatch, tmp_path, ["hang"], ["fail:rank one is unhappy", "exit:1"])

    assert outcome.status == "failed"
    assert failure(outcome).rank == 1
    assert failure(outcome).error == "RuntimeError: rank one is unhappy"
    assert str(tmp_path / "ranks" / "rank1.log") in failure(outcome).hint
    assert not is_running(pid_of(tmp_path, "rank0"))


def test_a_rank_that_notes_an_error_but_does_not_end_is_a_failure(monkeypatch, tmp_path):
    outcome = run(monkeypatch, tmp_path, ["hang"], ["fail:stuck in teardown", "hang"])

    assert outcome.status == "failed"
    assert failure(outcome).error == "RuntimeError: stuck in teardown"


def test_a_killed_rank_is_named(monkeypatch, tmp_path):
    outcome = run(monkeypatch, tmp_path, ["hang"], ["kill"])

    assert outcome.status == "failed"
    assert failure(outcome).rank == 1
    assert "SIGKILL" in failure(outcome).error


def test_a_killed_rank_goes_before_the_broken_connections_of_its_peers(monkeypatch, tmp_path):
    """The echo is even noted first here: the end of a process is seen later than it happens."""
    echo = "fail:[gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.1.1]:4711"
    outcome = run(monkeypatch, tmp_path, [echo, "sleep:5"], ["sleep:0.2", "kill"])

    assert failure(outcome).rank == 1
    assert "SIGKILL" in failure(outcome).error


def test_a_broken_connection_alone_is_reported(monkeypatch, tmp_path):
    outcome = run(monkeypatch, tmp_path, ["fail:NCCL error: unhandled system error"], ["hang"])

    assert failure(outcome).rank == 0
    assert "NCCL" in failure(outcome).error


def test_the_earliest_of_two_errors_is_named_although_its_process_ends_last(monkeypatch, tmp_path):
    outcome = run(
        monkeypatch,
        tmp_path,
        ["sleep:0.2", "fail:second", "exit:1"],
        ["fail:first", "sleep:0.5", "exit:1"],
    )

    assert failure(outcome).rank == 1
    assert failure(outcome).error == "RuntimeError: first"


def test_the_errors_that_ending_the_ranks_causes_are_not_blamed(monkeypatch, tmp_path):
    outcome = run(monkeypatch, tmp_path, ["hang"], ["hang"], ["exit:7"])

    assert failure(outcome).rank == 2


def test_a_rank_that_exits_silently_is_quoted_from_its_log(monkeypatch, tmp_path):
    outcome = run(monkeypatch, tmp_path, ["say:cannot find libfoo.so", "exit:3"])

    assert failure(outcome).error == "exited with code 3: cannot find libfoo.so"


def test_a_hang_is_a_timeout_and_the_rank_behind_is_named(monkeypatch, tmp_path):
    outcome = run(monkeypatch, tmp_path, ["step", "step", "hang"], ["step", "hang"], timeout=3)

    assert outcome.status == "timeout"
    assert failure(outcome).rank == 1
    assert failure(outcome).error == "still running after 3 s: rank 0 2 steps, rank 1 1 steps"


def test_a_hanging_rank_leaves_in_its_log_where_it_was(monkeypatch, tmp_path):
    run(monkeypatch, tmp_path, ["hang"], timeout=3)

    assert "in hang" in (tmp_path / "ranks" / "rank0.log").read_text()


def test_a_rank_that_ignores_the_polite_signal_and_its_children_are_ended(monkeypatch, tmp_path):
    run(monkeypatch, tmp_path, ["stubborn", "child", "hang"], timeout=3)

    assert not is_running(pid_of(tmp_path, "rank0"))
    wait_until(lambda: not is_running(pid_of(tmp_path, "child")))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_interrupts_the_run(tmp_path, number):
    launcher = start_launcher(tmp_path, ["hang"], ["hang"])
    launcher.send_signal(number)
    outcome = json.loads(launcher.communicate(timeout=DEADLINE_SECONDS)[0])

    assert outcome["status"] == "interrupted"
    assert not any(is_running(pid_of(tmp_path, f"rank{rank}")) for rank in range(2))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help exists on Linux only")
def test_a_launcher_that_is_killed_hard_leaves_no_ranks(tmp_path):
    launcher = start_launcher(tmp_path, ["hang"], ["stubborn", "hang"])
    launcher.kill()
    launcher.communicate()

    for rank in range(2):
        wait_until(lambda rank=rank: not is_running(pid_of(tmp_path, f"rank{rank}")))


def test_two_launches_at_once_keep_apart(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    launchers = [
        start_launcher(folders[0], ["sleep:0.5", "step"], ["step"]),
        start_launcher(folders[1], ["hang"], ["fail:only here", "exit:1"]),
    ]
    outcomes = [json.loads(p.communicate(timeout=DEADLINE_SECONDS)[0]) for p in launchers]

    assert [outcome["status"] for outcome in outcomes] == ["ok", "failed"]
    assert len(read_steps(folders[0], 0)) == 1


def test_a_module_in_the_users_folder_does_not_stand_in_for_ours(monkeypatch, tmp_path):
    imposter = tmp_path / "bench"
    imposter.mkdir()
    (imposter / "__init__.py").write_text("raise SystemExit('the wrong package')")
    monkeypatch.chdir(tmp_path)

    assert run(monkeypatch, tmp_path, ["step"]).status == "ok"
