"""The trainer: the one training step that every run executes, on top of parallel/."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from models.batch import Batch
from models.layers.attention import AttentionCore
from parallel.fsdp import reduce_gradients
from parallel.layout import Shard, clear_gradients, collect_gradients, local_shards
from parallel.mesh import build_meshes
from workloads.build import build_model
from workloads.data import count_tokens, open_data
from workloads.workload import Training, Workload


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
        self.model = build_model(workload, self.meshes, device)
        self.shards = local_shards(self.model)
        self.optimizer = build_optimizer(self.shards, workload.training)
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
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        counts = [0, 0, 0]
        for microbatch in range(num_microbatches):
            batch = self._batch(index, microbatch)
            counts = [a + b for a, b in zip(counts, count_tokens(batch), strict=True)]
            reduce_gradients(self.model, microbatch == num_microbatches - 1)
            losses = self.model(*(tensor.to(self.device) for tensor in batch))
            losses.total.backward()
            sums += torch.stack((losses.main_sum, losses.mtp_sum))
        return self._update(sums, counts)

    @property
    def has_mtp(self) -> bool:
        """Whether the model also predicts further tokens."""
        return self.workload.model.counts().mtp > 0

    def standing_tensors(self) -> list[Tensor]:
        """Return what lives between steps: parameters, buffers and optimizer states."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        parameters = [leaf.detach() for _, leaf in self.shards]
        return [*parameters, *self.model.buffers(), *(s for s in states if torch.is_tensor(s))]

    def kernels(self) -> dict[str, str]:
        """Return which kernel ran for each of the operators that have several."""
        cores = [m for m in self.model.modules() if isinstance(m, AttentionCore)]
        names = {"attention": ", ".join(sorted({core.kernel for core in cores}))}
        if self.workload.precision.quantization == "mxfp8":
            native = self.device.type == "cuda" and torch.cuda.get_device_capability() >= (10, 0)
            names["mxfp8"] = "torchao" if native else "torchao, emulated"
        return names

    def _batch(self, index: int, microbatch: int) -> Batch:
        return self.data.batch(
            index,
            rank=self.meshes.data_rank(),
            num_ranks=self.workload.plan.num_data_ranks,
            microbatch=microbatch,
            num_microbatches=self.workload.plan.microbatches,
        )

    def _update(self, loss_sums: Tensor, counts: list[int]) -> StepTensors:
        """Clip, step and balance; everything global travels in one all-reduce."""
        gradients = collect_gradients(self.shards)
        norms = torch.stack(torch._foreach_norm(gradients)).double()
        # Shards are replicated dp_replicate times: each copy brings its part of the square sum.
        square_sum = norms.square().sum() / self.workload.plan.dp_replicate
        routed = [moe.router.tokens_per_expert for _, moe in self.model.moe_layers()]
        targets = torch.tensor([counts[2]], dtype=torch.float64, device=self.device)
        packed = torch.cat((loss_sums, targets, square_sum[None], *(c.double() for c in routed)))
        dist.all_reduce(packed)
        num_targets = packed[2].clamp(min=1)
        grad_norm = packed[3].sqrt() / num_targets
        self._apply(gradients, grad_norm, num_targets)
        self._balance(packed[4:])
        loss, mtp_loss = packed[:2] / num_targets
        return StepTensors(loss, mtp_loss, grad_norm, *counts)

    def _apply(self, gradients: list[Tensor], grad_norm: Tensor, num_targets: Tensor) -> None:
        """Turn gradient sums into clipped means and step the optimizer."""
        clip = (self.workload.training.max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, (clip / num_targets).to(gradients[0].dtype))
        self.optimizer.step()
        clear_gradients(self.shards)

    def _balance(self, counts: Tensor) -> None:
        """Move each learned router's bias towards even load, then forget the counts."""
        for _, moe in self.model.moe_layers():
            router = moe.router
            mine, counts = counts.tensor_split([router.tokens_per_expert.numel()])
            if self.workload.routing == "learned":
                router.update_bias(mine, self.workload.training.expert_bias_rate)
            router.tokens_per_expert.zero_()


def build_optimizer(shards: list[Shard], training: Training) -> torch.optim.Optimizer:
    """Return AdamW over local shards; vectors (norms, gates) are not decayed."""
    matrices = [shard.leaf for shard in shards if shard.leaf.dim() > 1]
    vectors = [shard.leaf for shard in shards if shard.leaf.dim() <= 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": training.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=training.learning_rate,
        betas=(training.beta1, training.beta2),
        eps=training.epsilon,
        fused=True,
    )
