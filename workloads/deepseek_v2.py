"""DeepSeek V2 workloads: both sizes and a proxy for a CPU."""

from models.deepseek_v2 import DEEPSEEK_V2_16B, DEEPSEEK_V2_236B, DEEPSEEK_V2_PROXY
from parallel.plan import ParallelPlan
from workloads.workload import Training, Workload


def deepseek_v2_16b() -> Workload:
    """DeepSeek V2 Lite, 16B, in BF16 at 4096 tokens, experts over 8 ranks."""
    return Workload(
        name="deepseek_v2_16b",
        model=DEEPSEEK_V2_16B,
        sequence_length=4096,
        global_batch_size=512,
        data="synthetic",
        routing="balanced",
        plan=ParallelPlan(ep=8, remat="selective"),
        training=Training(learning_rate=4.2e-4),
    )


def deepseek_v2_236b() -> Workload:
    """DeepSeek V2 236B in BF16 at 4096 tokens, experts over 32 ranks, forced balanced routing."""
    return Workload(
        name="deepseek_v2_236b",
        model=DEEPSEEK_V2_236B,
        sequence_length=4096,
        global_batch_size=9216,
        data="synthetic",
        routing="balanced",
        plan=ParallelPlan(ep=32, remat="selective"),
        training=Training(learning_rate=2.4e-4),
    )


def deepseek_v2_proxy() -> Workload:
    """DeepSeek V2: every mechanism of the 236B, small, for two cores."""
    return Workload(
        name="deepseek_v2_proxy",
        model=DEEPSEEK_V2_PROXY,
        sequence_length=512,
        global_batch_size=4,
        plan=ParallelPlan(remat="selective"),
    )
