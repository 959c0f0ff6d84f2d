"""The local layout: this rank's shard of every parameter, as plain tensors for the optimizer.

The optimizer works on plain tensors that share the shards' storage: elementwise updates need no
knowledge of the layout, and experts (sharded over another mesh) go through the same fused call.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Shard(NamedTuple):
    """A parameter of the model and the plain leaf that shares its local storage."""

    parameter: nn.Parameter
    leaf: nn.Parameter


def local(tensor: Tensor) -> Tensor:
    """Return the plain local tensor of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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
