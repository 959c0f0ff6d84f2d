"""Snapshots of torch's CUDA allocator: values that follow from the rows that are written here."""

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.errors import UsageError
from reports.memory_report import memory_json, memory_report
from reports.run_traces import read_traces
from reports.sides import read_sides
from reports.traces.allocations import DeviceMemory
from reports.traces.memory_files import read_memory_file
from reports.traces.memory_snapshot import read_snapshot
from reports.traces.problems import TraceError


def frame(file: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": file, "line": line, "name": name}


CALL = frame("/env/site-packages/torch/nn/modules/module.py", 1782, "_call_impl")
LINEAR = frame("/env/site-packages/torch/nn/modules/linear.py", 130, "forward")
MODEL = frame("/src/project/models/moe.py", 88, "forward")
ENGINE = frame("/env/site-packages/torch/autograd/graph.py", 841, "_engine_run_backward")
ADAM = frame("/env/site-packages/torch/optim/adam.py", 190, "_init_group")
TRAIN = frame("/src/project/train.py", 20, "step")
FORWARD = [LINEAR, CALL, MODEL, CALL, TRAIN]
OPTIMIZER = [ADAM, TRAIN]
RECOMPUTED = [LINEAR, CALL, ENGINE, TRAIN]


def change(action: str, address: int, size: int, time_us: int, frames: list[Any]) -> dict[str, Any]:
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": 0,
        "time_us": time_us,
        "frames": frames,
    }


def block(address: int, size: int, requested: int, state: str = "active_allocated") -> dict:
    values = {"address": address, "size": size, "requested_size": requested, "state": state}
    return values | {"frames": [TRAIN]}


def training() -> dict[str, Any]:
    """Block 9 (1000 B) stands all the time, block 8 (40 B) until the forward pass frees it."""
    history = [
        change("segment_alloc", 0, 2048, 5, []),
        change("alloc", 1, 100, 10, FORWARD),
        change("free_requested", 8, 40, 20, FORWARD),
        change("free_completed", 8, 40, 21, FORWARD),
        change("alloc", 2, 50, 30, []),
        change("free_requested", 1, 100, 40, []),
        change("free_completed", 1, 100, 40, []),
        change("alloc", 3, 200, 50, OPTIMIZER),
        change("oom", 0, 2**20, 60, FORWARD) | {"device_free": 2**19},
    ]
    segment = {
        "device": 0,
        "address": 0,
        "total_size": 4096,
        "stream": 0,
        "blocks": [
            block(9, 1024, 1000),
            block(2, 512, 50),
            block(3, 512, 200),
            block(1, 512, 100, "inactive"),
        ],
    }
    return {"segments": [segment], "device_traces": [history, []]}


def written(path: Path, document: object) -> Path:
    path.write_bytes(pickle.dumps(document))
    return path


def only(path: Path, document: object) -> DeviceMemory:
    (device,) = read_snapshot(written(path, document))
    return device


def test_the_course_follows_from_the_history_and_the_state_at_its_end(tmp_path: Path) -> None:
    device = only(tmp_path / "snapshot.pickle", training())

    assert [(point.time_ns, point.total_bytes) for point in device.points] == [
        (10_000, 1040), (10_000, 1140), (20_000, 1100), (30_000, 1150), (40_000, 1050),
        (50_000, 1250),
    ]  # fmt: skip
    assert [sum(point.by_kind) for point in device.points] == [
        point.total_bytes for point in device.points
    ]
    assert {point.reserved_bytes for point in device.points} == {4096}
    assert (device.peak_bytes, device.peak_time_ns) == (1250, 50_000)
    assert device.num_allocations == 3


def test_kinds_follow_from_the_frames_that_make_and_free(tmp_path: Path) -> None:
    device = only(tmp_path / "snapshot.pickle", training())
    activations = [point.by_kind[device.kinds.index("activation")] for point in device.points]

    assert {kind: size for kind, size in device.peak_by_kind.items() if size} == {
        "before": 1000,
        "gradient": 50,
        "optimizer_state": 200,
    }
    assert activations == [0, 100, 100, 100, 0, 0]
    assert "parameter" not in device.kinds  # a history does not tell parameters: that is no zero


def test_what_is_alive_at_the_peak_names_the_users_own_frame(tmp_path: Path) -> None:
    device = only(tmp_path / "snapshot.pickle", training())

    assert [(one.operator, one.phase, one.kind, one.bytes) for one in device.alive] == [
        ("project/train.py:20 step", "other", "before", 1000),
        ("project/train.py:20 step", "optimizer", "optimizer_state", 200),
        ("no Python frame", "backward", "gradient", 50),
    ]
    assert [one.bytes for one in device.largest] == [1000, 200, 50]
    assert device.notes == [
        "An allocation of 1.0 MiB failed for lack of memory, 0.5 MiB were free on the device."
    ]


def test_a_module_called_inside_the_backward_pass_is_recomputation(tmp_path: Path) -> None:
    document = training()
    document["device_traces"][0].append(change("alloc", 4, 5000, 70, RECOMPUTED))
    device = only(tmp_path / "snapshot.pickle", document)

    assert (device.alive[0].phase, device.alive[0].bytes) == ("recompute", 5000)
    assert device.alive[0].operator == "project/train.py:20 step"


