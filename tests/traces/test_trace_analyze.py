"""Several files at once: failures kept apart, ranks told apart, the cache, the sanitised names."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from reports.traces import cache
from reports.traces.analyze import analyze
from reports.traces.cache import cache_path, load_cached
from reports.traces.columns import Events
from reports.traces.loader import load
from reports.traces.merge import merge
from reports.traces.problems import TraceError
from reports.traces.reduce import reduce_trace
from reports.traces.sanitize import sanitize_metadata, sanitize_name
from reports.traces.summary import RankSummary, TraceSummary
from tests.traces.kineto import event, kernel, launch, step, text, write, write_text


def small(shift_us: float = 0.0) -> list[dict]:
    args = {"Collective name": "allreduce", "In msg nelems": 1024, "dtype": "Float"}
    rows = [step(1, shift_us, 100), event("aten::mm", "cpu_op", 10 + shift_us, 20)]
    rows.append(launch(12 + shift_us, 1, 1))
    rows.append(kernel("gemm", 20 + shift_us, 30, correlation=1))
    group = {"Group size": 2, "Process Group Ranks": "[0, 1]"}
    rows.append(kernel("ncclDevKernel_AllReduce", 60 + shift_us, 30 - shift_us, **args, **group))
    return rows


def test_a_bad_file_is_a_failure_with_a_reason_and_leaves_the_others_alone(tmp_path: Path) -> None:
    write(tmp_path / "rank0.json", small(), rank=0)
    write(tmp_path / "rank1.json.gz", small(5), rank=1)
    write_text(tmp_path / "rank2.json", "")
    write_text(tmp_path / "rank3.json.gz", b"\x1f\x8bnot gzip")
    write_text(tmp_path / "notes.json", '{"a": 1}')
    analysis = analyze([tmp_path], num_workers=2)

    assert [one.rank for one in analysis.ranks] == [0, 1]
    assert [Path(one.path).name for one in analysis.failures] == [
        "notes.json",
        "rank2.json",
        "rank3.json.gz",
    ]
    assert all(one.reason for one in analysis.failures)
    assert [(one.transfer_ns, one.wait_ns) for one in analysis.cross.matched] == [(25_000, 5_000)]


def test_processes_and_one_process_give_the_same_analysis(tmp_path: Path) -> None:
    for rank in range(3):
        write(tmp_path / f"rank{rank}.json", small(rank), rank=rank)

    assert analyze([tmp_path], num_workers=2) == analyze([tmp_path], num_workers=1)


def test_two_files_of_one_rank_are_an_error_that_names_both(tmp_path: Path) -> None:
    write(tmp_path / "a.json", small(), rank=4)
    write(tmp_path / "b.json", small(), rank=4)

    with pytest.raises(TraceError, match=r"two files of rank 4: .*a\.json and .*b\.json"):
        analyze([tmp_path], num_workers=1)


def test_a_file_without_a_rank_beside_others_is_a_failure_not_a_guess(tmp_path: Path) -> None:
    write(tmp_path / "rank0.json", small(), rank=0)
    write(tmp_path / "other.json", small(), rank=None)
    analysis = analyze([tmp_path], num_workers=1)

    assert [one.rank for one in analysis.ranks] == [0]
    assert "rank<N>" in analysis.failures[0].reason


def test_nothing_to_analyse_is_said(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no trace files"):
        analyze([tmp_path])
    with pytest.raises(TraceError, match="no such file"):
        analyze([tmp_path / "absent"])


def test_summaries_survive_json_and_merge_to_the_same_analysis(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"rank{r}.json", small(r), rank=r) for r in range(2)]
    summaries = [reduce_trace(path) for path in paths]
    copies = [msgspec.json.decode(msgspec.json.encode(one), type=RankSummary) for one in summaries]
    merged = merge(copies)

    assert copies == summaries
    assert merged == analyze(paths, num_workers=1)
    assert msgspec.json.decode(msgspec.json.encode(merged), type=TraceSummary) == merged


def columns_equal(first: Events, second: Events) -> bool:
    names = Events.__struct_fields__
    return all(np.array_equal(getattr(first, name), getattr(second, name)) for name in names)


def test_the_cache_gives_the_same_trace_without_reading_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "rank0.json", small())
    first = load_cached(path)
    monkeypatch.setattr(cache, "load", lambda path: pytest.fail("the file was parsed again"))
    second = load_cached(path)

    assert cache_path(path).exists()
    assert columns_equal(first.events, second.events)
    assert (first.names, first.collectives, first.metadata) == (
        second.names,
        second.collectives,
        second.metadata,
    )


def test_a_changed_file_invalidates_the_cache_even_with_equal_size_and_time(tmp_path: Path) -> None:
    import os

    path = write(tmp_path / "rank0.json", small())
    stamp = path.stat()
    load_cached(path)
    write_text(path, text(small()).replace("aten::mm", "aten::bm"))
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))

    assert path.stat().st_size == stamp.st_size
    assert "aten::bm" in load_cached(path).names


def test_a_damaged_cache_is_written_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "rank0.json", small())
    cache_path(path).write_bytes(b"PAR1 nonsense")

    assert load_cached(path).names == load(path).names
    assert cache_path(path).stat().st_size > 100


def test_a_folder_with_caches_is_analysed_as_without(tmp_path: Path) -> None:
    write(tmp_path / "rank0.json", small(), rank=0)
    first = analyze([tmp_path], num_workers=1, cache=True)

    assert analyze([tmp_path], num_workers=1, cache=True) == first


def test_sanitised_names_and_metadata_survive_the_profiler(tmp_path: Path) -> None:
    """torch writes invalid JSON for a quote, and one name "unknown" for all that is not ASCII."""
    names = ['say "hi"', "caf\xe9", "\u4e2d", "tab\there", "back\\slash", "plain"]
    path = tmp_path / "rank0.json"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        note = {"a": 'he said "hi"', "b": float("nan")}
        profiler.add_metadata_json("note", sanitize_metadata(note))
        for name in names:
            with torch.profiler.record_function(sanitize_name(name)):
                torch.ones(1)
    profiler.export_chrome_trace(str(path))
    trace = load(path)

    assert json.loads(path.read_text())["note"]["a"] == "he said 'hi'"
    assert {sanitize_name(name) for name in names} <= set(trace.names)
    assert len({sanitize_name(name) for name in names}) == len(names)
    assert [one.kind for one in trace.warnings] == []


def test_our_reader_survives_what_torch_writes_for_a_quote(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json"
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler,
        torch.profiler.record_function('quote " inside'),
    ):
        torch.ones(1)
    profiler.export_chrome_trace(str(path))

    assert any("quote" in name for name in load(path).names)
