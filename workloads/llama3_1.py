"""Llama 3.1 workloads: the three sizes as TorchTitan publishes them, and a proxy for a CPU."""

from msgspec.structs import replace

from models.llama3_1 import LLAMA3_1_8B, LLAMA3_1_70B, LLAMA3_1_405B, LLAMA3_1_PROXY
from parallel.plan import ParallelPlan
from workloads.workload import Training, Workload


def llama3_1_8b() -> Workload:
    """Llama 3.1 8B in BF16 at 8192 tokens."""
    return Workload(
        name="llama3_1_8b",
        model=LLAMA3_1_8B,
        sequence_length=8192,
        global_batch_size=16,
        data="synthetic",
        plan=ParallelPlan(remat="selective"),
        training=Training(learning_rate=3e-4),
        reference="llama3_1_8b",
    )


def llama3_1_8b_128k() -> Workload:
    """Llama 3.1 8B in BF16 at 131,072 tokens, where attention takes most of the time."""
    return replace(
        llama3_1_8b(),
        name="llama3_1_8b_128k",
        sequence_length=131_072,
        global_batch_size=8,
        plan=ParallelPlan(remat="full"),
    )


def llama3_1_70b() -> Workload:
    """Llama 3.1 70B in BF16 at 8192 tokens, tensor-parallel over 8."""
    return Workload(
        name="llama3_1_70b",
        model=LLAMA3_1_70B,
        sequence_length=8192,
        global_batch_size=512,
        data="synthetic",
        plan=ParallelPlan(tp=8, remat="full"),
        training=Training(learning_rate=1.5e-4),
        reference="llama3_1_70b",
    )


def llama3_1_405b() -> Workload:
    """Llama 3.1 405B in BF16 at 8192 tokens, 8 pipeline stages of 8 tensor-parallel ranks."""
    return Workload(
        name="llama3_1_405b",
        model=LLAMA3_1_405B,
        sequence_length=8192,
        global_batch_size=256,
        data="synthetic",
        plan=ParallelPlan(tp=8, pp=8, microbatches=32, remat="full"),
        training=Training(learning_rate=8e-5),
        reference="llama3_1_405b",
    )


def llama3_1_proxy() -> Workload:
    """Llama 3.1: every mechanism of the full sizes, small, for two cores."""
    return Workload(
        name="llama3_1_proxy",
        model=LLAMA3_1_PROXY,
        sequence_length=512,
        global_batch_size=4,
        plan=ParallelPlan(remat="selective"),
        reference="llama3_1_8b",
    )
