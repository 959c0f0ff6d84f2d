"""The operator counter: what was dispatched, and the FLOPs that were executed."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch.utils.flop_counter import flop_registry


class OperatorCounter:
    """Counts operators by name and executed FLOPs by operator.

    Executed FLOPs include recomputation and what flash attention computes twice: they say what
    the hardware did, never what MFU is made of.
    """

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._flops: Counter[str] = Counter()

    def see(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> None:
        """Count one call."""
        name = operator._schema.name
        self._calls[name] += 1
        formula = flop_registry.get(operator._overloadpacket)
        if formula is not None:
            self._flops[name] += int(formula(*args, **kwargs, out_val=output))

    def report(self) -> dict[str, Any]:
        """Return the number of calls, the executed FLOPs, and both by operator."""
        return {
            "count": self._calls.total(),
            "executed_flops": self._flops.total(),
            "by_operator": dict(sorted(self._calls.items())),
            "flops_by_operator": dict(sorted(self._flops.items())),
        }
