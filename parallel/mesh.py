"""The device meshes: one named axis per kind of parallelism, each with a process group of its own.

A group of its own even where two axes span the same ranks: the group's description
(``mesh_<axis>``) is how instruments and traces attribute a collective to its axis.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallel.plan import ParallelPlan


class Meshes(NamedTuple):
    """The world, cut twice: for dense parameters and tokens, and for experts.

    ``dense`` has the axes pp, dp_replicate, dp_shard, cp, tp; ``sparse`` has pp, dp_replicate,
    efsdp, ep over the same ranks in the same order, so that the ep axis runs over neighbours in
    tp, then cp, then dp_shard. Tensor ranks route different tokens: to the experts they are data
    ranks, over which efsdp shards. Without either parallelism ``sparse`` is None.
    """

    dense: DeviceMesh
    fsdp: DeviceMesh
    """Shards (and replicates) all parameters but the experts': (dp_replicate,) dp_shard x cp."""
    sparse: DeviceMesh | None
    experts: DeviceMesh
    """Shards (and replicates) the experts' parameters: (dp_replicate,) efsdp."""

    def data_rank(self) -> int:
        """Return which part of the batch this rank trains on; cp and tp ranks share one."""
        replicate, shard = (self.dense[axis] for axis in ("dp_replicate", "dp_shard"))
        return replicate.get_local_rank() * shard.size() + shard.get_local_rank()

    def sequence_rank(self) -> int:
        """Return which part of its sequences this rank counts, of cp x tp."""
        cp, tp = self.dense["cp"], self.dense["tp"]
        return cp.get_local_rank() * tp.size() + tp.get_local_rank()


def build_meshes(plan: ParallelPlan, device_type: str) -> Meshes:
    """Return the meshes of a resolved plan over the initialized default process group."""
    dense, fsdp = _dense_meshes(plan, device_type)
    if plan.ep == 1 and plan.tp == 1:
        return Meshes(dense, fsdp, None, fsdp)
    sparse = _mesh(
        device_type, pp=plan.pp, dp_replicate=plan.dp_replicate, efsdp=plan.efsdp, ep=plan.ep
    )
    return Meshes(dense, fsdp, sparse, _replicated(sparse, "efsdp", plan))


def _dense_meshes(plan: ParallelPlan, device_type: str) -> tuple[DeviceMesh, DeviceMesh]:
    """Return the mesh of all five axes, and the one over which parameters are sharded."""
    outer = {"pp": plan.pp, "dp_replicate": plan.dp_replicate}
    shared = {"dp_shard": plan.dp_shard, "cp": plan.cp}
    if plan.cp == 1:
        dense = _mesh(device_type, **outer, **shared, tp=plan.tp)
        return dense, _replicated(dense, "dp_shard", plan)
    # One axis of dp_shard x cp ranks shards parameters; taken apart, it shares out tokens.
    whole = _mesh(device_type, **outer, dp_shard_cp=plan.dp_shard * plan.cp, tp=plan.tp)
    groups = _own_groups(shared, device_type)
    dense = whole._unflatten("dp_shard_cp", tuple(shared.values()), tuple(shared), groups)
    return dense, _replicated(whole, "dp_shard_cp", plan)


def _mesh(device_type: str, **sizes: int) -> DeviceMesh:
    return init_device_mesh(
        device_type,
        tuple(sizes.values()),
        mesh_dim_names=tuple(sizes),
        backend_override=_own_groups(sizes, device_type),
    )


def _replicated(mesh: DeviceMesh, shard_axis: str, plan: ParallelPlan) -> DeviceMesh:
    return mesh["dp_replicate", shard_axis] if plan.dp_replicate > 1 else mesh[shard_axis]


def _own_groups(axes: Iterable[str], device_type: str) -> dict[Any, Any]:
    return dict.fromkeys(axes, torch.distributed.get_default_backend_for_device(device_type))
