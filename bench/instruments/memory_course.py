"""The course of tensor memory in the counted step: by kind over time, and what the peak is made of.

Every change that the tracker of live storages sees becomes a row with its operator, module and
phase; at the end of the step the trace engine reduces the rows, as it does a rank's trace.
"""

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from bench.record import write_atomic
from reports.run_traces import MEMORY_FOLDER
from reports.traces.allocations import KIND, DeviceMemory, Recorded, device_memory
from reports.traces.columns import NONE, Numbering
from reports.traces.memory_files import TRACKED_SUFFIX, RankMemory
from reports.traces.phases import BACKWARD, FORWARD, OPTIMIZER, OTHER, RECOMPUTE

SOURCE = "tracker of live tensor storages in the step under the exact counters"
KINDS = (
    "before",
    "parameter",
    "activation",
    "gradient",
    "optimizer_state",
    "temporary",
    "kept",
    "other",
)
_RESIZE = "storage resized"


class MemoryCourse:
    """Writes down every change of live storages; a context manager around the counted step.

    Show it each operator before the tracker, and let the tracker call ``note``. ``standing`` are
    the tensors of each kind that live between steps; of several kinds of a tensor the last counts.
    Modules are named as they are in ``models``, layer numbers as ``*``, so that equal layers count
    together; leave ``models`` empty where modules are compiled, whose calls must not be hooked.
    """

    def __init__(
        self, standing: Mapping[str, Iterable[Tensor]], models: Sequence[nn.Module] = ()
    ) -> None:
        self._kinds = {
            id(tensor.untyped_storage()): kind
            for kind, tensors in standing.items()
            for tensor in tensors
        }
        self._names = {
            id(module): re.sub(r"\d+", "*", name) or type(module).__name__
            for model in models
            for name, module in model.named_modules()
        }
        self._rows: list[tuple[int, int, int, int, int, int]] = []
        self._standing: list[tuple[int, int]] = []
        self._labels: Numbering[str] = Numbering()
        self._operator, self._nothing = self._labels["standing"], self._labels[""]
        self._modules: list[int] = []
        self._in_optimizer = False
        self._is_open = False
        self._hooks = ExitStack()

    def __enter__(self) -> Self:
        handles: list[Any] = [
            register_optimizer_step_pre_hook(self._enter_optimizer),
            register_optimizer_step_post_hook(self._leave_optimizer),
        ]
        if self._names:
            handles += [
                register_module_forward_pre_hook(self._enter_module),
                register_module_forward_hook(self._leave_module, always_call=True),
            ]
        for handle in handles:
            self._hooks.callback(handle.remove)
        self._is_open = True
        return self

    def __exit__(self, *_: object) -> None:
        self._is_open = False
        self._hooks.close()

    def see(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> None:
        """Remember which operator the next changes belong to."""
        self._operator = self._labels[operator._schema.name]

    def note(self, storage_id: int, before: int, after: int, *, resized: bool = False) -> None:
        """Write down that a storage had ``before`` bytes and now has ``after``."""
        if not self._is_open:
            if not self._rows and after:
                self._standing.append((storage_id, after))
            return
        operator = self._labels[_RESIZE] if resized else self._operator
        module = self._modules[-1] if self._modules else self._nothing
        origin = (self._phase(), operator, module)
        now = time.time_ns()
        if before:
            self._rows.append((now, storage_id, -before, *origin))
        if after:
            self._rows.append((now, storage_id, after, *origin))

    def device_memory(self, device: str) -> DeviceMemory | None:
        """Return the step's course and its peak; None if nothing ever lived."""
        rows = np.array(self._rows, dtype=np.int64).reshape(-1, 6)
        start = int(rows[0, 0]) if len(rows) else 0
        first = [
            (start, storage, size, OTHER, 0, self._nothing) for storage, size in self._standing
        ]
        table = np.concatenate([np.array(first, dtype=np.int64).reshape(-1, 6), rows])
        if not len(table):
            return None
        known = [KIND[self._kinds.get(storage, "before")] for storage, _ in self._standing]
        recorded = Recorded(
            time=table[:, 0],
            address=table[:, 1],
            bytes=table[:, 2],
            phase=table[:, 3],
            place=np.full(len(table), NONE, dtype=np.int64),
            operator=table[:, 4],
            module=table[:, 5],
            kind=np.array(known + [NONE] * len(rows), dtype=np.int64),
            labels=tuple(self._labels),
            num_before=len(first),
        )
        return device_memory(recorded, device=device, source=SOURCE, kinds=KINDS)

    def _phase(self) -> int:
        if self._in_optimizer:
            return OPTIMIZER
        if torch._C._current_graph_task_id() != NONE:
            # Backward operators run without gradients; what runs again does so with them.
            return RECOMPUTE if torch.is_grad_enabled() else BACKWARD
        if self._names:
            return FORWARD if self._modules else OTHER
        return FORWARD if torch.is_grad_enabled() else OTHER

    def _enter_module(self, module: nn.Module, *_: Any) -> None:
        self._modules.append(self._labels[self._names.get(id(module), type(module).__name__)])

    def _leave_module(self, *_: Any) -> None:
        if self._modules:
            self._modules.pop()

    def _enter_optimizer(self, *_: Any) -> None:
        self._in_optimizer = True

    def _leave_optimizer(self, *_: Any) -> None:
        self._in_optimizer = False


def write_course(memory: DeviceMemory, run_folder: Path, rank: int) -> Path:
    """Write a rank's course where reports find it, and return the file."""
    path = run_folder / MEMORY_FOLDER / f"rank{rank}{TRACKED_SUFFIX}"
    path.parent.mkdir(exist_ok=True)
    content = RankMemory(path=path.name, rank=rank, devices=[memory])
    write_atomic(path, msgspec.json.encode(content))
    return path
