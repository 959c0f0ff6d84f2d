"""Kimi K3 workloads: the full size at two lengths, and a proxy for a CPU."""

from msgspec.structs import replace

from models.kimi_k3 import KIMI_K3, KIMI_K3_PROXY
from parallel.plan import ParallelPlan
from workloads.workload import Training, Workload


def kimi_k3() -> Workload:
    """Kimi K3 (2.78T parameters) in BF16 at 4096 tokens, forced balanced routing."""
    return Workload(
        name="kimi_k3",
        model=KIMI_K3,
        sequence_length=4096,
        global_batch_size=16384,
        data="synthetic",
        routing="balanced",
        plan=ParallelPlan(ep=64, remat="full"),
        training=Training(learning_rate=2.2e-4),
    )


def kimi_k3_128k() -> Workload:
    """Kimi K3 at 131,072 tokens, where three of four layers stay linear in the length."""
    return replace(kimi_k3(), name="kimi_k3_128k", sequence_length=131_072, global_batch_size=1024)


def kimi_k3_proxy() -> Workload:
    """Kimi K3: every mechanism of the full size, small, for two cores."""
    return Workload(
        name="kimi_k3_proxy",
        model=KIMI_K3_PROXY,
        sequence_length=512,
        global_batch_size=4,
        plan=ParallelPlan(remat="selective"),
    )