def test_without_a_history_the_state_is_shown_and_not_called_the_peak(tmp_path: Path) -> None:
    document = training() | {"device_traces": [[], []]}
    device = only(tmp_path / "snapshot.pickle", document)

    assert [point.total_bytes for point in device.points] == [1250]
    assert device.notes[0].startswith("The snapshot has no history")


def test_a_pickle_that_wants_more_than_plain_values_is_refused_and_not_run(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'harmed'}",)

    path = written(tmp_path / "rank0.pickle", {"segments": [Harmful()], "device_traces": []})

    with pytest.raises(TraceError, match=r"rank0\.pickle: not a memory snapshot: it refers to"):
        read_snapshot(path)
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "Ran out of input"),
        (pickle.dumps(training())[:-400], "not a memory snapshot"),
        (b"\x80\x04nonsense", "not a memory snapshot"),
        (pickle.dumps([1, 2]), "no segments and device_traces"),
        (pickle.dumps({"segments": 3, "device_traces": []}), "not a snapshot of the CUDA alloc"),
        (pickle.dumps({"segments": [], "device_traces": [[{}]]}), "KeyError: 'action'"),
        (pickle.dumps({"segments": [], "device_traces": [[]]}), "no memory of any device"),
    ],
)
def test_a_bad_pickle_gives_one_clear_line(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "bad.pickle"
    path.write_bytes(content)

    with pytest.raises(TraceError, match=reason) as error:
        read_snapshot(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_snapshot_is_analysed_beside_traces_and_alone(tmp_path: Path) -> None:
    written(tmp_path / "rank3.pickle", training())
    (tmp_path / "rank4.pickle").write_bytes(b"bad")
    traces = read_traces([tmp_path], num_workers=1)
    report = memory_report(traces, ["folder"])

    assert [(one.rank, one.devices[0].peak_bytes) for one in traces.memory] == [(3, 1250)]
    assert [Path(one.path).name for one in traces.failures] == ["rank4.pickle"]
    assert "device 0 of rank 3: before 1,000 bytes, optimizer state 200" in report.subtitle
    assert b'"peak_bytes": 1250' in memory_json(traces)
    with pytest.raises(UsageError, match="memory alone"):
        read_sides([tmp_path / "rank3.pickle", tmp_path / "rank3.pickle"])


@st.composite
def lives(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Allocations and frees of blocks with distinct addresses: (address, bytes or 0 to free)."""
    count = draw(st.integers(1, 12))
    order = draw(st.permutations([address for address in range(count) for _ in range(2)]))
    sizes = draw(st.lists(st.integers(1, 1000), min_size=count, max_size=count))
    seen: set[int] = set()
    changes = []
    for address in order:
        changes.append((address, 0 if address in seen else sizes[address]))
        seen.add(address)
    return changes[: draw(st.integers(1, len(changes)))]


@settings(max_examples=60, deadline=None)
@given(lives(), st.data())
def test_a_history_that_begins_late_has_the_true_totals(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]], data: st.DataObject
) -> None:
    """The allocator keeps the last entries only: what was there before is worked out backwards."""
    start = data.draw(st.integers(0, len(changes) - 1))
    alive: dict[int, int] = {}
    history, totals = [], [0]
    for number, (address, size) in enumerate(changes):
        action = "alloc" if size else "free_requested"
        size = size or alive[address]
        if action == "alloc":
            alive[address] = size
        else:
            del alive[address]
        totals.append(sum(alive.values()))
        if number >= start:
            history.append(change(action, address, size, number, []))
    blocks = [block(address, 512 * (1 + size // 512), size) for address, size in alive.items()]
    segment = {"device": 0, "address": 0, "total_size": 2**20, "blocks": blocks}
    path = tmp_path_factory.mktemp("snapshot") / "late.pickle"
    device = only(path, {"segments": [segment], "device_traces": [history]})
    # Without a block from before, the course begins with the first change itself.
    expected = totals[start + (0 if totals[start] else 1) :]

    assert [point.total_bytes for point in device.points] == expected
    assert device.peak_bytes == max(expected)


@pytest.mark.filterwarnings("ignore")
def test_three_exports_of_torch_say_the_same_here(tmp_path: Path) -> None:
    """One profile as a snapshot with categories, as a timeline, and as a raw timeline."""
    from torch.cuda._memory_viz import _profile_to_snapshot

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    optimizer = torch.optim.Adam(model.parameters())
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        profile_memory=True,
        record_shapes=True,
        with_stack=True,
    ) as profiler:
        for _ in range(2):
            model(torch.randn(128, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        profiler.export_memory_timeline(str(tmp_path / "timeline.json"), device="cpu")
        profiler.export_memory_timeline(str(tmp_path / "timeline.raw.json.gz"), device="cpu")
    written(tmp_path / "snapshot.pickle", _profile_to_snapshot(profiler))
    found = [read_memory_file(path).devices[0] for path in sorted(tmp_path.iterdir())]
    kinds = [{k: size for k, size in one.peak_by_kind.items() if size} for one in found]
    parameter_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())

    assert len(found) == 3
    assert len({one.peak_bytes for one in found}) == 1
    assert kinds[0] == kinds[1] == kinds[2]
    assert kinds[0]["parameter"] == parameter_bytes
    assert kinds[0]["input"] == 4 * 128 * 64


def test_a_json_list_that_is_no_timeline_gives_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text("[[1, 2], [[1], [2]]]")

    with pytest.raises(TraceError, match=r"not a memory timeline: .* columns"):
        read_memory_file(path)
