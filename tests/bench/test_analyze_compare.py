"""The verbs analyze and compare: exit codes, one-line errors, JSON, files."""

import json

import msgspec
import pytest

from bench.cli import main
from tests.reports.sample_records import measured_record, write_run
from tests.reports.sample_traces import balanced, late


def test_analyze_prints_one_json_document(tmp_path, capsys):
    folder = late(tmp_path / "traces")

    assert main(["analyze", str(folder), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["step_ms"] == 1.0
    assert document["rows"][0]["group"] == "late rank"


def test_analyze_writes_the_formats_that_are_asked_for(tmp_path, capsys):
    folder = balanced(tmp_path / "traces")

    assert main(["analyze", str(folder), "-o", str(tmp_path / "r.html")]) == 0
    assert (tmp_path / "r.html").exists() and not (tmp_path / "r.md").exists()
    assert "r.html" in capsys.readouterr().out


def test_analyze_prints_markdown_without_an_output(tmp_path, capsys):
    assert main(["analyze", str(balanced(tmp_path / "traces"))]) == 0
    assert capsys.readouterr().out.startswith("# TitanBench trace analysis")


def test_analyze_with_hta_adds_its_tables(tmp_path, capsys):
    folder = balanced(tmp_path / "traces")

    assert main(["analyze", str(folder), "--hta", "--json"]) == 0
    tables = json.loads(capsys.readouterr().out)["hta"]
    breakdown = next(table for table in tables if table["name"] == "temporal_breakdown")
    assert breakdown["rows"] and breakdown["reason"] is None


def test_compare_names_the_cause_and_writes_a_report(tmp_path, capsys):
    a, b = balanced(tmp_path / "a"), late(tmp_path / "b")

    assert main(["compare", str(a), str(b), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [side["label"] for side in document["sides"]] == ["a", "b"]
    assert main(["compare", str(a), str(b), "-o", str(tmp_path / "c.md")]) == 0
    assert "What differs" in (tmp_path / "c.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["analyze", "missing"], 2, "no such file or folder"),
        (["compare", "only"], 2, "nothing to compare with"),
        (["compare", "missing", "missing"], 2, "no such file or folder"),
    ],
)
def test_usage_errors_are_one_line_and_exit_code_2(capsys, arguments, code, words):
    assert main(arguments) == code
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_nothing_comparable_is_exit_code_4(tmp_path, capsys):
    record = measured_record()
    other = msgspec.structs.replace(record.model, family="other")
    workload = msgspec.structs.replace(record.workload, name="other")
    write_run(tmp_path / "a", record)
    write_run(tmp_path / "b", msgspec.structs.replace(record, model=other, workload=workload))

    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 4
    assert capsys.readouterr().err.count("\n") == 1
