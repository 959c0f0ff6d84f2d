"""Memory over time from `[memory]` events: totals, kinds, and what is alive at the peak."""

from pathlib import Path
from typing import Any

from reports.traces.reduce import reduce_trace
from tests.traces.kineto import event, write


class Allocator:
    """Writes `[memory]` events as the profiler does, with running totals."""

    def __init__(self, before: int) -> None:
        self.total = before
        self.rows: list[dict[str, Any]] = []

    def change(self, time_us: float, address: int, size: int) -> None:
        self.total += size
        args = {
            "Addr": address,
            "Bytes": size,
            "Total Allocated": self.total,
            "Total Reserved": 4096,
            "Device Type": 1,
            "Device Id": 0,
        }
        row = {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 100, "tid": 1}
        self.rows.append(row | {"ts": time_us, "args": args})


def training() -> list[dict[str, Any]]:
    forward, backward = {"Sequence number": 1, "Fwd thread id": 0}, {"Fwd thread id": 1}
    allocator = Allocator(before=1000)
    allocator.change(2, 1, 100)  # activation: forward to backward
    allocator.change(3, 2, 30)  # temporary of one operator
    allocator.change(4, 2, -30)
    allocator.change(22, 3, 50)  # gradient: stays
    allocator.change(24, 1, -100)
    allocator.change(25, 9, -7)  # memory from before the trace
    allocator.change(42, 4, 200)  # optimizer state: stays
    rows = [
        event("aten::mm", "cpu_op", 1, 9, args=forward),
        event("autograd::engine::evaluate_function: X", "cpu_op", 20, 9, args=backward),
        event("aten::mm", "cpu_op", 21, 2),
        event("Optimizer.step#SGD.step", "user_annotation", 40, 9),
        event("aten::zeros_like", "cpu_op", 41, 2),
    ]
    return rows + allocator.rows


def test_kinds_follow_from_where_memory_is_made_and_freed(tmp_path: Path) -> None:
    (device,) = reduce_trace(write(tmp_path / "rank0.json", training())).memory

    assert device.device == "device 0"
    assert device.peak_bytes == 993 + 50 + 200
    assert device.peak_by_kind == {
        "before": 993,
        "activation": 0,
        "gradient": 50,
        "optimizer_state": 200,
        "temporary": 0,
        "kept": 0,
        "other": 0,
    }
    assert device.num_unmatched_frees == 1


def test_the_kinds_add_up_to_the_allocators_total_at_every_point(tmp_path: Path) -> None:
    (device,) = reduce_trace(write(tmp_path / "rank0.json", training())).memory

    assert [sum(point.by_kind) for point in device.points] == [
        point.total_bytes for point in device.points
    ]
    assert [point.total_bytes for point in device.points] == [
        1100, 1130, 1100, 1150, 1050, 1043, 1243,
    ]  # fmt: skip


def test_what_is_alive_at_the_peak_names_operator_and_phase(tmp_path: Path) -> None:
    (device,) = reduce_trace(write(tmp_path / "rank0.json", training())).memory

    assert [(one.operator, one.phase, one.kind, one.bytes) for one in device.alive] == [
        ("aten::zeros_like", "optimizer", "optimizer_state", 200),
        ("aten::mm", "backward", "gradient", 50),
    ]


def test_memory_of_the_host_is_called_cpu_whatever_its_number(tmp_path: Path) -> None:
    """The profiler gives the host the device number -1."""
    rows = training()
    for row in rows:
        if row["name"] == "[memory]":
            row["args"] |= {"Device Type": 0, "Device Id": -1}
    (device,) = reduce_trace(write(tmp_path / "rank0.json", rows)).memory

    assert device.device == "cpu"


def test_what_stood_on_the_host_before_the_profiler_is_unknown_and_no_zero(tmp_path: Path) -> None:
    allocator = Allocator(before=0)
    allocator.change(2, 1, 100)
    allocator.change(3, 1, -100)
    for row in allocator.rows:
        row["args"] |= {"Device Type": 0, "Device Id": -1}
    rows = [event("aten::mm", "cpu_op", 1, 9), *allocator.rows]
    (device,) = reduce_trace(write(tmp_path / "rank0.json", rows)).memory

    assert "before" not in device.peak_by_kind and sum(device.peak_by_kind.values()) == 100
    assert device.notes and "is not in the trace" in device.notes[0]
