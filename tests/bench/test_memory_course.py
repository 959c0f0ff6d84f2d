"""The course of tensor memory: sizes that a pencil gives, kinds, modules, the tracker's peak."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.instruments.memory import TensorBytes
from bench.instruments.memory_course import MemoryCourse, write_course
from bench.instruments.observation import Observation
from reports.traces.allocations import DeviceMemory
from reports.traces.memory_files import read_memory_file

B, D, F = 64, 32, 48
FLOAT = 4


class TwoLayers(nn.Module):
    """Two linear layers without biases and a ReLU between them."""

    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(D, F, bias=False), nn.Linear(F, D, bias=False)])
        self.recompute = recompute

    def inner(self, x: Tensor) -> Tensor:
        return self.layers[1](torch.relu(self.layers[0](x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute:
            output = checkpoint(self.inner, x, use_reentrant=False)
            assert isinstance(output, Tensor)
            return output
        return self.inner(x)


def observed(*, recompute: bool = False, steps: int = 1) -> tuple[DeviceMemory, dict[str, int]]:
    """The course of the last of ``steps`` training steps, and the tracker's own report."""
    model = TwoLayers(recompute=recompute)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    for _ in range(steps - 1):
        train(model, optimizer)
    states = [v for state in optimizer.state.values() for v in state.values() if v.dim()]
    standing = {"parameter": list(model.parameters()), "optimizer_state": states}
    course = MemoryCourse(standing, [model])
    tensors = [tensor for kind in standing.values() for tensor in kind]
    tracker = TensorBytes(tensors, course.note)
    with course, tracker, Observation([course, tracker]):
        train(model, optimizer)
    memory = course.device_memory("cpu")
    assert memory is not None
    return memory, tracker.report()


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(B, D)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_the_course_has_the_trackers_own_peak() -> None:
    for recompute in (False, True):
        memory, report = observed(recompute=recompute, steps=2)

        assert memory.peak_bytes == report["peak_tensor_bytes"]
        assert sum(memory.peak_by_kind.values()) == memory.peak_bytes
        assert memory.points[0].total_bytes == report["standing_tensor_bytes"]


def test_what_stands_is_told_by_kind() -> None:
    memory, _ = observed(steps=2)

    assert memory.peak_by_kind["parameter"] == FLOAT * 2 * D * F
    assert memory.peak_by_kind["optimizer_state"] == 2 * FLOAT * 2 * D * F
    assert memory.peak_by_kind["before"] == 0


def courses_of(memory: DeviceMemory, kind: str) -> list[int]:
    """Bytes of a kind over time, without repetitions."""
    values = [point.by_kind[memory.kinds.index(kind)] for point in memory.points]
    return [one for place, one in enumerate(values) if not place or values[place - 1] != one]


def test_the_relu_alone_is_kept_between_forward_and_backward() -> None:
    """A linear layer keeps its input: the ReLU's output, which the ReLU keeps for itself too.

    The output of the model lives until the loss has its sum. With recomputation nothing else is
    kept before the backward pass, which makes the ReLU's output again.
    """
    kept, recomputed = (observed(recompute=recompute, steps=2)[0] for recompute in (False, True))
    relu, output = FLOAT * B * F, FLOAT * B * D

    assert courses_of(kept, "activation") == [0, relu, relu + output, relu, 0]
    assert courses_of(recomputed, "activation") == [0, output, 0, relu, 0]
    assert ("aten::relu", "forward") in {(one.operator, one.phase) for one in kept.alive}
    assert ("aten::relu", "recompute") in {(one.operator, one.phase) for one in recomputed.alive}


def test_gradients_and_the_first_optimizer_states_are_named_with_operator_and_size() -> None:
    """In the first step both moments are made beside the gradients: that is the peak here."""
    memory, _ = observed()
    made = [(one.kind, one.phase, one.bytes) for one in memory.alive if one.bytes > FLOAT * B]

    assert ("parameter", "other", FLOAT * 2 * D * F) in made
    assert ("gradient", "backward", FLOAT * 2 * D * F) in made
    states = [
        size for kind, phase, size in made if (kind, phase) == ("optimizer_state", "optimizer")
    ]
    assert sum(states) == 2 * FLOAT * 2 * D * F


def test_equal_layers_count_together_and_the_hooks_are_gone() -> None:
    memory, _ = observed(steps=2)
    hooks = nn.modules.module._global_forward_pre_hooks

    assert not hooks
    assert {one.module for one in memory.alive} <= {"", "layers.*", "TwoLayers"}


def test_a_written_course_is_read_as_it_was(tmp_path: Path) -> None:
    memory, _ = observed()
    path = write_course(memory, tmp_path, 3)
    read = read_memory_file(path)

    assert (path.name, read.rank) == ("rank3.memory.json", 3)
    assert read.devices == [memory]
