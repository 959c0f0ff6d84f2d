"""Kimi K2 workloads: the full size and a proxy for a CPU."""

from models.kimi_k2 import KIMI_K2_7, KIMI_K2_PROXY
from parallel.plan import ParallelPlan
from workloads.workload import Precision, Training, Workload


def kimi_k2_7_mxfp8() -> Workload:
    """Kimi K2.7 in MXFP8 at 4096 tokens, experts over 64 ranks, forced balanced routing."""
    return Workload(
        name="kimi_k2_7_mxfp8",
        model=KIMI_K2_7,
        sequence_length=4096,
        global_batch_size=15360,
        data="synthetic",
        routing="balanced",
        precision=Precision(quantization="mxfp8"),
        plan=ParallelPlan(ep=64, remat="selective"),
        training=Training(learning_rate=2.2e-4),
    )


def kimi_k2_proxy() -> Workload:
    """Kimi K2 in MXFP8: every mechanism of the full size, small, for two cores."""
    return Workload(
        name="kimi_k2_proxy",
        model=KIMI_K2_PROXY,
        sequence_length=512,
        global_batch_size=4,
        precision=Precision(quantization="mxfp8"),
        plan=ParallelPlan(remat="selective"),
    )
