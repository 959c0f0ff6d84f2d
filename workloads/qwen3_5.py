"""Qwen3.5 workloads: dense and sparse sizes with their MTP module, and proxies for a CPU."""

from msgspec.structs import replace

from models.qwen3_5 import (
    QWEN3_5_27B,
    QWEN3_5_35B_A3B,
    QWEN3_5_397B_A17B,
    QWEN3_5_DENSE_PROXY,
    QWEN3_5_PROXY,
)
from parallel.plan import ParallelPlan
from workloads.workload import Training, Workload


def qwen3_5_27b_mtp1() -> Workload:
    """Qwen3.5 27B, dense, with its MTP module in BF16 at 4096 tokens."""
    return Workload(
        name="qwen3_5_27b_mtp1",
        model=replace(QWEN3_5_27B, num_mtp_layers=1),
        sequence_length=4096,
        global_batch_size=512,
        data="synthetic",
        plan=ParallelPlan(remat="selective"),
        training=Training(learning_rate=3e-4),
    )


def qwen3_5_35b_a3b_mtp1() -> Workload:
    """Qwen3.5 35B-A3B with its MTP module in BF16 at 4096 tokens, forced balanced routing."""
    return Workload(
        name="qwen3_5_35b_a3b_mtp1",
        model=replace(QWEN3_5_35B_A3B, num_mtp_layers=1),
        sequence_length=4096,
        global_batch_size=512,
        data="synthetic",
        routing="balanced",
        plan=ParallelPlan(ep=8, remat="selective"),
        training=Training(learning_rate=3e-4),
    )


def qwen3_5_397b_a17b_mtp1() -> Workload:
    """Qwen3.5 397B-A17B with its MTP module in BF16 at 4096 tokens, forced balanced routing."""
    return Workload(
        name="qwen3_5_397b_a17b_mtp1",
        model=replace(QWEN3_5_397B_A17B, num_mtp_layers=1),
        sequence_length=4096,
        global_batch_size=8192,
        data="synthetic",
        routing="balanced",
        plan=ParallelPlan(ep=64, remat="selective"),
        training=Training(learning_rate=2.2e-4),
    )


def qwen3_5_35b_a3b_128k() -> Workload:
    """Qwen3.5 35B-A3B at 131,072 tokens, where three of four layers stay linear in the length."""
    return Workload(
        name="qwen3_5_35b_a3b_128k",
        model=QWEN3_5_35B_A3B,
        sequence_length=131_072,
        global_batch_size=64,
        data="synthetic",
        routing="balanced",
        plan=ParallelPlan(ep=8, remat="full"),
        training=Training(learning_rate=3e-4),
    )


def qwen3_5_proxy() -> Workload:
    """Qwen3.5 with experts and MTP: every mechanism of the full sizes, small, for two cores."""
    return Workload(
        name="qwen3_5_proxy",
        model=QWEN3_5_PROXY,
        sequence_length=512,
        global_batch_size=4,
        plan=ParallelPlan(remat="selective"),
    )


def qwen3_5_dense_proxy() -> Workload:
    """Qwen3.5, dense and with the embedding as its head, small, for two cores."""
    return Workload(
        name="qwen3_5_dense_proxy",
        model=QWEN3_5_DENSE_PROXY,
        sequence_length=512,
        global_batch_size=4,
        plan=ParallelPlan(remat="selective"),
    )
