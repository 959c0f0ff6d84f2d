"""The command line: one line for an error, the right exit code, JSON where it is asked for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.cli import build_parser, main, read_specs
from bench.record import write_record
from bench.spec import RunSpec
from tests.bench.test_record import make_record

REPOSITORY = Path(__file__).resolve().parents[2]
PROXY = "deepseek_v3_proxy"


def specs(*arguments: str) -> list[RunSpec]:
    return read_specs(build_parser().parse_args(["run", *arguments]))


def test_list_needs_no_torch():
    code = (
        "import sys; from bench.cli import main; code = main(['list']); "
        "sys.exit(code or 'torch' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0


def test_the_entry_point_works_from_another_folder(tmp_path):
    result = subprocess.run(
        [sys.executable, str(REPOSITORY / "run_bench.py"), "list"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )

    assert result.returncode == 0
    assert PROXY in result.stdout


def test_list_as_json_has_name_and_summary(capsys):
    assert main(["list", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)

    assert PROXY in [entry["name"] for entry in entries]
    assert all(entry["summary"] for entry in entries)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "VERB"),
        (["predict"], "predict"),
        (["run"], "WORKLOAD"),
        (["run", "--ranks", "two", PROXY], "two"),
        (["run", "--ranks", "0", PROXY], "ranks=0: must be at least 1"),
        (["run", "--timeout", "-1", PROXY], "must be more than 0 s"),
        (["run", "--device", "tpu", PROXY], "tpu"),
        (["run", "deepseek_v3_poxy"], "did you mean deepseek_v3_proxy"),
        (["run", "nowhere.yaml"], "nowhere.yaml"),
        (["run", PROXY, "--set", "plan.eep=2"], "did you mean plan.ep"),
        (["run", PROXY, "--set", "plan.ep=3", "--ranks", "2"], "plan.ep=3 must divide"),
        (["run", PROXY, "--set", "workload.data=/no/such"], "no such file or folder"),
        (["run", PROXY, "--unknown"], "--unknown"),
        (["report", "/no/such/run"], "/no/such/run"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2_and_leaves_nothing(
    monkeypatch, tmp_path, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    code = main(arguments)
    output = capsys.readouterr()

    assert code == 2
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1
    assert message in output.err
    assert output.out == ""
    assert list(tmp_path.iterdir()) == []


def test_an_output_folder_below_a_file_is_exit_code_2(tmp_path, capsys):
    (tmp_path / "file").write_text("kept")
    code = main(["run", PROXY, "-o", str(tmp_path / "file" / "runs")])

    assert code == 2
    assert "cannot write to output folder" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "kept"


def test_options_apply_to_every_run_and_only_if_they_are_given(tmp_path):
    suite = tmp_path / "suite.yaml"
    suite.write_text(
        "name: s\ndefaults: {ranks: 2, steps: 5, set: [plan.ep=2]}\n"
        "runs: [{workload: a}, {workload: b, profile: false}]"
    )

    assert specs(str(suite), "c", "--steps", "7", "--set", "model.dim=8") == [
        RunSpec(workload="a", ranks=2, steps=7, set=["plan.ep=2", "model.dim=8"]),
        RunSpec(workload="b", ranks=2, steps=7, set=["plan.ep=2", "model.dim=8"], profile=False),
        RunSpec(workload="c", steps=7, set=["model.dim=8"]),
    ]


def test_every_setting_of_a_run_has_its_option():
    arguments = (
        "w --ranks 2 --device cpu --steps 4 --warmup 1 --timeout 9 --threads 3 "
        "--no-profile --no-instruments --set a.b=c"
    )

    assert specs(*arguments.split()) == [
        RunSpec(
            workload="w",
            set=["a.b=c"],
            ranks=2,
            device="cpu",
            steps=4,
            warmup_steps=1,
            instruments=False,
            profile=False,
            timeout=9,
            threads=3,
        )
    ]


def test_report_writes_a_page_without_torch(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    write_record(make_record(), folder)
    code = (
        "import sys; from bench.cli import main; "
        f"code = main(['report', {str(folder)!r}, '-o', {str(tmp_path / 'page.html')!r}]); "
        "sys.exit(code or 'torch' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0
    assert "r1" in (tmp_path / "page.html").read_text()


def test_the_doctor_looks_at_everything_that_a_run_needs(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    names = [check["name"] for check in found["checks"]]

    assert {"python", "torch", "torchao", "g++", "gloo", "cuda", "disk", "cpu peak"} <= set(names)
    assert code == (0 if found["can_run"] else 3)
    assert all(check["hint"] for check in found["checks"] if check["status"] != "ok")
