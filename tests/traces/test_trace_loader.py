"""The loader: exact times, every fault of real files, ranks wherever they stand."""

import gzip
import json
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reports.traces import pieces
from reports.traces.columns import CATEGORY
from reports.traces.loader import Trace, load
from reports.traces.problems import TraceError
from tests.traces.kineto import BASE_NS, event, kernel, launch, step, text, write, write_text


def names_of(trace: Trace) -> list[str]:
    return [trace.names[number] for number in trace.events.name]


def kinds_of(trace: Trace) -> dict[str, int]:
    return {warning.kind: warning.count for warning in trace.warnings}


def sample(count: int = 40) -> list[dict]:
    events = [step(1, 0, 1000)]
    for number in range(count):
        events.append(event(f"aten::op{number}", "cpu_op", 10 + 20 * number, 5.125))
        events.append(launch(11 + 20 * number, 1.5, number + 1))
        events.append(kernel("k<float>", 14.25 + 20 * number, 3.001, correlation=number + 1))
    return events


@given(
    times=st.lists(
        st.tuples(st.integers(0, 7_889_238_000_000_000), st.integers(0, 10**10)),
        min_size=1,
        max_size=30,
    ),
    block=st.integers(50, 5000),
)
@settings(max_examples=60, deadline=None)
def test_times_come_back_to_the_nanosecond_whatever_the_piece_size(
    tmp_path_factory: pytest.TempPathFactory, times: list[tuple[int, int]], block: int
) -> None:
    path = tmp_path_factory.mktemp("exact") / "rank0.json"
    rows = [event("a", "cpu_op", 0, 0) for _ in times]
    content = text(rows)
    for start, duration in times:
        content = content.replace('"ts": 0,', f'"ts": {Decimal(start) / 1000:.3f},', 1)
        content = content.replace('"dur": 0\n', f'"dur": {Decimal(duration) / 1000:.3f}\n', 1)
    write_text(path, content)
    old = pieces.BLOCK_BYTES
    try:
        pieces.BLOCK_BYTES = block
        trace = load(path)
    finally:
        pieces.BLOCK_BYTES = old

    starts = (trace.events.start - BASE_NS).tolist()
    assert list(zip(starts, trace.events.duration.tolist(), strict=True)) == times
    assert trace.warnings == ()


def test_decimals_of_absolute_epoch_times_survive_although_a_double_cannot_hold_them(
    tmp_path: Path,
) -> None:
    content = text([event("a", "cpu_op", 0, 1)], baseTimeNanoseconds=None)
    content = content.replace('"ts": 0,', '"ts": 1715000000000123.457,')
    trace = load(write_text(tmp_path / "rank0.json", content))

    assert trace.events.start.tolist() == [1715000000000123457]


def test_integer_microseconds_of_old_files_are_exact(tmp_path: Path) -> None:
    events = [event("a", "cpu_op", 1669783687464181, 45)]
    trace = load(write(tmp_path / "rank0.json", events, baseTimeNanoseconds=None))

    assert trace.events.start.tolist() == [1669783687464181000]
    assert trace.events.duration.tolist() == [45000]


def test_ranks_of_two_quarters_lie_on_one_timeline(tmp_path: Path) -> None:
    quarter = 7_889_238_000_000_000
    late = write(tmp_path / "rank0.json", [event("a", "cpu_op", 7_889_238_000_001.5, 1)])
    early = write(
        tmp_path / "rank1.json",
        [event("a", "cpu_op", 1.5, 1)],
        baseTimeNanoseconds=BASE_NS + quarter,
    )

    assert load(late).events.start[0] == load(early).events.start[0]


@pytest.mark.parametrize("name", ["t.json", "t.json.gz", "t.json.tmp"])
def test_plain_gzipped_and_unrenamed_files_give_the_same_columns(tmp_path: Path, name: str) -> None:
    trace = load(write(tmp_path / name, sample()))

    assert len(trace.events) == 121
    assert (trace.events.category == CATEGORY["kernel"]).sum() == 40
    assert trace.rank_is_known and trace.warnings == ()


