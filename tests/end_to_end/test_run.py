"""Real runs of the proxies through the command line, as a user does them."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench.record import RunRecord, read_record
from workloads.registry import load

REPOSITORY = Path(__file__).resolve().parents[2]
PROXIES = ("deepseek_v3_proxy", "muse_spark_proxy")
SMALL = ("--ranks", "2", "--set", "plan.ep=2", "--set", "workload.sequence_length=64")
BRIEF = ("--steps", "1", "--warmup", "0", "--no-profile", "--no-instruments")
DEADLINE_SECONDS = 600

pytestmark = pytest.mark.end_to_end


class Result(NamedTuple):
    """What a command gave back."""

    code: int
    out: str
    err: str

    @property
    def runs(self) -> list[dict[str, Any]]:
        return json.loads(self.out)["runs"]


def start(*arguments: str, cache: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, str(REPOSITORY / "run_bench.py"), *arguments],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: "subprocess.Popen[str]") -> Result:
    out, err = process.communicate(timeout=DEADLINE_SECONDS)
    return Result(process.returncode, out, err)


def wait_until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return found


def rank_processes(out: Path) -> dict[int, int]:
    """Return the process ids by rank of the ranks that run below ``out``."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if "bench.launch.rank" in words and any(word.startswith(str(out)) for word in words):
            found[int(words[words.index("--rank") + 1])] = int(folder.name)
    return found


def first_step(out: Path) -> bool:
    """Say whether rank 0 has written a step."""
    return any(path.stat().st_size for path in out.glob("*/ranks/rank0.steps.jsonl"))


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    """A cache folder of its own: a peak measured beside other tests must not be kept."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def quick(tmp_path_factory, cache) -> tuple[Path, Result]:
    """The quick suite with fewer steps: where it went, and what the command gave back."""
    out = tmp_path_factory.mktemp("quick")
    suite = REPOSITORY / "workloads" / "suites" / "quick.yaml"
    options = ("--steps", "3", "--warmup", "1", "--json", "-o", str(out))
    return out, finish(start("run", str(suite), *options, cache=cache))


@pytest.fixture(params=PROXIES)
def record(request, quick) -> tuple[RunRecord, Path]:
    """The record of each proxy's run, and its folder."""
    run = next(run for run in quick[1].runs if run["workload"] == request.param)
    folder = Path(run["folder"])
    return read_record(folder), folder


def test_the_quick_suite_runs_both_flagships_proxies(quick):
    _, result = quick

    assert result.code == 0, result.err
    assert [(run["workload"], run["status"]) for run in result.runs] == [
        (name, "ok") for name in PROXIES
    ]


def test_it_ends_with_a_page_and_a_markdown_file(quick):
    out, result = quick
    reports = [Path(path) for path in json.loads(result.out)["reports"]]

    assert reports == [out / "report.html", out / "report.md"]
    for report in reports:
        text = report.read_text(encoding="utf-8")
        assert all(name in text for name in PROXIES)
        assert "5,262.68" in text, "the published row stands beside the run"


def test_every_step_is_on_record_with_its_phase(record):
    _, folder = record
    rows = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]

    assert [row["phase"] for row in rows] == [
        "warmup",
        "measured",
        "measured",
        "measured",
        "counted",
        "profiled",
    ]
    assert [row["step"] for row in rows] == list(range(6))


def test_tokens_times_and_flops_agree(record):
    found, _ = record
    value = {name: metric.value for name, metric in found.metrics.items()}
    ledger = load(found.workload.name).model.flops_per_token(found.workload.sequence_length)
    tokens = value["tokens_per_second"] * value["step_time"]

    assert tokens == pytest.approx(found.workload.tokens_per_step, rel=0.05), "but for padding"
    assert value["tokens_per_second_per_device"] == value["tokens_per_second"] / 2
    for convention in ("full", "causal"):
        rate = value["tokens_per_second_per_device"] * getattr(ledger, convention)
        assert value[f"model_tflops_per_device.{convention}"] == pytest.approx(rate / 1e12)
        assert 0 < value[f"mfu_bf16.{convention}"] < 100


def test_the_record_has_every_metric_and_a_reason_where_there_is_no_number(record):
    found, _ = record

    assert {"step_time", "mfu.full", "mfu.causal", "peak_memory_allocated", "peak_rss"} <= set(
        found.metrics
    )
    assert {"exposed_communication", "bubble", "loss", "grad_norm"} <= set(found.metrics)
    for metric in found.metrics.values():
        assert (metric.value is None) == (metric.invalid is not None)


