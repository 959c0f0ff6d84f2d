"""The collective counter: every collective of a step by axis, kind and bytes."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

_NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")
_KINDS = {
    "all_to_all": ("alltoall", "all_to_all"),
    "all_gather": ("allgather", "all_gather"),
    "reduce_scatter": ("reduce_scatter",),
    "all_reduce": ("allreduce", "all_reduce"),
    "broadcast": ("broadcast",),
    "send": ("send",),
    "recv": ("recv",),
    "barrier": ("barrier",),
}


class CollectiveCounter:
    """Counts collectives as ``{axis: {kind: {"count", "bytes"}}}`` for this rank.

    ``bytes`` is the larger of the rank's two buffers: the gathered output of an all-gather, the
    full input of a reduce-scatter, the tensor of an all-reduce, the rows sent (or received, if
    more) of an all-to-all. Groups of one rank move nothing and do not count.
    """

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, dict[str, int]]] = defaultdict(dict)

    def see(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> None:
        """Count the operator if it is a collective."""
        kind = collective_kind(operator) if operator.namespace in _NAMESPACES else None
        if kind is None:
            return
        group = _group_of(args)
        if group is None or group.size() == 1:
            return
        entry = self._counts[axis_of(group)].setdefault(kind, {"count": 0, "bytes": 0})
        entry["count"] += 1
        entry["bytes"] += max(_sizes(args, output), default=0)

    def report(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return the counts, axes and kinds in order."""
        return {axis: dict(sorted(self._counts[axis].items())) for axis in sorted(self._counts)}


def collective_kind(operator: Any) -> str | None:
    """Return the kind of a collective operator, or None for a wait or a wrapper."""
    name = operator._schema.name.split("::")[1]
    for kind, stems in _KINDS.items():
        if any(stem in name for stem in stems):
            return kind
    return None


def axis_of(group: dist.ProcessGroup) -> str:
    """Return the mesh axis of a group, from the description the mesh gave it."""
    return group.group_desc.removeprefix("mesh_") or "world"


def _group_of(args: Sequence[Any]) -> dist.ProcessGroup | None:
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.ProcessGroup.unbox(argument)
    names = [argument for argument in args if isinstance(argument, str)]
    return _resolve_process_group(GroupName(names[-1])) if names else None


def _sizes(args: Sequence[Any], output: Any) -> Iterator[int]:
    """Yield the bytes of each tensor or list of tensors among arguments and output."""
    for value in (*args, output):
        if isinstance(value, torch.Tensor):
            yield value.numel() * value.element_size()
        elif isinstance(value, list | tuple):
            yield sum(_sizes(value, None))
