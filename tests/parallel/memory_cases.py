"""What the ranks of a pool run to see their memory: a step of tiny models, by kind and moment."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from bench.instruments.memory import TensorBytes
from bench.instruments.observation import Observation
from bench.trainer import Trainer
from models.layers.linear import local
from parallel.layout import TENSOR_AXES
from parallel.pipeline import Stage
from workloads.workload import Workload

Kinds = dict[str, int]


class Memory(NamedTuple):
    """Bytes of a rank by kind; "other" is activations, and what an operator works with."""

    peak: Kinds
    at_update: Kinds
    """When the optimizer steps."""
    after_chunks: list[tuple[str, int, Kinds]]
    """What ran (forward, backward, backward_input, backward_weight), of which stage, and then."""


def memory_of_a_step(workload: Workload) -> Memory:
    """Return the memory of a step after the first, which makes moments and sets FSDP up."""
    trainer = Trainer(workload, torch.device("cpu"))
    trainer.step(0)
    live = TensorBytes(trainer.standing_tensors())
    shards = [shard.leaf.detach() for shard in trainer.shards]
    live.mark("parameters", shards)
    live.mark("moments", _moments(trainer))
    at_update: list[Kinds] = []
    after_chunks: list[tuple[str, int, Kinds]] = []

    def see_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        live.mark("gradients", [shard.leaf.grad for shard in trainer.shards])
        at_update.append(live.live_by_kind())

    def see_chunk(name: str, stage: int, model: torch.nn.Module) -> None:
        mine = {shard.untyped_storage().data_ptr() for shard in shards}
        weights = [local(parameter.detach()) for parameter in model.parameters()]
        gathered = [x for x in weights if x.untyped_storage().data_ptr() not in mine]
        live.mark("gathered", [x for x in gathered if x.untyped_storage().nbytes()])
        after_chunks.append((name, stage, live.live_by_kind()))

    trainer.optimizer.register_step_pre_hook(see_update)
    watch = _chunks_of_stages if trainer.pipeline else _forwards
    with watch(trainer, see_chunk), live, Observation([live]):
        trainer.step(1)
    return Memory(live.peak_by_kind(), at_update[0], after_chunks)


def parameters_of_a_rank(workload: Workload) -> tuple[int, int, int, int]:
    """Return numbers of parameters: whole, divided by tensor ranks, experts; and shards here."""
    trainer = Trainer(workload, torch.device("cpu"))
    experts = {
        id(p)
        for model in trainer.models
        for _, moe in model.moe_layers()
        for p in moe.experts.parameters()
    }
    numbers = [0, 0, 0]
    for shard in trainer.shards:
        on_all = TENSOR_AXES.isdisjoint(shard.parameter.device_mesh.mesh_dim_names or ())
        kind = 2 if id(shard.parameter) in experts else 0 if on_all else 1
        numbers[kind] += shard.parameter.numel()
    return numbers[0], numbers[1], numbers[2], len(trainer.shards)


def _moments(trainer: Trainer) -> list[Tensor]:
    states = trainer.optimizer.state.values()
    return [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]


@contextmanager
def _forwards(trainer: Trainer, see: Any) -> Iterator[None]:
    (model,) = trainer.models
    handle = model.register_forward_hook(lambda model, *_: see("forward", 0, model))
    yield
    handle.remove()


@contextmanager
def _chunks_of_stages(trainer: Trainer, see: Any) -> Iterator[None]:
    names = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(Stage, name, _seen(name.removesuffix("_one_chunk"), see))
        yield


def _seen(name: str, see: Any) -> Any:
    original = getattr(Stage, f"{name}_one_chunk")

    def call(stage: Stage, *args: Any, full_backward: bool = True, **kwargs: Any) -> Any:
        if name == "backward":
            kwargs["full_backward"] = full_backward
        result = original(stage, *args, **kwargs)
        see(name if full_backward else "backward_input", stage.stage_index, stage.submod)
        return result

    return call
