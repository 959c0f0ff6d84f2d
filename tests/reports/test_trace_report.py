"""Reports of traces: page, Markdown and JSON say the same; zero is not absence."""

import json

import pytest

from reports.run_report import write_rendered, write_report
from reports.run_traces import read_traces
from reports.trace_answer import trace_answer
from reports.trace_report import answer_json, trace_report
from tests.conftest import SHARED
from tests.reports.html_page import Page
from tests.reports.sample_records import measured_record, write_run
from tests.reports.sample_traces import balanced, late
from tests.traces.kineto import event, write

TRACES = SHARED / "traces"


@pytest.fixture
def answer(tmp_path):
    return trace_answer(read_traces([late(tmp_path / "traces")], num_workers=1))


def test_page_markdown_and_json_say_the_same(tmp_path, answer):
    html, markdown = (
        p.read_text() for p in write_rendered(trace_report(answer, ["T"]), tmp_path / "r")
    )
    document = json.loads(answer_json(answer))
    page = Page(html)

    assert document["verdict"] == answer.verdict
    assert answer.verdict in page.text and "rank 1" in answer.verdict
    plain = markdown.replace("\\", "")
    assert answer.verdict in plain
    values = {float(value) for value in page.attributes("value")}
    for row in document["rows"]:
        assert row["ms"] in values
        assert row["name"] in plain


def test_rows_add_up_to_the_step_and_operators_to_the_time_computing(answer):
    assert sum(row.ms for row in answer.rows) == pytest.approx(answer.step_ms)
    computing = sum(r.compute_ns + r.overlapped_communication_ns for r in answer.ranks) / 2e6
    for table in (answer.classes, answer.operators):
        assert sum(row.ms for row in table) == pytest.approx(computing)


def test_the_verdict_names_the_largest_causes(answer):
    assert answer.verdict.startswith("Of 1.000 ms per profiled step, 40.0 % is late rank")
    assert "100 % of it rank 1, which spends longer than the others on gemm" in answer.verdict


def test_zero_and_not_in_the_trace_look_different(tmp_path, answer):
    path = tmp_path / "r.md"
    write_rendered(trace_report(answer, ["T"]), path)
    text = path.read_text()

    assert "| pipeline bubble | 0 | 0 |" in text
    assert "Memory is not in the trace" in text
    assert "* **Modules**: not in the trace" in text
    assert "* **Marked steps**: in the trace" in text


def test_names_from_the_trace_stay_text(tmp_path):
    hostile = "<script>alert(1)</script>"
    events = [event(hostile, "cpu_op", 100.0, 10.0)]
    answer = trace_answer(read_traces([write(tmp_path / "rank0.json", events)], num_workers=1))
    html, _ = (
        p.read_text() for p in write_rendered(trace_report(answer, [hostile]), tmp_path / "r")
    )
    page = Page(html)

    assert [tag for tag, _ in page.elements].count("script") == 1
    assert hostile in page.text


def test_a_runs_report_begins_with_the_waterfall_of_its_traces(tmp_path):
    record = measured_record(quantization="none")
    folder = write_run(tmp_path, record)
    balanced(folder / "traces")
    html, markdown = (
        path.read_text()
        for path in write_report([record], {}, {record.run_id: folder}, tmp_path / "r")
    )

    assert html.index("From the device&#39;s peak") < html.index("Speed per device")
    assert "The profiler slows the step" in markdown
    assert "Exposed communication" in markdown


def test_a_run_whose_traces_are_broken_still_gets_its_report(tmp_path):
    record = measured_record()
    folder = write_run(tmp_path, record)
    (folder / "traces").mkdir()
    (folder / "traces" / "rank0.json").write_text("")
    path = write_report([record], {}, {record.run_id: folder}, tmp_path / "r.md")[0]

    assert "The traces are not in this report" in path.read_text()


@pytest.mark.skipif(not TRACES.exists(), reason="the collection of real traces is not here")
def test_every_real_trace_gives_a_report_that_adds_up(tmp_path):
    files = sorted(TRACES.rglob("*.json.gz"))
    assert len(files) > 30
    for file in files:
        answer = trace_answer(read_traces([file], num_workers=1))
        assert sum(row.ms for row in answer.rows) == pytest.approx(answer.step_ms), file
        bars = sum(bar.ms for bar in answer.waterfall.bars)
        assert bars == pytest.approx(answer.waterfall.total_ms), file
        write_rendered(trace_report(answer, [file.name]), tmp_path / "report.md")
