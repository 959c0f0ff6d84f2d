"""Building a workload's model on this rank: meta device, layout, memory, values."""

import torch

from models.initialization import collect_inits, initialize
from models.protocol import Model
from parallel.apply import parallelize
from parallel.mesh import Meshes
from parallel.stages import Placement, StageModel, cut, place
from workloads.workload import Workload


def build_stages(
    workload: Workload, placement: Placement, meshes: Meshes, device: torch.device
) -> list[StageModel]:
    """Return this rank's stages of the workload's model, laid out and initialized on ``device``.

    Nothing is ever materialized whole: the model is built on the meta device, cut, laid out, and
    each rank then fills the shards it holds, to the same values under every layout.
    """
    stages = []
    for number in workload.plan.stages_of(meshes.dense["pp"].get_local_rank()):
        stage = cut(build_whole(workload), placement, number)
        _lay_out(stage.model, workload, meshes, device)
        stages.append(stage)
    return stages


def build_whole(workload: Workload) -> Model:
    """Return the workload's whole model on the meta device."""
    with torch.device("meta"):
        return workload.model.build(routing=workload.routing)


def place_stages(workload: Workload) -> Placement:
    """Return which parts of the workload's model each pipeline stage holds."""
    plan = workload.plan
    return place(
        build_whole(workload),
        plan.num_stages,
        workload.sequence_length,
        num_sequence_parts=plan.num_sequence_parts,
    )


def _lay_out(model: Model, workload: Workload, meshes: Meshes, device: torch.device) -> None:
    inits = collect_inits(model)
    parallelize(
        model,
        workload.plan,
        meshes,
        compute_dtype=getattr(torch, workload.precision.compute),
        reduce_dtype=getattr(torch, workload.precision.reduce),
        quantization=workload.precision.quantization,
        quantized=workload.precision.quantize,
    )
    tied = model.ties_embedding
    model.to_empty(device=device)
    if tied:
        model.tie_embedding()
    initialize(model, inits, workload.training.seed)
