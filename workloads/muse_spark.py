"""Muse Spark workloads: the published long-context flagship, a variant and a proxy for a CPU."""

from msgspec.structs import replace

from models.muse_spark import MUSE_SPARK, MUSE_SPARK_PROXY
from parallel.plan import ParallelPlan
from workloads.workload import Training, Workload


def muse_spark_192k() -> Workload:
    """Muse Spark at 196,608 tokens, forced balanced routing, BF16: the published 512-GPU run."""
    return Workload(
        name="muse_spark_192k",
        model=MUSE_SPARK,
        sequence_length=196_608,
        # Not published for that run: one sequence for each of its GPUs.
        global_batch_size=512,
        data="synthetic",
        routing="balanced",
        # Not published either: a sequence over 8 devices, one sequence to a microbatch on 512.
        plan=ParallelPlan(cp=8, ep=64, microbatches=8, remat="full"),
        training=Training(learning_rate=2.2e-4),
        reference="muse_spark",
    )


def muse_spark_4k() -> Workload:
    """Muse Spark at 4096 tokens, where products and not attention take the time."""
    flagship = muse_spark_192k()
    return replace(flagship, name="muse_spark_4k", sequence_length=4096, global_batch_size=8192)


def muse_spark_proxy() -> Workload:
    """Muse Spark: every mechanism of the flagship, small, for two cores."""
    return Workload(
        name="muse_spark_proxy",
        model=MUSE_SPARK_PROXY,
        sequence_length=512,
        global_batch_size=4,
        plan=ParallelPlan(remat="selective"),
        reference="muse_spark",
    )
