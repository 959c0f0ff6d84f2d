"""The observation: every operator of a step, shown to the exact counters.

Counting slows a step down severalfold, so it happens in a step of its own, outside the measured
ones. What it counts is exact and repeatable, which is what a check on a CPU can gate on.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Observer(Protocol):
    """Sees each dispatched operator after it ran."""

    def see(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> None:
        """Take note of one call."""


class Observation(TorchDispatchMode):
    """A context in which every operator on plain tensors is shown to the observers.

    Tensor subclasses (DTensor, results of asynchronous collectives) unwrap themselves first, so
    that an operator is seen once, with the tensors this rank really computes on.
    """

    def __init__(self, observers: Iterable[Observer]) -> None:
        super().__init__()
        self._observers = tuple(observers)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator and show it around."""
        if any(issubclass(kind, torch.Tensor) and kind is not torch.Tensor for kind in types):
            return NotImplemented
        output = func(*args, **(kwargs or {}))
        # prim::device is half of all calls under sharding and computes nothing.
        if func.namespace != "prim":
            for observer in self._observers:
                observer.see(func, args, kwargs or {}, output)
        return output
