"""The local layout: dividing weights, and this rank's shards as tensors for the optimizer.

The optimizer works on plain tensors that share the shards' storage: elementwise updates need no
knowledge of the layout, and experts (sharded over another mesh) go through the same fused call.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Divided

from models.layers.linear import local

TENSOR_AXES = {"tp", "efsdp"}
"""Mesh axes over which tensor ranks hold different parts: their own, and that of the experts."""


class Shard(NamedTuple):
    """A parameter of the model and the plain leaf that shares its local storage."""

    parameter: nn.Parameter
    leaf: nn.Parameter

    @property
    def on_every_tensor_rank(self) -> bool:
        """Whether tensor-parallel ranks hold the same part, and each a part of its gradient."""
        assert isinstance(self.parameter, DTensor), "FSDP makes every parameter a DTensor"
        return TENSOR_AXES.isdisjoint(self.parameter.device_mesh.mesh_dim_names or ())


def divide_weight(weight: Tensor, mesh: DeviceMesh, dim: int) -> nn.Parameter:
    """Return a meta-device weight as the DTensor whose dimension ``dim`` is divided over ``mesh``.

    Raises:
        ValueError: if the ranks do not divide the dimension.
    """
    size, num_ranks = weight.shape[dim], mesh.size()
    if size % num_ranks:
        raise ValueError(f"a weight of shape {tuple(weight.shape)} over {num_ranks} ranks: {size}")
    shape = [*weight.shape]
    shape[dim] //= num_ranks
    part = DTensor.from_local(weight.new_empty(shape), mesh, [Divided(dim)], run_check=False)
    return nn.Parameter(part)


def local_shards(model: nn.Module) -> list[Shard]:
    """Return the shard of every parameter that this rank holds a part of."""
    pairs = [Shard(p, nn.Parameter(local(p.detach()))) for p in model.parameters()]
    return [pair for pair in pairs if pair.leaf.numel() > 0]


def collect_gradients(shards: list[Shard]) -> list[Tensor]:
    """Hand each leaf its parameter's gradient and return the gradients.

    A parameter without a gradient (an expert of a batch that never chose it, say) gets zeros:
    AdamW's decay and moments then do the same on every layout.
    """
    for parameter, leaf in shards:
        gradient = parameter.grad
        leaf.grad = torch.zeros_like(leaf) if gradient is None else local(gradient.detach())
    return [leaf.grad for _, leaf in shards if leaf.grad is not None]


def clear_gradients(shards: list[Shard]) -> None:
    """Free the gradients of leaves and parameters."""
    for parameter, leaf in shards:
        parameter.grad = None
        leaf.grad = None
