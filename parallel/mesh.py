"""The device mesh: one named axis per kind of parallelism, each with a process group of its own.

A group of its own even where two axes span the same ranks: the group's description
(``mesh_<axis>``) is how instruments and traces attribute a collective to its axis.
"""

from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallel.plan import ParallelPlan


class Meshes(NamedTuple):
    """The views of the world that the kinds of parallelism work on.

    ``dense`` shards (and replicates) all parameters but the experts', ``experts`` those of the
    experts, ``expert_parallel`` exchanges tokens. The first two have the dimensions
    (``dp_replicate``,) shard; the last one is None without expert parallelism.
    """

    world: DeviceMesh
    dense: DeviceMesh
    experts: DeviceMesh
    expert_parallel: DeviceMesh | None


def build_meshes(plan: ParallelPlan, device_type: str) -> Meshes:
    """Return the meshes of a resolved plan over the initialized default process group."""
    backend = torch.distributed.get_default_backend_for_device(device_type)
    own_group: dict[Any, Any] = {"dp_replicate": backend, "dp_shard": backend}
    world = init_device_mesh(
        device_type,
        (plan.dp_replicate, plan.dp_shard),
        mesh_dim_names=("dp_replicate", "dp_shard"),
        backend_override=own_group,
    )
    dense = world if plan.dp_replicate > 1 else world["dp_shard"]
    if plan.ep == 1:
        return Meshes(world, dense, dense, None)
    sparse = world._unflatten(
        "dp_shard",
        (plan.dp_shard // plan.ep, plan.ep),
        ("efsdp", "ep"),
        backend_override={"efsdp": backend, "ep": backend},
    )
    experts = sparse["dp_replicate", "efsdp"] if plan.dp_replicate > 1 else sparse["efsdp"]
    return Meshes(world, dense, experts, sparse["ep"])
