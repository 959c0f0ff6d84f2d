"""Building a workload's model on this rank: meta device, layout, memory, values."""

import torch

from models.initialization import collect_inits, initialize
from models.protocol import Model
from parallel.apply import parallelize
from parallel.mesh import Meshes
from workloads.workload import Workload


def build_model(workload: Workload, meshes: Meshes, device: torch.device) -> Model:
    """Return the workload's model, laid out over ``meshes`` and initialized on ``device``.

    Nothing is ever materialized whole: the model is built on the meta device, laid out, and
    each rank then fills the shards it holds, to the same values under every layout.
    """
    with torch.device("meta"):
        model = workload.model.build(routing=workload.routing)
    inits = collect_inits(model)
    parallelize(
        model,
        workload.plan,
        meshes,
        compute_dtype=getattr(torch, workload.precision.compute),
        reduce_dtype=getattr(torch, workload.precision.reduce),
        quantization=workload.precision.quantization,
    )
    model.to_empty(device=device)
    initialize(model, inits, workload.training.seed)
    return model
