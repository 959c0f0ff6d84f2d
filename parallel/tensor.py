"""Tensor parallelism: heads, hidden units and vocabulary divided, the sequence between them too.

Megatron's column and row products with sequence parallelism (arXiv:2205.05198) on plain local
tensors. Only the weights are DTensors, so that FSDP shards them over the data ranks as well and
their initial values are those of the rows and columns that they are.

Between layers a rank holds (B, S / tp, D). Parameters that no plan divides (norms, routers, latent
projections, shared experts) work on these tokens: their gradient is the sum over the ranks.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from models.batch import Losses
from models.layers.head import OutputHead, VocabularyShard
from models.layers.linear import Embedding, Linear, local
from models.layers.tensor_plan import TensorDivisible, TensorPlan
from models.protocol import Model
from parallel.collectives import gather_sequence, reduce_scatter_sequence, stack_ranks
from parallel.layout import divide_weight


def divide(model: Model, mesh: DeviceMesh) -> None:
    """Divide a meta-device ``model`` over the ranks of ``mesh``, in place."""
    for layer in list(planned_layers(model)):
        _divide_layer(layer, mesh)
    tied = model.ties_embedding
    if model.embedding is not None:
        _divide_embedding(model.embedding, mesh)
    if model.head is not None:
        _divide_head(model.head, mesh)
    if model.encoder is not None:
        _divide_features(model.encoder, mesh)
    if tied:
        model.tie_embedding()


class PlannedLayer(NamedTuple):
    """A layer with a plan, by its qualified name."""

    name: str
    module: nn.Module
    plan: TensorPlan

    def linear(self, name: str) -> Linear:
        """Return a linear map that the plan names."""
        linear = self.module.get_submodule(name)
        assert isinstance(linear, Linear), f"{self.name}.{name} is no linear map"
        return linear


def planned_layers(model: Model) -> Iterator[PlannedLayer]:
    """Yield the layers of every block whose plans hold: none is inside of another."""

    def search(name: str, module: nn.Module) -> Iterator[PlannedLayer]:
        if isinstance(module, TensorDivisible):
            yield PlannedLayer(name, module, module.tensor_plan)
            return
        for child_name, child in module.named_children():
            yield from search(f"{name}.{child_name}", child)

    for name, block in model.sequence_blocks():
        yield from search(name, block)


def _divide_layer(layer: PlannedLayer, mesh: DeviceMesh) -> None:
    """Carry out the plan of a layer."""
    group = mesh.get_group()
    _, module, plan = layer
    for name in plan.columns:
        _divide_linear(layer.linear(name), mesh, dim=0)
    for name in plan.vectors:
        owner_name, _, leaf = name.rpartition(".")
        owner = module.get_submodule(owner_name)
        setattr(owner, leaf, divide_weight(getattr(owner, leaf), mesh, 0))
    for name in plan.rows:
        linear = layer.linear(name)
        _divide_linear(linear, mesh, dim=1)
        linear.register_forward_hook(lambda _, args, out: reduce_scatter_sequence(out, group))
    for name in plan.gather_inputs:
        _gather_input(module.get_submodule(name), group)
    for name in plan.gather_outputs:
        gathered = module.get_submodule(name)
        gathered.register_forward_hook(lambda _, args, out: gather_sequence(out, group))


def _divide_linear(linear: Linear, mesh: DeviceMesh, *, dim: int) -> None:
    linear.weight = divide_weight(linear.weight, mesh, dim)
    linear.out_features, linear.in_features = local(linear.weight).shape


def _gather_input(module: nn.Module, group: dist.ProcessGroup) -> None:
    def gather_first(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (gather_sequence(args[0], group), *args[1:])

    module.register_forward_pre_hook(gather_first)


def _divide_embedding(embedding: Embedding, mesh: DeviceMesh) -> None:
    """Each rank looks up the ids of its rows; the sum over ranks has every id's vector."""
    group = mesh.get_group()
    embedding.weight = divide_weight(embedding.weight, mesh, 0)
    embedding.first_row = mesh.get_local_rank() * local(embedding.weight).shape[0]
    embedding.register_forward_hook(lambda _, args, out: reduce_scatter_sequence(out, group))


def _divide_features(encoder: nn.Module, mesh: DeviceMesh) -> None:
    """Every rank has the whole output, and a use, and so a gradient, of its part alone."""
    parts, rank = mesh.size(), mesh.get_local_rank()

    def take(_: nn.Module, args: Any, features: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # Copies: a view would keep the whole.
        return tuple(x_BSD.chunk(parts, dim=1)[rank].clone() for x_BSD in features)

    encoder.register_forward_hook(take)


def _divide_head(head: OutputHead, mesh: DeviceMesh) -> None:
    """Each rank has the logits of its rows for every token, and reports its share of the sums."""
    group = mesh.get_group()
    head.weight = divide_weight(head.weight, mesh, 0)
    first_row = mesh.get_local_rank() * local(head.weight).shape[0]
    head.shard = VocabularyShard(first_row, lambda x: stack_ranks(x, group))

    def gather_hidden(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return ([gather_sequence(hidden, group) for hidden in args[0]], *args[1:])

    def share(_: nn.Module, args: Any, losses: Losses) -> Losses:
        main, mtp = losses.main_sum / group.size(), losses.mtp_sum / group.size()
        return losses._replace(main_sum=main, mtp_sum=mtp)

    head.register_forward_pre_hook(gather_hidden)
    head.register_forward_hook(share)


def sum_replicated(gradients: list[Tensor], group: dist.ProcessGroup) -> None:
    """Sum the gradients of parameters that every tensor rank holds, by one all-reduce, in place."""
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
