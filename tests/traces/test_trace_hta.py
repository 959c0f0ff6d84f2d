"""HTA on our columns: no file is read again, and the critical path is the one a pencil finds."""

import logging
from pathlib import Path
from typing import Any

import pytest

from reports.run_traces import read_traces, read_traces_with_hta
from reports.trace_report import analysis_json, analysis_report
from reports.traces import pieces
from reports.traces.critical_path import CriticalPath, critical_path, graph_of, path_edges
from reports.traces.hta_bridge import hta_analysis
from reports.traces.hta_run import HtaResult, export_hta, run_hta
from reports.traces.loader import Trace, load
from tests.traces.kineto import event, kernel, launch, step, write

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"


def two_kernels(rank: int = 0) -> list[dict[str, Any]]:
    """A product, then a sum that is launched while it runs; the host waits for both, then goes on.

    The sum is queued behind the product and starts 10 us after it. The host comes back from the
    wait at 270 us and multiplies from 280 to 300 us.
    """
    return [
        step(1, 0, 400),
        event("aten::mm", "cpu_op", 10, 30),
        launch(20, 5, 1),
        kernel("gemm", 50, 100, correlation=1),
        event("aten::add", "cpu_op", 50, 30),
        launch(60, 5, 2),
        kernel("add", 160, 100 - rank, correlation=2),
        event("cudaDeviceSynchronize", "cuda_runtime", 90, 180, args={"correlation": 3}),
        event(
            "Context Sync",
            "cuda_sync",
            91,
            174,
            pid=0,
            tid=-1,
            args={"correlation": 3, "stream": -1},
        ),
        event("aten::mul", "cpu_op", 280, 20),
    ]


def path_of(trace: Trace) -> CriticalPath:
    return critical_path(hta_analysis([trace]), trace)


def test_the_path_goes_from_the_launch_over_both_kernels_back_to_the_host(tmp_path: Path) -> None:
    trace = load(write(tmp_path / "rank0.json", two_kernels()))
    graph = graph_of(hta_analysis([trace]), 0, 0)
    edges = [(e.bound_by, e.name, e.start_ns, e.duration_ns) for e in path_edges(graph, trace)]

    assert edges == [
        ("host", "aten::mm", 10_000, 10_000),
        ("launch", "", 20_000, 30_000),
        ("kernel", "gemm", 50_000, 100_000),
        ("gap between kernels", "", 150_000, 10_000),
        ("kernel", "add", 160_000, 100_000),
        ("synchronisation", "", 260_000, 0),
        ("order of operators", "", 270_000, 0),
        ("host", "aten::mul", 280_000, 20_000),
    ]


def test_the_parts_add_up_to_the_path(tmp_path: Path) -> None:
    path = path_of(load(write(tmp_path / "rank0.json", two_kernels())))

    assert path.reason is None and path.window == "step 1"
    assert (path.length_ns, path.window_ns) == (270_000, 400_000)
    assert path.by_bound == {
        "kernel": 200_000,
        "host": 30_000,
        "launch": 30_000,
        "gap between kernels": 10_000,
    }
    assert sum(part.duration_ns for part in path.parts) == path.length_ns


def test_without_synchronisation_events_the_path_ends_on_the_device_and_says_so(
    tmp_path: Path,
) -> None:
    rows = [row for row in two_kernels() if row["cat"] != "cuda_sync"]
    path = path_of(load(write(tmp_path / "rank0.json", rows)))

    assert path.length_ns == 250_000
    assert path.notes[0].startswith("The trace has no synchronisation events")


def test_a_trace_of_a_cpu_has_no_path_and_the_reason_is_given(tmp_path: Path) -> None:
    rows = [step(1, 0, 100), event("aten::mm", "cpu_op", 10, 30)]
    path = path_of(load(write(tmp_path / "rank0.json", rows)))

    assert path.reason is not None and "no kernel of a device is in this trace" in path.reason
    assert path.length_ns == 0 and not path.parts


def test_what_hta_raises_becomes_the_reason(tmp_path: Path) -> None:
    """HTA needs a launch that is linked to a kernel: here the correlation ids are missing."""
    rows = [step(1, 0, 100), event("aten::mm", "cpu_op", 10, 30), kernel("gemm", 50, 20)]
    path = path_of(load(write(tmp_path / "rank0.json", rows)))

    assert path.reason is not None and path.reason.startswith("HTA: TypeError")


