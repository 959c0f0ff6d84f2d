"""The trainer: the one training step that every run executes, on top of parallel/."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.batch import Batch
from models.layers.attention import AttentionCore
from models.layers.compressed_attention import CompressedAttentionCore, Indexer
from models.layers.delta_rule import DeltaRuleCore
from models.layers.vision import VisionBlock
from models.protocol import NamedMoE
from parallel.fsdp import prepare_backward
from parallel.layout import Shard, clear_gradients, collect_gradients, local_shards
from parallel.mesh import build_meshes
from parallel.optimizer import LowPrecisionAdamW
from parallel.pipeline import Pipeline, Shapes
from parallel.stages import describe_parts, stage_durations
from parallel.tensor import sum_replicated
from workloads.build import build_stages, build_whole, place_stages
from workloads.data import count_tokens, open_data
from workloads.workload import Training, Workload

KERNEL_KINDS: dict[str, tuple[type[nn.Module], ...]] = {
    "attention": (AttentionCore, CompressedAttentionCore),
    "indexer": (Indexer,),
    "linear attention": (DeltaRuleCore,),
    "vision attention": (VisionBlock,),
}
"""The modules that keep the name of the kernel which served them last, by what the record says."""


class StepTensors(NamedTuple):
    """A step's results before the host has waited for them; losses are means per target."""

    loss: Tensor
    mtp_loss: Tensor
    grad_norm: Tensor
    tokens: int
    padding: int
    targets: int


