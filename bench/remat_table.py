"""What rematerialization would keep and recompute, region by region, from real passes of a block.

Every number comes from a forward and a backward pass of one block on real activations, seen by
the exact counters: bytes are the storages alive between the two beyond the block's input and
output, FLOPs what both passes executed. Nothing is modelled.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bench.instruments.memory import TensorBytes
from bench.instruments.observation import Observation
from bench.instruments.operators import OperatorCounter
from models.batch import Batch
from models.initialization import collect_inits, initialize
from models.protocol import Model
from parallel.remat import REGIONS, rematerialize_block, replace_forward
from workloads.build import build_whole
from workloads.data import open_data
from workloads.workload import Workload


class Passes(NamedTuple):
    """A forward and a backward pass of a block."""

    kept_bytes: int
    """Alive between them, beyond the block's input and output."""
    executed_flops: int


class Region(NamedTuple):
    """What keeping a region alone changes against keeping nothing but the block's input."""

    kept_bytes: int
    spared_flops: int


class BlockTable(NamedTuple):
    """A block under every policy: nothing recomputed, everything, and all but one region."""

    none: Passes
    full: Passes
    regions: dict[str, Region]

    @property
    def recomputed_flops(self) -> int:
        """FLOPs that ``full`` executes again."""
        return self.full.executed_flops - self.none.executed_flops


def tabulate(workload: Workload) -> dict[str, BlockTable]:
    """Return the table of each block of the workload's model on one rank, by the block's name.

    The batch is that of one microbatch of one data rank; ``plan.remat`` is not looked at, and a
    region that a block does not have is left out.
    """
    model = _build(workload)
    batch = _batch(workload)
    inputs = capture_inputs(model, batch)
    return {name: tabulate_block(block, inputs[name]) for name, block in model.blocks()}


def tabulate_block(block: nn.Module, inputs: tuple[Any, ...]) -> BlockTable:
    """Return the table of a block that is called as ``block(*inputs)``."""
    none, full = observe(block, inputs, None), observe(block, inputs, ())
    present = {
        region
        for region, kinds in REGIONS.items()
        if any(isinstance(module, kinds) for module in block.modules())
    }
    regions = {}
    for region in (name for name in REGIONS if name in present):
        passes = observe(block, inputs, (region,))
        regions[region] = Region(
            passes.kept_bytes - full.kept_bytes, full.executed_flops - passes.executed_flops
        )
    return BlockTable(none, full, regions)


def observe(block: nn.Module, inputs: tuple[Any, ...], saved: Collection[str] | None) -> Passes:
    """Return the passes of ``block`` that keep ``saved`` alone; None recomputes nothing.

    The block is left as it was.
    """
    own = {module: module.forward for module in block.modules()}
    if saved is not None:
        rematerialize_block(block, "block", saved)
    try:
        return _run(block, inputs)
    finally:
        block.zero_grad()
        for module, forward in own.items():
            replace_forward(module, forward)


def _run(block: nn.Module, inputs: tuple[Any, ...]) -> Passes:
    args = tuple(_differentiable(x) if isinstance(x, Tensor) else x for x in inputs)
    # What all blocks share (positions, rotary tables) stands too.
    given = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
    tensors = [*given, *block.parameters(), *block.buffers()]
    operators = OperatorCounter()
    with TensorBytes(tensors) as live, Observation([live, operators]):
        output = block(*args)
        outputs = output if isinstance(output, tuple) else (output,)
        kept = live.live_bytes - live.standing_bytes - _storage_bytes(outputs)
        torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
    return Passes(kept, operators.report()["executed_flops"])


def capture_inputs(model: Model, batch: Batch) -> dict[str, tuple[Any, ...]]:
    """Return what each block of ``model`` is called with in a forward pass of ``batch``."""
    inputs: dict[str, tuple[Any, ...]] = {}
    handles = []
    for name, block in model.blocks():

        def keep(_: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
            inputs[name] = args

        handles.append(block.register_forward_pre_hook(keep))
    with torch.no_grad():
        model(*batch)
    for handle in handles:
        handle.remove()
    return inputs


def _differentiable(x: Tensor) -> Tensor:
    """A copy of an input that stands alone and gets a gradient."""
    return x.detach().clone().requires_grad_(x.is_floating_point())


def _storage_bytes(tensors: tuple[Tensor, ...]) -> int:
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


def _build(workload: Workload) -> Model:
    """The whole model on the CPU, its weights in the compute dtype as FSDP would gather them."""
    model = build_whole(workload)
    inits, tied = collect_inits(model), model.ties_embedding
    if workload.precision.quantization == "mxfp8":
        from parallel.quantization import quantize

        quantize(model, workload.precision.quantize)
    model.to_empty(device="cpu")
    if tied:
        model.tie_embedding()
    initialize(model, inits, workload.training.seed)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, workload.precision.compute))
    return model


def _batch(workload: Workload) -> Batch:
    plan = workload.plan
    data = open_data(
        workload.data,
        sequence_length=workload.sequence_length,
        global_batch_size=workload.global_batch_size,
        vocab_size=workload.model.vocab_size,
        seed=workload.training.seed,
    )
    return data.batch(
        0,
        rank=0,
        num_ranks=plan.num_data_ranks,
        microbatch=0,
        num_microbatches=plan.microbatches,
    )
