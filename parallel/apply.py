"""Laying a model out over devices: every kind of parallelism, in its one fixed order."""

from collections.abc import Collection

import torch

from models.protocol import Model
from parallel.compile import compile_model
from parallel.context import spread_sequence
from parallel.expert import spread_experts
from parallel.fsdp import shard
from parallel.mesh import Meshes
from parallel.plan import ParallelPlan
from parallel.remat import rematerialize
from parallel.tensor import divide


def parallelize(
    model: Model,
    plan: ParallelPlan,
    meshes: Meshes,
    *,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    quantization: str,
    quantized: Collection[str],
) -> None:
    """Lay out a meta-device ``model`` in place; its parameters become sharded DTensors.

    Tensor, expert and context parallelism, quantization, rematerialization, compilation and
    sharding, in this order: each works on what the ones before it left.
    """
    if plan.tp > 1:
        divide(model, meshes.dense["tp"])
    if plan.ep > 1:
        assert meshes.sparse is not None
        spread_experts(model, meshes.sparse["ep"], plan)
    if plan.cp > 1:
        spread_sequence(model, meshes.dense["cp"], plan.context)
    if quantization == "mxfp8":
        # Imported here: torchao costs every rank seconds that other precisions do not owe.
        from parallel.quantization import quantize

        quantize(model, quantized)
    rematerialize(model, plan.remat, plan.remat_save)
    compile_model(model, plan.compile)
    shard(
        model,
        meshes,
        compute_dtype=compute_dtype,
        reduce_dtype=reduce_dtype,
        reshard_after_forward=plan.reshards,
    )
