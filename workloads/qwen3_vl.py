"""Qwen3-VL workloads: a dense size, a mixture of experts, and proxies for a CPU.

Images are synthetic (models.qwen3_vl): every `image_interval` tokens of a document one of 512 x 512
pixels, which is 1024 patches and takes the place of 256 tokens.
"""

from msgspec.structs import replace

from models.qwen3_vl import (
    QWEN3_VL_8B,
    QWEN3_VL_30B_A3B,
    QWEN3_VL_DENSE_PROXY,
    QWEN3_VL_PROXY,
)
from parallel.plan import ParallelPlan
from workloads.workload import Training, Workload


def qwen3_vl_8b() -> Workload:
    """Qwen3-VL 8B, dense, in BF16 at 8192 tokens with 8 images a sequence."""
    return Workload(
        name="qwen3_vl_8b",
        model=replace(QWEN3_VL_8B, image_interval=1024),
        sequence_length=8192,
        global_batch_size=64,
        data="synthetic",
        plan=ParallelPlan(remat="selective"),
        training=Training(learning_rate=3e-4),
    )


def qwen3_vl_8b_text() -> Workload:
    """Qwen3-VL 8B on text alone: what is left when its tower is idle."""
    return replace(qwen3_vl_8b(), name="qwen3_vl_8b_text", model=QWEN3_VL_8B)


def qwen3_vl_30b_a3b() -> Workload:
    """Qwen3-VL 30B-A3B in BF16 at 8192 tokens with 8 images, experts over 8 ranks, balanced."""
    return Workload(
        name="qwen3_vl_30b_a3b",
        model=replace(QWEN3_VL_30B_A3B, image_interval=1024),
        sequence_length=8192,
        global_batch_size=256,
        data="synthetic",
        routing="balanced",
        plan=ParallelPlan(ep=8, remat="selective"),
        training=Training(learning_rate=3e-4),
    )


def qwen3_vl_proxy() -> Workload:
    """Qwen3-VL with experts and images: every mechanism of the full sizes, small, for two cores."""
    return Workload(
        name="qwen3_vl_proxy",
        model=QWEN3_VL_PROXY,
        sequence_length=512,
        global_batch_size=4,
        plan=ParallelPlan(remat="selective"),
    )


def qwen3_vl_dense_proxy() -> Workload:
    """Qwen3-VL, dense, with images and the embedding as its head, small, for two cores."""
    return Workload(
        name="qwen3_vl_dense_proxy",
        model=QWEN3_VL_DENSE_PROXY,
        sequence_length=512,
        global_batch_size=4,
        plan=ParallelPlan(remat="selective"),
    )
