"""The instruments count exactly what ran."""

import gzip
import json
import re
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from bench.instruments.memory import TensorBytes, peak_rss_bytes
from bench.instruments.observation import Observation
from bench.instruments.operators import OperatorCounter
from bench.instruments.profiler import ProfilerWindow
from bench.instruments.step_timer import StepTimer

KIB = 1024
CPU = torch.device("cpu")


def kib(number: int) -> torch.Tensor:
    """Return a tensor of ``number`` KiB."""
    return torch.empty(number * KIB, dtype=torch.uint8)


def test_peak_is_what_lives_at_once() -> None:
    standing = kib(100)
    with TensorBytes([standing]) as tracker, Observation([tracker]):
        a = kib(30)
        del a
        b = kib(20)
        c = kib(25)

    assert tracker.report() == {
        "peak_tensor_bytes": 145 * KIB,
        "standing_tensor_bytes": 100 * KIB,
    }
    del b, c


def test_views_and_in_place_operators_take_no_memory() -> None:
    with TensorBytes([]) as tracker, Observation([tracker]):
        a = kib(8)
        a.view(2, -1).add_(1)
        a[: 4 * KIB].zero_()

    assert tracker.report()["peak_tensor_bytes"] == 8 * KIB


def test_resized_storages_count_as_fsdp_uses_them() -> None:
    """FSDP2 frees a parameter by resizing its storage to 0 and refills it by resizing back."""
    with TensorBytes([]) as tracker, Observation([tracker]):
        gathered = kib(40)
        gathered.untyped_storage().resize_(0)
        other = kib(30)
        gathered.untyped_storage().resize_(40 * KIB)

    assert tracker.report()["peak_tensor_bytes"] == 70 * KIB
    del other


def test_the_peak_is_split_by_what_tensors_turned_out_to_be() -> None:
    """A gradient is known as one when the optimizer gets it: its bytes count from the beginning."""
    standing = kib(100)
    tracker = TensorBytes([standing])
    tracker.mark("parameters", [standing])
    with tracker, Observation([tracker]):
        gradient = kib(50)
        activation = kib(30)
        del activation
        tracker.mark("gradients", [gradient])

        assert tracker.live_by_kind() == {"parameters": 100 * KIB, "gradients": 50 * KIB}
    split = tracker.peak_by_kind()
    assert split == {"parameters": 100 * KIB, "gradients": 50 * KIB, "other": 30 * KIB}
    assert sum(split.values()) == tracker.report()["peak_tensor_bytes"]


def test_resizing_is_left_as_it_was() -> None:
    before = torch.UntypedStorage.resize_
    with pytest.raises(RuntimeError), TensorBytes([]):
        raise RuntimeError

    assert torch.UntypedStorage.resize_ is before


def test_what_dies_before_the_tracker_ends_is_forgotten_even_if_it_stood_before() -> None:
    standing = [kib(64)]
    with TensorBytes(standing) as tracker, Observation([tracker]):
        standing.clear()
        kept = kib(10)

    assert tracker.report()["peak_tensor_bytes"] == 64 * KIB
    del kept


def test_flops_of_products_forward_and_backward() -> None:
    """A product of M x K and K x N executes 2MKN FLOPs forward and twice that backward."""
    M, K, N = 3, 5, 7
    a, b = torch.randn(M, K, requires_grad=True), torch.randn(K, N, requires_grad=True)
    counter = OperatorCounter()
    with Observation([counter]):
        (a @ b).sum().backward()

    report = counter.report()
    assert report["executed_flops"] == 3 * 2 * M * K * N
    assert report["by_operator"]["aten::mm"] == 3
    assert report["count"] == sum(report["by_operator"].values())


def test_flops_that_the_backward_pass_computes_again_are_told_apart() -> None:
    """A checkpointed product is computed again once; its two gradients are no recomputation."""
    M, K, N = 3, 5, 7
    a, b = torch.randn(M, K, requires_grad=True), torch.randn(K, N, requires_grad=True)

    def squared(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a @ b).square().sin()

    counter = OperatorCounter()
    with Observation([counter]):
        checkpoint(squared, a, b, use_reentrant=False).sum().backward()

    report = counter.report()
    assert report["recomputed_flops_by_operator"] == {"aten::mm": 2 * M * K * N}
    assert report["flops_by_operator"] == {"aten::mm": 4 * 2 * M * K * N}


def test_trace_is_valid_json_of_the_window_alone(tmp_path: Path) -> None:
    torch.ones(2).sin()
    # torch writes metadata as it is: a quote or a backslash would make the file invalid JSON.
    metadata = {"run_id": 'a "quoted\\ run', "set": ["plan.ep=2"], "loss": float("nan")}
    with ProfilerWindow(tmp_path, 3, CPU, metadata) as window:
        torch.ones(2).cos()

    assert window.report()["trace"] == "traces/rank3.json.gz"
    trace = json.loads(gzip.decompress((tmp_path / "traces/rank3.json.gz").read_bytes()))
    assert trace["titanbench"]["set"] == ["plan.ep=2"]
    names = {event.get("name") for event in trace["traceEvents"]}
    assert "aten::cos" in names
    assert "aten::sin" not in names
    assert any(re.fullmatch(r"ProfilerStep#\d+", name or "") for name in names)


def test_no_trace_is_written_when_the_step_fails(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no"), ProfilerWindow(tmp_path, 0, CPU):
        raise ValueError("no")

    assert not (tmp_path / "traces").exists()


def test_timer_is_monotonic_and_peak_rss_covers_what_was_touched() -> None:
    timer = StepTimer(CPU)
    timer.start()
    touched = torch.ones(64 * KIB * KIB, dtype=torch.uint8)

    assert timer.stop() > 0
    assert peak_rss_bytes() > touched.nbytes
