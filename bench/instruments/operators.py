"""The operator counter: what was dispatched, and the FLOPs that were executed."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry


class OperatorCounter:
    """Counts operators by name and executed FLOPs by operator.

    Executed FLOPs include recomputation and what flash attention computes twice: they say what
    the hardware did, never what MFU is made of.
    """

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._flops: Counter[str] = Counter()
        self._recomputed: Counter[str] = Counter()

    def see(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> None:
        """Count one call."""
        name = operator._schema.name
        self._calls[name] += 1
        formula = flop_registry.get(operator._overloadpacket)
        if formula is not None:
            flops = int(formula(*args, **kwargs, out_val=output))
            self._flops[name] += flops
            self._recomputed[name] += flops if _is_recomputation() else 0

    def report(self) -> dict[str, Any]:
        """Return the number of calls, the executed FLOPs, and both by operator."""
        return {
            "count": self._calls.total(),
            "executed_flops": self._flops.total(),
            "by_operator": dict(sorted(self._calls.items())),
            "flops_by_operator": dict(sorted(self._flops.items())),
            "recomputed_flops_by_operator": dict(sorted((+self._recomputed).items())),
        }


def _is_recomputation() -> bool:
    """Whether the backward pass runs, with gradients on as only what it runs again needs them."""
    return torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled()