class Trainer:
    """A model laid out over the ranks of the default process group, its data and optimizer."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self.workload = workload
        self.device = device
        self.meshes = build_meshes(workload.plan, device.type)
        self.placement = place_stages(workload)
        self.stages = build_stages(workload, self.placement, self.meshes, device)
        self.models = [stage.model for stage in self.stages]
        self.pipeline = self._build_pipeline() if workload.plan.pp > 1 else None
        self.routers = {
            name: moe.router.config.num_experts for name, moe in build_whole(workload).moe_layers()
        }
        self.shards = [shard for model in self.models for shard in local_shards(model)]
        self.copies = self._count_copies()
        self.optimizer = build_optimizer(
            self.shards, workload.training, getattr(torch, workload.precision.optimizer_states)
        )
        self.data = open_data(
            workload.data,
            sequence_length=workload.sequence_length,
            global_batch_size=workload.global_batch_size,
            vocab_size=workload.model.vocab_size,
            seed=workload.training.seed,
        )

    def step(self, index: int) -> StepTensors:
        """Run training step ``index``: forward, backward, clipping, AdamW, router balancing."""
        num_microbatches = self.workload.plan.microbatches
        batches = [self._batch(index, microbatch) for microbatch in range(num_microbatches)]
        counts = [count_tokens(self._share(batch)) for batch in batches]
        inputs = [Batch(*(tensor.to(self.device) for tensor in batch)) for batch in batches]
        sums = self.pipeline.step(inputs) if self.pipeline else self._accumulate(inputs)
        # The ranks of a pipeline have the same batches: the one with the last stage counts them.
        counted = any(model.head is not None for model in self.models)
        return self._update(sums, [sum(column) * counted for column in zip(*counts, strict=True)])

    def moe_layers(self) -> list[NamedMoE]:
        """Return the mixture-of-experts layers of this rank's stages."""
        return [named for model in self.models for named in model.moe_layers()]

    @property
    def has_mtp(self) -> bool:
        """Whether the model also predicts further tokens."""
        return self.workload.model.counts().mtp > 0

    def standing_tensors(self) -> list[Tensor]:
        """Return what lives between steps: parameters, buffers and optimizer states."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        parameters = [leaf.detach() for _, leaf in self.shards]
        buffers = [buffer for model in self.models for buffer in model.buffers()]
        return [*parameters, *buffers, *(s for s in states if torch.is_tensor(s))]

    def kernels(self) -> dict[str, str]:
        """Return which kernel ran for each of the operators that have several."""
        modules = [module for model in self.models for module in model.modules()]
        names = {}
        for kind, types in KERNEL_KINDS.items():
            kernels = {str(module.kernel) for module in modules if isinstance(module, types)}
            if kernels:
                names[kind] = ", ".join(sorted(kernels))
        if self.workload.precision.quantization == "mxfp8":
            native = self.device.type == "cuda" and torch.cuda.get_device_capability() >= (10, 0)
            names["mxfp8"] = "torchao" if native else "torchao, emulated"
        return names

    def describe_pipeline(self) -> dict[str, Any]:
        """Return the pipeline's stages and its bubble, which is 0 without stages.

        Nothing measures a stage alone: the durations are the stages' FLOPs.
        """
        plan = self.workload.plan
        if self.pipeline is None:
            return {"num_stages": 1, "bubble_percent": 0.0}
        return {
            "num_stages": plan.num_stages,
            "bubble_percent": 100 * self.pipeline.bubble(stage_durations(self.placement)),
            "durations": "the FLOPs of each stage",
            "schedule": plan.schedule,
            "parts": describe_parts(self.placement),
        }

    def _batch(self, index: int, microbatch: int) -> Batch:
        return self.data.batch(
            index,
            rank=self.meshes.data_rank(),
            num_ranks=self.workload.plan.num_data_ranks,
            microbatch=microbatch,
            num_microbatches=self.workload.plan.microbatches,
        )

    def _share(self, batch: Batch) -> Batch:
        """Return the part of a batch that this rank counts: ranks that share it count it once."""
        parts = self.workload.plan.num_sequence_parts
        return Batch(*(x.chunk(parts, dim=1)[self.meshes.sequence_rank()] for x in batch))

    def _build_pipeline(self) -> Pipeline:
        workload = self.workload
        plan = workload.plan
        shape = (
            workload.global_batch_size // (plan.num_data_ranks * plan.microbatches),
            workload.sequence_length // plan.num_sequence_parts,
            workload.model.dim,
        )
        compute_dtype = getattr(torch, workload.precision.compute)
        return Pipeline(
            self.stages,
            plan,
            self.meshes.dense["pp"].get_group(),
            Shapes(shape, compute_dtype, self.device),
            self.placement.embedding_stages,
        )

    def _count_copies(self) -> Tensor:
        """Return how many ranks hold each shard: each brings its part of the square sum."""
        embeddings = {id(m.embedding.weight) for m in self.models if m.embedding is not None}
        num_embeddings = len(self.placement.embedding_stages)
        copies = [
            self.workload.plan.num_copies(shard.on_every_tensor_rank)
            * (num_embeddings if id(shard.parameter) in embeddings else 1)
            for shard in self.shards
        ]
        return torch.tensor(copies, dtype=torch.float64, device=self.device)

    def _accumulate(self, batches: list[Batch]) -> Tensor:
        """Run forward and backward of every microbatch; return the sums of both losses."""
        (model,) = self.models
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for microbatch, batch in enumerate(batches, start=1):
            prepare_backward(model, self.workload.plan, last=microbatch == len(batches))
            losses = model(*batch)
            losses.total.backward()
            sums += torch.stack((losses.main_sum, losses.mtp_sum))
        return sums

    def _update(self, loss_sums: Tensor, counts: list[int]) -> StepTensors:
        """Clip, step and balance; everything global travels in one all-reduce."""
        gradients = collect_gradients(self.shards)
        self._sum_over_tensor_ranks(gradients)
        norms = torch.stack(torch._foreach_norm(gradients)).double()
        square_sum = (norms.square() / self.copies).sum()
        here = {name: moe.router.tokens_per_expert for name, moe in self.moe_layers()}
        routed = [
            here[name] if name in here else torch.zeros(size, device=self.device)
            for name, size in self.routers.items()
        ]
        targets = torch.tensor([counts[2]], dtype=torch.float64, device=self.device)
        packed = torch.cat((loss_sums, targets, square_sum[None], *(c.double() for c in routed)))
        dist.all_reduce(packed)
        num_targets = packed[2].clamp(min=1)
        grad_norm = packed[3].sqrt() / num_targets
        self._apply(gradients, grad_norm, num_targets)
        self._balance(packed[4:])
        loss, mtp_loss = packed[:2] / num_targets
        return StepTensors(loss, mtp_loss, grad_norm, *counts)

    def _sum_over_tensor_ranks(self, gradients: list[Tensor]) -> None:
        if self.workload.plan.tp > 1:
            pairs = zip(self.shards, gradients, strict=True)
            replicated = [grad for shard, grad in pairs if shard.on_every_tensor_rank]
            sum_replicated(replicated, self.meshes.dense["tp"].get_group())

    def _apply(self, gradients: list[Tensor], grad_norm: Tensor, num_targets: Tensor) -> None:
        """Turn gradient sums into clipped means and step the optimizer."""
        clip = (self.workload.training.max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, (clip / num_targets).to(gradients[0].dtype))
        self.optimizer.step()
        clear_gradients(self.shards)

    def _balance(self, counts: Tensor) -> None:
        """Move each learned router's bias towards even load, then forget the counts."""
        mine = dict(zip(self.routers, counts.split(list(self.routers.values())), strict=True))
        for name, moe in self.moe_layers():
            router = moe.router
            if self.workload.routing == "learned":
                router.update_bias(mine[name], self.workload.training.expert_bias_rate)
            router.tokens_per_expert.zero_()


def build_optimizer(
    shards: list[Shard], training: Training, states: torch.dtype
) -> torch.optim.Optimizer:
    """Return AdamW over local shards, its moments in ``states``; vectors are not decayed."""
    matrices = [shard.leaf for shard in shards if shard.leaf.dim() > 1]
    vectors = [shard.leaf for shard in shards if shard.leaf.dim() <= 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": training.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    rate, betas = training.learning_rate, (training.beta1, training.beta2)
    if states == torch.bfloat16:
        return LowPrecisionAdamW(groups, lr=rate, betas=betas, eps=training.epsilon)
    return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=training.epsilon, fused=True)
