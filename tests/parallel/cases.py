"""What the ranks of a pool run: training steps of tiny models under a plan."""

from typing import Any

import torch
from msgspec.structs import replace

from bench.instruments.collectives import CollectiveCounter
from bench.instruments.memory import TensorBytes
from bench.instruments.observation import Observation
from bench.instruments.operators import OperatorCounter
from bench.trainer import Trainer
from models.deepseek_v3 import DEEPSEEK_V3_PROXY
from models.muse_spark import MUSE_SPARK_PROXY
from parallel.plan import ParallelPlan
from workloads.workload import Precision, Workload

DEEPSEEK = replace(
    DEEPSEEK_V3_PROXY,
    dim=64,
    num_layers=2,
    num_heads=2,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=32,
    qk_rope_head_dim=32,
    v_head_dim=32,
    dense_hidden_dim=64,
    expert_hidden_dim=32,
    num_experts=8,
    num_experts_per_token=2,
)
MUSE = MUSE_SPARK_PROXY
MODELS = {"deepseek_v3": DEEPSEEK, "muse_spark": MUSE}
FP32 = Precision(compute="float32")


def tiny(
    model: str, world_size: int, *, precision: Precision = FP32, data: str = "text", **plan: Any
) -> Workload:
    """Return a workload of 4 sequences of 128 tokens under a plan for ``world_size`` ranks."""
    return Workload(
        name="tiny",
        model=MODELS[model],
        sequence_length=128,
        global_batch_size=4,
        data=data,
        precision=precision,
        plan=ParallelPlan(**plan).resolve(world_size),
    )


def train(workload: Workload, steps: int = 3) -> list[tuple[float, float, float]]:
    """Return loss, MTP loss and gradient norm of each step."""
    trainer = Trainer(workload, torch.device("cpu"))
    results = [trainer.step(index) for index in range(steps)]
    return [(r.loss.item(), r.mtp_loss.item(), r.grad_norm.item()) for r in results]


def count_collectives(workload: Workload) -> dict[str, dict[str, dict[str, int]]]:
    """Return the collectives of a step after the first, which sets FSDP up."""
    trainer = Trainer(workload, torch.device("cpu"))
    trainer.step(0)
    counter = CollectiveCounter()
    with Observation([counter]):
        trainer.step(1)
    return counter.report()


def peak_tensor_bytes(workload: Workload) -> dict[str, int]:
    """Return peak and standing tensor bytes of a step after the first."""
    trainer = Trainer(workload, torch.device("cpu"))
    trainer.step(0)
    with TensorBytes(trainer.standing_tensors()) as tensors, Observation([tensors]):
        trainer.step(1)
    return tensors.report()


def expert_loads(workload: Workload, steps: int) -> list[list[int]]:
    """Return each router's tokens per expert on this rank over the last third of the steps."""
    trainer = Trainer(workload, torch.device("cpu"))
    loads = [[0] * workload.model.num_experts for _ in trainer.moe_layers()]
    for index in range(steps):
        batch_counts = _step_and_count(trainer, index)
        if index >= steps - steps // 3:
            loads = [
                [a + b for a, b in zip(total, new, strict=True)]
                for total, new in zip(loads, batch_counts, strict=True)
            ]
    return loads


def _step_and_count(trainer: Trainer, index: int) -> list[list[int]]:
    """Run a step and return its tokens per expert, taken before the trainer forgets them."""
    seen: list[list[int]] = []
    balance = trainer._balance

    def spy(counts: torch.Tensor) -> None:
        sizes = [moe.router.tokens_per_expert.numel() for _, moe in trainer.moe_layers()]
        seen.extend(part.int().tolist() for part in counts.split(sizes))
        balance(counts)

    trainer._balance = spy  # type: ignore[method-assign]
    trainer.step(index)
    trainer._balance = balance  # type: ignore[method-assign]
    return seen


def count_operators(workload: Workload) -> dict[str, int]:
    """Return how often each operator ran in a step."""
    return _observe_operators(workload)["by_operator"]


def executed_flops(workload: Workload) -> dict[str, int]:
    """Return the FLOPs that each operator executed in a step."""
    return _observe_operators(workload)["flops_by_operator"]


def _observe_operators(workload: Workload) -> dict[str, Any]:
    trainer = Trainer(workload, torch.device("cpu"))
    counter = OperatorCounter()
    with Observation([counter]):
        trainer.step(0)
    return counter.report()