def test_hta_breaks_a_window_down_exactly_and_its_exceptions_become_reasons(
    tmp_path: Path,
) -> None:
    """HTA measures from the first kernel to the last: 10 us idle between the two."""
    result = run_hta([load(write(tmp_path / "rank0.json", two_kernels()))])
    tables = {table.name: table for table in result.tables}
    table = tables["temporal_breakdown"]
    breakdown = dict(zip(table.columns, table.rows[0], strict=True))

    assert breakdown["compute_time(ns)"] == 200_000
    assert breakdown["idle_time(ns)"] == 10_000
    assert all(table.rows or table.reason for table in result.tables)
    assert tables["stragglers"].reason is not None


def two_ranks(folder: Path) -> list[Path]:
    folder.mkdir()
    return [write(folder / f"rank{r}.json", two_kernels(r), rank=r) for r in range(2)]


def test_hta_reads_no_file(tmp_path: Path) -> None:
    """The files are gone once they are loaded, and HTA gives the same as with them."""
    paths = two_ranks(tmp_path / "traces")
    traces = [load(path) for path in paths]
    expected = run_hta(traces)
    for path in paths:
        path.unlink()

    assert run_hta(traces) == expected
    assert {table.name for table in expected.tables if table.rows} >= {"temporal_breakdown"}


def test_each_file_is_parsed_once_for_both_analyses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = two_ranks(tmp_path / "traces")
    parsed: list[str] = []
    original = pieces.PieceReader.pieces

    def counted(reader: pieces.PieceReader) -> Any:
        parsed.append(reader.path.name)
        return original(reader)

    monkeypatch.setattr(pieces.PieceReader, "pieces", counted)
    summary, hta = read_traces_with_hta([tmp_path / "traces"])

    assert sorted(parsed) == [path.name for path in paths]
    assert summary == read_traces([tmp_path / "traces"], num_workers=1)
    assert isinstance(hta, HtaResult) and [path.rank for path in hta.paths] == [0]


def test_a_bad_file_among_others_is_a_failure_for_both_analyses(tmp_path: Path) -> None:
    two_ranks(tmp_path / "traces")
    (tmp_path / "traces" / "rank2.json").write_text("")
    summary, hta = read_traces_with_hta([tmp_path / "traces"])

    assert [Path(one.path).name for one in summary.failures] == ["rank2.json"]
    assert hta is not None and all(table.rows or table.reason for table in hta.tables)


def test_report_json_and_csv_have_the_critical_path(tmp_path: Path) -> None:
    two_ranks(tmp_path / "traces")
    summary, hta = read_traces_with_hta([tmp_path / "traces"])
    assert hta is not None
    report = analysis_report(summary, ["traces"], hta)
    titles = [part.title for part in report.sections[0].parts]
    names = {path.name for path in export_hta(hta, tmp_path / "hta")}

    assert "Critical path" in titles
    assert b'"critical_paths"' in analysis_json(summary, hta)
    assert {"critical_path_rank0.csv", "temporal_breakdown.csv", "reasons.txt"} <= names


@pytest.mark.filterwarnings("ignore")  # of pandas, about code of HTA
@pytest.mark.skipif(not TRACES.exists(), reason="no real traces beside the repository")
@pytest.mark.parametrize(
    ("name", "annotation"),
    [
        ("param_dlrm8/worker0_step_12.1694128201545.pt.trace.json.gz", "ProfilerStep"),
        ("param_dlrm8/worker3_step_12.1694128201557.pt.trace.json.gz", "ProfilerStep"),
        ("hta/cuda_event_sync_multistream_a100.json.gz", ""),
    ],
)
def test_the_path_on_our_columns_is_the_one_on_htas_own(name: str, annotation: str) -> None:
    """On files with whole microseconds, where HTA rounds nothing."""
    from hta.trace_analysis import TraceAnalysis

    logging.getLogger("hta").setLevel(logging.CRITICAL)
    own = TraceAnalysis(trace_files={0: str(TRACES / name)})
    graph, found = own.critical_path_analysis(0, annotation, 0)
    breakdown = graph.get_critical_path_breakdown()
    path = path_of(load(TRACES / name))

    assert found and path.reason is None
    assert path.num_edges == len(breakdown)
    assert path.length_ns == 1000 * int(breakdown["duration"].sum())
