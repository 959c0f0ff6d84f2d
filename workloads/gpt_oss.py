"""GPT-OSS workloads: both sizes and a proxy for a CPU."""

from models.gpt_oss import GPT_OSS_20B, GPT_OSS_120B, GPT_OSS_PROXY
from parallel.plan import ParallelPlan
from workloads.workload import Training, Workload


def gpt_oss_20b() -> Workload:
    """GPT-OSS 20B in BF16 at 8192 tokens, experts over 8 ranks, forced balanced routing."""
    return Workload(
        name="gpt_oss_20b",
        model=GPT_OSS_20B,
        sequence_length=8192,
        global_batch_size=128,
        data="synthetic",
        routing="balanced",
        plan=ParallelPlan(ep=8, remat="selective"),
        training=Training(learning_rate=3e-4),
    )


def gpt_oss_120b() -> Workload:
    """GPT-OSS 120B in BF16 at 8192 tokens, experts over 64 ranks, forced balanced routing."""
    return Workload(
        name="gpt_oss_120b",
        model=GPT_OSS_120B,
        sequence_length=8192,
        global_batch_size=1280,
        data="synthetic",
        routing="balanced",
        plan=ParallelPlan(ep=64, remat="selective"),
        training=Training(learning_rate=2.2e-4),
    )


def gpt_oss_proxy() -> Workload:
    """GPT-OSS: every mechanism of the full sizes, small, for two cores."""
    return Workload(
        name="gpt_oss_proxy",
        model=GPT_OSS_PROXY,
        sequence_length=512,
        global_batch_size=4,
        plan=ParallelPlan(remat="selective"),
    )
