"""Muse Glimmer workloads: the full size and a proxy for a CPU."""

from models.muse_glimmer import MUSE_GLIMMER_30B, MUSE_GLIMMER_PROXY
from parallel.plan import ParallelPlan
from workloads.workload import Training, Workload


def muse_glimmer_30b() -> Workload:
    """Muse Glimmer 30B in BF16 at 16,384 tokens, the context that it is trained with."""
    return Workload(
        name="muse_glimmer_30b",
        model=MUSE_GLIMMER_30B,
        sequence_length=16_384,
        global_batch_size=64,
        data="synthetic",
        plan=ParallelPlan(remat="full"),
        training=Training(learning_rate=3e-4),
    )


def muse_glimmer_proxy() -> Workload:
    """Muse Glimmer: every mechanism of the full size, small, for two cores."""
    return Workload(
        name="muse_glimmer_proxy",
        model=MUSE_GLIMMER_PROXY,
        sequence_length=512,
        global_batch_size=4,
        plan=ParallelPlan(remat="selective"),
    )