def test_experts_exchange_tokens_and_shards_are_gathered(record):
    collectives = record[0].counters["collectives"]
    kinds = {kind for axis in collectives.values() for kind in axis}

    assert {"all_to_all", "all_gather", "reduce_scatter"} <= kinds
    assert all(entry["bytes"] > 0 for axis in collectives.values() for entry in axis.values())


def test_each_rank_leaves_a_trace_outside_the_measured_steps(record):
    _, folder = record

    for rank in range(2):
        with gzip.open(folder / "traces" / f"rank{rank}.json.gz") as file:
            assert json.load(file)["traceEvents"]


def test_the_environment_is_on_record(record):
    environment = record[0].environment

    assert environment["packages"]["torch"]
    assert len(environment["ranks"]) == 2
    assert record[0].hardware.details["kind"] == "cpu"
    assert record[0].hardware.peak_source.startswith("measured")


def test_two_runs_at_once_compute_the_same_and_keep_apart(tmp_path, cache, quick):
    """Each is also the first step of the quick suite's run: the same loss to the last bit."""
    options = ("--ranks", "2", "--set", "plan.ep=2", *BRIEF, "--json", "-o", str(tmp_path))
    processes = [start("run", "muse_spark_proxy", *options, cache=cache) for _ in range(2)]
    results = [finish(process) for process in processes]

    assert [result.code for result in results] == [0, 0], results
    losses = [result.runs[0]["metrics"]["loss"]["value"] for result in results]
    folder = next(Path(run["folder"]) for run in quick[1].runs if "muse" in run["workload"])
    first = json.loads((folder / "steps.jsonl").read_text().splitlines()[0])
    assert losses == [first["loss"]] * 2
    assert results[0].runs[0]["folder"] != results[1].runs[0]["folder"]


def test_a_loss_that_is_not_finite_fails_the_run_and_the_next_one_still_runs(tmp_path, cache):
    suite = tmp_path / "suite.yaml"
    suite.write_text(
        "name: s\n"
        "defaults: {steps: 3, warmup_steps: 0, profile: false, instruments: false}\n"
        "runs:\n"
        "  - {workload: muse_spark_proxy, set: [training.learning_rate=1e30]}\n"
        "  - {workload: muse_spark_proxy}\n"
    )
    options = (*SMALL, "--json", "-o", str(tmp_path / "out"))
    result = finish(start("run", str(suite), *options, cache=cache))

    assert result.code == 3
    assert [run["status"] for run in result.runs] == ["failed", "ok"]
    assert "FloatingPointError" in result.runs[0]["failure"]["error"]
    errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "logs in" in errors[0]
    assert (tmp_path / "out" / "report.html").exists()


def test_a_run_past_its_timeout_says_so(tmp_path, cache):
    """Half a second does not even import torch."""
    options = (*SMALL, *BRIEF, "--timeout", "0.5", "--json", "-o", str(tmp_path))
    result = finish(start("run", "muse_spark_proxy", *options, cache=cache))

    assert result.code == 3
    assert result.runs[0]["status"] == "timeout"
    assert "still running after 0.5 s" in result.runs[0]["failure"]["error"]


def test_a_killed_rank_is_to_blame_and_not_the_peer_that_notices(tmp_path, cache):
    options = (*SMALL, "--steps", "100000", "--json", "-o", str(tmp_path))
    process = start("run", "muse_spark_proxy", *options, cache=cache)
    wait_until(lambda: first_step(tmp_path))
    os.kill(rank_processes(tmp_path)[1], signal.SIGKILL)
    result = finish(process)

    assert result.code == 3
    assert result.runs[0]["failure"]["rank"] == 1
    assert "SIGKILL" in result.runs[0]["failure"]["error"]
    assert rank_processes(tmp_path) == {}


def test_control_c_is_an_interrupted_run_with_its_steps(tmp_path, cache):
    options = (*SMALL, "--steps", "100000", "-o", str(tmp_path))
    process = start("run", "muse_spark_proxy", "deepseek_v3_proxy", *options, cache=cache)
    wait_until(lambda: first_step(tmp_path))
    process.send_signal(signal.SIGINT)
    result = finish(process)

    assert result.code == 3
    (folder,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert read_record(folder).status == "interrupted"
    assert (folder / "steps.jsonl").read_text()
    assert rank_processes(tmp_path) == {}
    assert "Traceback" not in result.err