def test_members_of_a_concatenated_gzip_are_one_file(tmp_path: Path) -> None:
    content = text(sample()).encode()
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(gzip.compress(content[:4000]) + gzip.compress(content[4000:]))

    assert len(load(path).events) == 121


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
def test_a_file_cut_short_gives_its_complete_events(tmp_path: Path, share: float) -> None:
    content = text(sample())
    cut = int(len(content) * share)
    trace = load(write_text(tmp_path / "rank0.json", content[:cut]))
    whole = content[:cut].count('"ph": "X"')

    assert len(trace.events) in (whole, whole - 1)
    assert kinds_of(trace) == {"truncated": 1}


def test_a_cut_gzip_stream_gives_its_complete_events(tmp_path: Path) -> None:
    data = gzip.compress(text(sample(400)).encode())
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(data[: len(data) // 2])
    trace = load(path)

    assert 100 < len(trace.events) < 1201
    assert kinds_of(trace) == {"truncated": 1}


def test_a_bare_array_is_a_trace(tmp_path: Path) -> None:
    trace = load(write_text(tmp_path / "rank3.json", json.dumps(sample())))

    assert len(trace.events) == 121
    assert trace.rank == 3


def test_compact_json_with_sorted_keys_is_a_trace(tmp_path: Path) -> None:
    content = json.dumps(json.loads(text(sample())), separators=(",", ":"), sort_keys=True)
    trace = load(write_text(tmp_path / "rank0.json", content))

    assert len(trace.events) == 121 and trace.warnings == ()


def test_pairs_of_begin_and_end_become_complete_events(tmp_path: Path) -> None:
    rows = [
        {"ph": "B", "cat": "cpu_op", "name": "outer", "pid": 1, "tid": 1, "ts": 10.5},
        {"ph": "B", "cat": "cpu_op", "name": "inner", "pid": 1, "tid": 1, "ts": 11.0},
        {"ph": "E", "pid": 1, "tid": 1, "ts": 12.25},
        {"ph": "E", "pid": 1, "tid": 1, "ts": 20.001},
        {"ph": "E", "pid": 1, "tid": 1, "ts": 21.0},
        {"ph": "B", "cat": "cpu_op", "name": "open", "pid": 1, "tid": 1, "ts": 30.0},
    ]
    trace = load(write(tmp_path / "rank0.json", rows))

    assert dict(zip(names_of(trace), trace.events.duration.tolist(), strict=False)) == {
        "inner": 1250,
        "outer": 9501,
    }
    assert kinds_of(trace) == {"unpaired": 2}


def damaged(content: str, old: str, new: str) -> str:
    assert old in content
    return content.replace(old, new)


@pytest.mark.parametrize(
    ("old", "new", "warnings", "name"),
    [
        ("aten::op7", "aten::\x01op7", {"control_characters": 1}, "aten:: op7"),
        ("aten::op7", "aten::\nop7", {"control_characters": 1}, "aten:: op7"),
        ("aten::op7", "C:\\Users\\op7", {"bad_escapes": 2}, "C:\\Users\\op7"),
        ("aten::op7", 'say "op7" twice', {"quotes": 1}, 'say "op7" twice'),
        ("aten::op7", 'end with "op7"', {"quotes": 1}, 'end with "op7"'),
        ("aten::op39", 'end with "op7"', {"quotes": 1}, 'end with "op7"'),
        ("aten::op7", "x}, {y", {}, "x}, {y"),
        ("aten::op7", 'x}, {\\"ph\\": 1', {}, 'x}, {"ph": 1'),
        ("aten::op7", "caf\\u00e9", {}, "caf\xe9"),
    ],
)
def test_a_fault_in_a_name_costs_no_event(
    tmp_path: Path, old: str, new: str, warnings: dict[str, int], name: str
) -> None:
    content = damaged(text(sample()), f'"{old}"', f'"{new}"')
    trace = load(write_text(tmp_path / "rank0.json", content))

    assert len(trace.events) == 121
    assert name in names_of(trace)
    assert kinds_of(trace) == warnings


def test_every_name_with_windows_backslashes_survives(tmp_path: Path) -> None:
    content = text(sample()).replace("aten::op", "C:\\Program Files\\qt\\op")
    trace = load(write_text(tmp_path / "rank0.json", content))

    assert len(trace.events) == 121
    assert kinds_of(trace) == {"bad_escapes": 120}


def test_bytes_that_are_not_utf8_are_replaced(tmp_path: Path) -> None:
    content = text(sample()).encode().replace(b"aten::op7", b"aten::\xe9op7")
    trace = load(write_text(tmp_path / "rank0.json", content))

    assert len(trace.events) == 121
    assert kinds_of(trace) == {"invalid_utf8": 1}


def test_nan_trailing_commas_and_odd_values_cost_no_event(tmp_path: Path) -> None:
    content = text(sample())
    content = content.replace('"correlation": 3\n', '"correlation": NaN\n', 1)
    content = content.replace('"dur": 5.125\n', '"dur": 5.125,\n', 1)
    trace = load(write_text(tmp_path / "rank0.json", content))

    assert len(trace.events) == 121
    assert kinds_of(trace) == {"not_a_number": 1, "quotes": 1}


def test_times_as_strings_are_read_and_missing_durations_are_zero(tmp_path: Path) -> None:
    content = (
        text(sample()).replace('"ts": 10,', '"ts": "10.125",').replace('"dur": 1000', '"x": 1')
    )
    trace = load(write_text(tmp_path / "rank0.json", content))

    assert trace.events.start.min() == BASE_NS
    assert BASE_NS + 10125 in trace.events.start.tolist()
    assert kinds_of(trace) == {"no_duration": 1}


def test_an_event_without_a_readable_time_is_left_out_and_counted(tmp_path: Path) -> None:
    content = text(sample()).replace('"ts": 10,', '"ts": "soon",')
    trace = load(write_text(tmp_path / "rank0.json", content))

    assert len(trace.events) == 120
    assert kinds_of(trace) == {"no_time": 1}


def test_ids_beyond_63_bits_do_not_stop_the_file(tmp_path: Path) -> None:
    content = text(sample()).replace('"correlation": 3\n', f'"correlation": {2**64 - 1}\n')
    trace = load(write_text(tmp_path / "rank0.json", content))

    assert len(trace.events) == 121
    assert kinds_of(trace) == {"too_large": 2}


@given(
    ids=st.lists(
        st.integers(0, 100) | st.integers(2**31 - 2, 2**31 + 2) | st.integers(0, 2**62),
        min_size=1,
        max_size=40,
    )
)
@settings(max_examples=40, deadline=None)
def test_ids_survive_whatever_width_they_need_and_wherever_the_wide_one_stands(
    tmp_path_factory: pytest.TempPathFactory, ids: list[int]
) -> None:
    rows = [kernel("k", 10 * place + 1, 1, correlation=one) for place, one in enumerate(ids)]
    path = write(tmp_path_factory.mktemp("ids") / "rank0.json", rows)
    old = pieces.BLOCK_BYTES
    try:
        pieces.BLOCK_BYTES = 1000
        events = load(path).events
    finally:
        pieces.BLOCK_BYTES = old

    assert events.correlation.tolist() == ids
    assert (events.correlation.dtype == np.int32) == (max(ids) < 2**31)


def test_a_column_that_has_grown_many_times_holds_every_row(tmp_path: Path) -> None:
    rows = [event("a", "cpu_op", place, 1) for place in range(20_000)]
    rows.append(kernel("long", 0.5, 5_000_000, correlation=2**40))
    events = load(write(tmp_path / "rank0.json", rows)).events

    assert (events.start[:-1] - BASE_NS).tolist() == [1000 * place for place in range(20_000)]
    assert events.duration.tolist() == [1000] * 20_000 + [5_000_000_000]
    assert events.correlation.tolist() == [-1] * 20_000 + [2**40]


def test_rare_arguments_are_read_wherever_in_a_piece_they_stand(tmp_path: Path) -> None:
    rows = sample(3)
    rows.append(event("aten::mm", "cpu_op", 1, 1, args={"Input Dims": [[2, 3]], "Input type": []}))
    rows.append(kernel("g", 2, 1, **{"graph node id": 5}))
    trace = load(write(tmp_path / "rank0.json", [*rows, *sample(3)]))

    place = names_of(trace).index("aten::mm")
    shapes = trace.dims[trace.events.dims[place]]
    assert "".join(shapes.split()) == "[[2,3]][]"
    assert trace.events.in_graph.tolist().count(True) == 1
    assert (trace.events.dims >= 0).sum() == 1


def test_unknown_phases_and_extra_keys_are_passed_over(tmp_path: Path) -> None:
    rows = [*sample(2), {"ph": "s", "id": 1, "ts": 3, "cat": "ac2g", "name": "ac2g", "pid": 1}]
    rows.append(event("odd", "cpu_op", 1, 1, args={"list": [{"name": 1}, {"name": 2}], "s": {}}))
    trace = load(write(tmp_path / "rank0.json", rows))

    assert len(trace.events) == 8
    assert "odd" in names_of(trace) and trace.warnings == ()


def test_text_streams_of_rocm_and_absent_streams_of_xpu_load(tmp_path: Path) -> None:
    rows = [
        event("hipLaunchKernel", "cuda_runtime", 1, 1, args={"stream": "0x0", "correlation": 1}),
        kernel("k", 3, 1, correlation=1, stream=0),
        event("gemm", "kernel", 5, 1, args={"sycl queue": "0x1", "correlation": 2}),
        event("x", "xpu_runtime", 4, 1, args={"correlation": 2}),
    ]
    trace = load(write(tmp_path / "rank0.json", rows))

    assert trace.events.stream.tolist() == [0, 0, -1, -1]
    assert (trace.events.category == CATEGORY["runtime"]).sum() == 2


def test_rank_is_found_after_the_events_with_text_ranks(tmp_path: Path) -> None:
    info = {
        "backend": "nccl",
        "rank": "5",
        "world_size": "8",
        "pg_config": '[{"pg_name": "0", "pg_desc": "default_pg", "ranks": "[0, 1, 5]"}]',
    }
    content = text(sample(), rank=None)
    content = content.replace('"traceName"', f'"distributedInfo": {json.dumps(info)}, "traceName"')
    trace = load(write_text(tmp_path / "rank1.json", content))

    assert trace.rank == 5
    assert trace.metadata.world_size == 8
    assert trace.metadata.groups == {"0": ("default_pg", (0, 1, 5))}


def test_events_in_the_tail_of_metadata_are_no_events(tmp_path: Path) -> None:
    content = text(sample()).replace(
        '"traceName"', '"extra": [{"name": "a", "ts": 1}, {"name": "b", "ts": 2}], "traceName"'
    )
    trace = load(write_text(tmp_path / "rank0.json", content))

    assert len(trace.events) == 121 and trace.rank_is_known


@pytest.mark.parametrize(
    ("name", "rank"),
    [("rank12.json", 12), ("worker3_step_12.1694.pt.trace.json", 3), ("job_rank-7.json.gz", 7)],
)
def test_rank_comes_from_the_name_when_the_file_has_none(
    tmp_path: Path, name: str, rank: int
) -> None:
    trace = load(write(tmp_path / name, sample(2), rank=None))

    assert (trace.rank, trace.rank_is_known) == (rank, True)


def test_a_single_unnamed_file_is_rank_0_with_a_warning(tmp_path: Path) -> None:
    trace = load(write(tmp_path / "host_123.456.pt.trace.json", sample(2), rank=None))

    assert (trace.rank, trace.rank_is_known) == (0, False)
    assert kinds_of(trace) == {"unknown_rank": 1}


def test_broken_metadata_still_give_rank_and_base(tmp_path: Path) -> None:
    content = text(sample(2), rank=6).replace(
        '"schemaVersion"', '"note": "he said "hi"", "bad": {not json, "schemaVersion"'
    )
    trace = load(write_text(tmp_path / "t.json", content))

    assert trace.rank == 6
    assert trace.metadata.base_ns == BASE_NS
    assert kinds_of(trace) == {"metadata": 1}


@pytest.mark.parametrize(
    ("content", "reason"),
    [("", "empty"), ("{}", "no traceEvents"), ('{"a": 1}', "no traceEvents"), ("[]", "no event")],
)
def test_a_file_without_events_is_refused_with_a_reason(
    tmp_path: Path, content: str, reason: str
) -> None:
    with pytest.raises(TraceError, match=reason):
        load(write_text(tmp_path / "rank0.json", content))


def test_collective_arguments_are_read_in_every_type_that_versions_write(tmp_path: Path) -> None:
    old = {"Collective name": "allreduce", "In msg nelems": "12", "Out msg nelems": 12}
    new = old | {"Comms Id": 2**64 - 5, "Seq": 9, "Process Group Ranks": [0, 1], "Group size": 2}
    rows = [kernel("nccl", 1, 1, **old), kernel("nccl", 3, 1, dtype="BFloat16", **new)]
    first, second = load(write(tmp_path / "rank0.json", rows)).collectives

    assert (first.input_elements, first.sequence) == (12, None)
    assert (second.sequence, second.group_ranks, second.dtype) == (9, "[0, 1]", "BFloat16")


def test_kernels_at_time_zero_are_counted_and_left_out_of_the_work(tmp_path: Path) -> None:
    trace = load(write(tmp_path / "rank0.json", [*sample(2), kernel("lost", 0, 0)]))

    assert kinds_of(trace) == {"zero_kernels": 1}
    assert (trace.events.category == CATEGORY["kernel"]).sum() == 2


def test_a_kernel_that_outlasts_later_ones_of_its_stream_is_cut(tmp_path: Path) -> None:
    rows = [kernel("long", 10, 5_000_000), kernel("a", 20, 5), kernel("b", 30, 5)]
    trace = load(write(tmp_path / "rank0.json", rows))

    assert trace.events.duration.tolist() == [10_000, 5_000, 5_000]
    assert kinds_of(trace) == {"impossible_kernels": 1}


def test_nodes_of_a_graph_may_overlap_on_one_stream(tmp_path: Path) -> None:
    rows = [kernel("long", 10, 100, correlation=4), kernel("a", 20, 5, correlation=4)]
    trace = load(write(tmp_path / "rank0.json", rows))

    assert trace.events.duration.tolist() == [100_000, 5_000]
    assert trace.warnings == ()


def test_memory_events_become_columns(tmp_path: Path) -> None:
    args = {"Addr": 7, "Bytes": 64, "Total Allocated": 64, "Total Reserved": 128, "Device Type": 1}
    row = {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": 1, "ts": 5.5}
    rows = [event("a", "cpu_op", 1, 9), row | {"args": args | {"Device Id": 0}}]
    memory = load(write(tmp_path / "rank0.json", rows)).memory

    assert memory.time.tolist() == [BASE_NS + 5500]
    assert (memory.bytes[0], memory.total_reserved[0], memory.device_id[0]) == (64, 128, 0)


def test_legacy_categories_have_modern_numbers(tmp_path: Path) -> None:
    rows = [event("k", "Kernel", 1, 1), event("o", "Operator", 1, 1), event("r", "Runtime", 2, 1)]
    trace = load(write(tmp_path / "rank0.json", rows))

    assert trace.events.category.tolist() == [
        CATEGORY["kernel"],
        CATEGORY["cpu_op"],
        CATEGORY["runtime"],
    ]
    assert isinstance(trace.events.start, np.ndarray)
