"""Sharded data parallelism: FSDP2 over every block, with gradients that are sums."""

from itertools import pairwise

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from models.protocol import Model
from parallel.mesh import Meshes
from parallel.plan import ParallelPlan


def shard(
    model: Model,
    meshes: Meshes,
    *,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool,
) -> None:
    """Shard ``model`` in place: its experts over their own mesh, its blocks, then the root.

    Gradients are summed over the data ranks, never averaged: the trainer divides by the number
    of targets of the whole step, which is the only exact mean when ranks differ in targets.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )

    def wrap(module: nn.Module, mesh: DeviceMesh, *, reshard: bool) -> None:
        wrapped = fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        sum_gradients(wrapped)

    if meshes.sparse is not None:
        for _, moe in model.moe_layers():
            wrap(moe.experts, meshes.experts, reshard=reshard_after_forward)
    for _, block in model.blocks():
        wrap(block, meshes.fsdp, reshard=reshard_after_forward)
    # The root holds embedding, final norm and head: used last forward and first backward.
    wrap(model, meshes.fsdp, reshard=False)
    _prefetch_in_forward(model)


def _prefetch_in_forward(model: Model) -> None:
    """Let each block gather the next one's parameters, its experts' too, before it computes.

    A backward does so by itself, in the order that the forward has recorded. A forward would
    gather a block when the host arrives there, which expert parallelism holds up: it waits for
    the numbers of rows that other ranks send.
    """
    for (_, block), (_, following) in pairwise(model.blocks()):
        inner: list[FSDPModule] = [m for m in following.modules() if isinstance(m, FSDPModule)]
        assert isinstance(block, FSDPModule)
        block.set_modules_to_forward_prefetch(inner)


def sum_gradients(module: FSDPModule) -> None:
    """Make the module's gradient reduction a plain sum.

    A factor of 1 alone would be sent as a PREMUL_SUM, which gloo does not have.
    """
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def prepare_backward(model: nn.Module, plan: ParallelPlan, *, last: bool) -> None:
    """Say what the backward pass of a microbatch does beyond adding up this rank's gradients.

    Args:
        last: whether it is the last one of the step.
    """
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(last or not plan.reduces_once)
    model.set_requires_all_reduce(last)
    model.set_reshard_after_backward(last or plan.reshards)


def reduce_now(model: nn.Module) -> None:
    """Reduce the gradients that are there, as a backward pass does whose hooks run."""
    assert isinstance(model, FSDPModule)
    for state in model._get_fsdp_state()._state_ctx.all_states:
        for group in state._fsdp_param_groups:
            group.post_backward()
