"""Qwen3 workloads: a dense size, both mixtures of experts, and proxies for a CPU."""

from models.qwen3 import (
    QWEN3_8B,
    QWEN3_30B_A3B,
    QWEN3_235B_A22B,
    QWEN3_DENSE_PROXY,
    QWEN3_PROXY,
)
from parallel.plan import ParallelPlan
from workloads.workload import Training, Workload


def qwen3_8b() -> Workload:
    """Qwen3 8B, dense, in BF16 at 4096 tokens."""
    return Workload(
        name="qwen3_8b",
        model=QWEN3_8B,
        sequence_length=4096,
        global_batch_size=64,
        data="synthetic",
        plan=ParallelPlan(remat="selective"),
        training=Training(learning_rate=3e-4),
    )


def qwen3_30b_a3b() -> Workload:
    """Qwen3 30B-A3B in BF16 at 4096 tokens, experts over 8 ranks, forced balanced routing."""
    return Workload(
        name="qwen3_30b_a3b",
        model=QWEN3_30B_A3B,
        sequence_length=4096,
        global_batch_size=512,
        data="synthetic",
        routing="balanced",
        plan=ParallelPlan(ep=8, remat="selective"),
        training=Training(learning_rate=3e-4),
    )


def qwen3_235b_a22b() -> Workload:
    """Qwen3 235B-A22B in BF16 at 4096 tokens, experts over 32 ranks, forced balanced routing."""
    return Workload(
        name="qwen3_235b_a22b",
        model=QWEN3_235B_A22B,
        sequence_length=4096,
        global_batch_size=8192,
        data="synthetic",
        routing="balanced",
        plan=ParallelPlan(ep=32, remat="selective"),
        training=Training(learning_rate=2.2e-4),
    )


def qwen3_proxy() -> Workload:
    """Qwen3 with experts: every mechanism of the full sizes, small, for two cores."""
    return Workload(
        name="qwen3_proxy",
        model=QWEN3_PROXY,
        sequence_length=512,
        global_batch_size=4,
        plan=ParallelPlan(remat="selective"),
    )


def qwen3_dense_proxy() -> Workload:
    """Qwen3, dense and with the embedding as its head, small, for two cores."""
    return Workload(
        name="qwen3_dense_proxy",
        model=QWEN3_DENSE_PROXY,
        sequence_length=512,
        global_batch_size=4,
        plan=ParallelPlan(remat="selective"),
    )
