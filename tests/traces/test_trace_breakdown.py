"""The breakdown: equal to brute force on random timelines, to HTA, and to hand-made cases."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reports.traces.breakdown import PARTS, StepBreakdown
from reports.traces.hta_bridge import hta_analysis
from reports.traces.intervals import (
    Intervals,
    covered_within,
    intersect,
    subtract,
    total,
    union,
)
from reports.traces.loader import load
from reports.traces.reduce import reduce_trace, summarise
from reports.traces.summary import RankSummary
from tests.traces.kineto import event, kernel, launch, step, write

spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=12)


def points(pairs: list[tuple[int, int]]) -> set[int]:
    return {t for start, length in pairs for t in range(start, start + length)}


def as_set(pairs: list[tuple[int, int]]) -> Intervals:
    table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return union(table[:, 0], table[:, 0] + table[:, 1])


@given(first=spans, second=spans, window=st.tuples(st.integers(0, 60), st.integers(0, 30)))
def test_interval_arithmetic_equals_sets_of_nanoseconds(
    first: list[tuple[int, int]], second: list[tuple[int, int]], window: tuple[int, int]
) -> None:
    a, b = points(first), points(second)
    start, stop = window[0], window[0] + window[1]
    inside = covered_within(as_set(first), np.array([start]), np.array([stop]))

    assert total(as_set(first)) == len(a)
    assert total(intersect(as_set(first), as_set(second))) == len(a & b)
    assert total(subtract(as_set(first), as_set(second))) == len(a - b)
    assert inside.tolist() == [len(a & set(range(start, stop)))]


COMPUTE, COMMUNICATION, COPY = "gemm_kernel", "ncclDevKernel_AllReduce_Sum_f32", "Memcpy HtoD"
DEVICE = st.lists(
    st.tuples(
        st.sampled_from([COMPUTE, COMMUNICATION, COPY]),
        st.integers(1, 400),
        st.integers(0, 60),
        st.integers(0, 400),
    ),
    min_size=1,
    max_size=14,
)
STEPS = st.lists(st.integers(1, 150), min_size=0, max_size=4)


def timeline(device: list[tuple[str, int, int, int]], lengths: list[int]) -> list[dict[str, Any]]:
    """A trace with one nanosecond per unit; each device event on a stream of its own."""
    rows, start = [], 0
    for number, length in enumerate(lengths):
        rows.append(step(number, start / 1000, length / 1000))
        start += length
    for number, (name, at, length, launched) in enumerate(device):
        cat = "gpu_memcpy" if name == COPY else "kernel"
        args = {"stream": number + 1, "correlation": number}
        rows.append(event(name, cat, at / 1000, length / 1000, tid=number + 1, args=args))
        if launched < at:
            rows.append(launch(launched / 1000, 0.001, number, tid=number + 1000))
    return rows


def brute_force(
    device: list[tuple[str, int, int, int]], lengths: list[int]
) -> list[tuple[int, Counter[str]]]:
    """Parts of each window, nanosecond by nanosecond."""
    busy = {
        name: points([(at, length) for other, at, length, _ in device if other == name])
        for name in (COMPUTE, COMMUNICATION, COPY)
    }
    queued = _queued(device)
    result = []
    for start, stop in _windows(device, lengths):
        parts: Counter[str] = Counter()
        for t in range(start, stop):
            parts[_part(t, busy, queued)] += 1
        result.append((stop - start, parts))
    return result


def _windows(device: list[tuple[str, int, int, int]], lengths: list[int]) -> list[tuple[int, int]]:
    last = max(at + length for _, at, length, _ in device)
    if not lengths:
        begins = [at for _, at, _, _ in device] + [call for _, at, _, call in device if call < at]
        ends = [last] + [call + 1 for _, at, _, call in device if call < at]
        return [(min(begins), max(ends))]
    edges = [0]
    for length in lengths:
        edges.append(edges[-1] + length)
    if last > edges[-1]:
        edges.append(last)
    return list(pairwise(edges))


def _queued(device: list[tuple[str, int, int, int]]) -> set[int]:
    """Gaps between device work whose next event was launched before the gap, or by no call."""
    busy = points([(at, length) for _, at, length, _ in device])
    idle: set[int] = set()
    for _, at, length, _ in sorted(device, key=lambda row: row[1]):
        before = [t for t in busy if t < at]
        if not length or not before or at - 1 in busy or at not in busy:
            continue
        gap_start = max(before) + 1
        first = next(
            row for row in sorted(device, key=lambda row: row[1]) if row[1] == at and row[2]
        )
        if first[3] >= at or first[3] < gap_start:
            idle |= set(range(gap_start, at))
    return idle


def _part(t: int, busy: dict[str, set[int]], queued: set[int]) -> str:
    compute, communication = t in busy[COMPUTE], t in busy[COMMUNICATION]
    if compute:
        return "overlapped_communication_ns" if communication else "compute_ns"
    if communication:
        return "exposed_communication_ns"
    if t in busy[COPY]:
        return "copies_ns"
    return "idle_other_ns" if t in queued else "idle_host_ns"


@given(device=DEVICE, lengths=STEPS)
@settings(max_examples=300, deadline=None)
def test_breakdown_equals_brute_force_to_the_nanosecond(
    tmp_path_factory: pytest.TempPathFactory,
    device: list[tuple[str, int, int, int]],
    lengths: list[int],
) -> None:
    path = tmp_path_factory.mktemp("timeline") / "rank0.json"
    rows = reduce_trace(write(path, timeline(device, lengths))).breakdown
    expected = brute_force(device, lengths)

    assert len(rows) == len(expected) + (1 if lengths else 0)
    for row, (duration, parts) in zip(rows, expected, strict=False):
        assert row.duration_ns == duration
        assert {name: getattr(row, name) for name in PARTS} == {name: parts[name] for name in PARTS}


@given(device=DEVICE, lengths=STEPS)
@settings(max_examples=40, deadline=None)
def test_classes_and_collectives_add_up_to_the_breakdown(
    tmp_path_factory: pytest.TempPathFactory,
    device: list[tuple[str, int, int, int]],
    lengths: list[int],
) -> None:
    path = tmp_path_factory.mktemp("sums") / "rank0.json"
    summary = reduce_trace(write(path, timeline(device, lengths)))
    for row in summary.breakdown:
        own = [c for c in summary.classes if row.step in ("all", c.step)]
        compute = [c for c in own if c.name not in ("communication", "copy")]
        exposed = sum(c.exposed_ns for c in own)

        assert exposed == row.exposed_communication_ns
        assert (
            sum(c.exclusive_ns for c in compute) == row.compute_ns + row.overlapped_communication_ns
        )
    if not lengths:
        exposed = summary.breakdown[-1].exposed_communication_ns
        assert sum(one.exposed_ns for one in summary.collectives) == exposed


def test_breakdown_equals_hta_where_hta_is_exact(tmp_path: Path) -> None:
    """Integer microseconds are not rounded by HTA, so its span, busy and idle time are exact."""
    from hta.trace_analysis import TraceAnalysis

    generator = np.random.default_rng(3)
    rows = [event("aten::mm", "cpu_op", 0, 4000)]
    for number in range(1, 200):
        name = [COMPUTE, "ncclKernel_AllReduce_RING_LL_Sum_float"][number % 3 == 0]
        at, length = int(generator.integers(10, 3000)), int(generator.integers(1, 40))
        rows.append(launch(at - 5, 2, number, tid=number))
        rows.append(kernel(name, at, length, correlation=number, stream=number))
    path = write(tmp_path / "rank0.json", rows)
    theirs = TraceAnalysis(trace_files={0: str(path)}).get_temporal_breakdown(visualize=False)
    ours = reduce_trace(path).breakdown[-1]
    bridged = hta_analysis([load(path)]).get_temporal_breakdown(visualize=False)

    compute = ours.compute_ns + ours.overlapped_communication_ns
    assert compute == int(theirs["compute_time(us)"][0]) * 1000
    assert ours.exposed_communication_ns == int(theirs["non_compute_time(us)"][0]) * 1000
    assert compute == int(bridged["compute_time(us)"][0])
    assert int(bridged["idle_time(us)"][0]) == int(theirs["idle_time(us)"][0]) * 1000
    assert int(bridged["kernel_time(us)"][0]) == int(theirs["kernel_time(us)"][0]) * 1000


def test_fed_with_our_columns_hta_agrees_to_the_nanosecond(tmp_path: Path) -> None:
    """HTA rounds what it parses itself; on integer nanoseconds its arithmetic is ours."""
    rows = [kernel(COMPUTE, 10.123 + 3.7 * n, 1.001 + n % 4, stream=n + 1) for n in range(200)]
    trace = load(write(tmp_path / "rank0.json", rows))
    theirs = hta_analysis([trace]).get_temporal_breakdown(visualize=False)
    ours = summarise(trace).breakdown[-1]

    assert ours.compute_ns == int(theirs["compute_time(us)"][0])
    assert ours.idle_ns == int(theirs["idle_time(us)"][0])


def summary_of(tmp_path: Path, rows: list[dict[str, Any]]) -> RankSummary:
    return reduce_trace(write(tmp_path / "rank0.json", rows))


def parts_of(row: StepBreakdown) -> dict[str, int]:
    return {name: getattr(row, name) for name in PARTS if getattr(row, name)}


def test_on_a_cpu_the_device_lane_is_operator_self_time(tmp_path: Path) -> None:
    rows = [
        step(1, 0, 100),
        event("aten::linear", "cpu_op", 10, 20),
        event("aten::addmm", "cpu_op", 12, 10),
        event("c10d::allreduce_", "cpu_op", 40, 10),
        event("gloo:all_reduce", "user_annotation", 45, 40, tid=2),
        event("aten::view", "cpu_op", 50, 2, tid=2),
        event("aten::mul", "cpu_op", 60, 5),
    ]
    summary = summary_of(tmp_path, rows)

    assert summary.lane == "operators"
    assert parts_of(summary.breakdown[0]) == {
        "compute_ns": 20_000,
        "overlapped_communication_ns": 5_000,
        "exposed_communication_ns": 35_000,
        "idle_collective_ns": 5_000,
        "idle_host_ns": 35_000,
    }
    operators = {row.name: row.host_self_ns for row in summary.operators}
    assert operators["aten::linear"] == 10_000
    assert operators["aten::addmm"] == 10_000
    assert [(one.kind, one.exposed_ns) for one in summary.collectives] == [("all_reduce", 35_000)]


def test_waiting_for_a_pipeline_neighbour_is_a_bubble(tmp_path: Path) -> None:
    rows = [
        step(1, 0, 100),
        event("wait for recv", "user_annotation", 20, 30),
        event("aten::mm", "cpu_op", 50, 10),
    ]

    assert parts_of(summary_of(tmp_path, rows).breakdown[0]) == {
        "compute_ns": 10_000,
        "idle_bubble_ns": 30_000,
        "idle_host_ns": 60_000,
    }


def test_the_last_step_is_kept_and_late_device_work_is_the_tail(tmp_path: Path) -> None:
    rows = [
        step(7, 0, 100),
        step(8, 110, 90),
        launch(190, 2, 1),
        kernel(COMPUTE, 195, 30, correlation=1),
    ]
    breakdown = summary_of(tmp_path, rows).breakdown

    assert [(row.step, row.duration_ns) for row in breakdown] == [
        ("step 7", 110_000),
        ("step 8", 90_000),
        ("tail", 25_000),
        ("all", 225_000),
    ]
    assert [row.compute_ns for row in breakdown] == [0, 5_000, 25_000, 30_000]


def test_a_child_that_overhangs_its_parent_is_still_its_child(tmp_path: Path) -> None:
    rows = [
        event("aten::outer", "cpu_op", 10, 20),
        event("aten::inner", "cpu_op", 25, 5.001),
    ]
    summary = summary_of(tmp_path, rows)

    assert {row.name: row.host_self_ns for row in summary.operators} == {
        "aten::outer": 15_000,
        "aten::inner": 5_000,
    }
    assert summary.breakdown[-1].compute_ns == 20_000


def test_custom_all_reduces_are_communication(tmp_path: Path) -> None:
    names = ("vllm::cross_device_reduce_1stage", "multimem_all_reduce_kernel", "nvshmem_put")
    rows = [kernel(name, 10 * n, 5) for n, name in enumerate(names, 1)]

    assert parts_of(summary_of(tmp_path, rows).breakdown[-1])["exposed_communication_ns"] == 15_000
