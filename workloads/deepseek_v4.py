"""DeepSeek V4 workloads: both sizes, a long context, and a proxy for a CPU."""

from msgspec.structs import replace

from models.deepseek_v4 import DEEPSEEK_V4_FLASH, DEEPSEEK_V4_PRO, DEEPSEEK_V4_PROXY
from parallel.plan import ParallelPlan
from workloads.workload import Precision, Training, Workload


def deepseek_v4_flash() -> Workload:
    """DeepSeek V4 Flash with MTP in BF16 at 8192 tokens, forced balanced routing."""
    return Workload(
        name="deepseek_v4_flash",
        model=replace(DEEPSEEK_V4_FLASH, num_mtp_layers=1),
        sequence_length=8192,
        global_batch_size=2048,
        data="synthetic",
        routing="balanced",
        plan=ParallelPlan(ep=64, remat="full"),
        training=Training(learning_rate=2.2e-4),
    )


def deepseek_v4_flash_128k() -> Workload:
    """DeepSeek V4 Flash at 131,072 tokens, where the indexer costs more than attention."""
    base = deepseek_v4_flash()
    return replace(
        base, name="deepseek_v4_flash_128k", sequence_length=131_072, global_batch_size=256
    )


def deepseek_v4_pro() -> Workload:
    """DeepSeek V4 Pro with MTP in MXFP8 at 8192 tokens, forced balanced routing."""
    return Workload(
        name="deepseek_v4_pro",
        model=replace(DEEPSEEK_V4_PRO, num_mtp_layers=1),
        sequence_length=8192,
        global_batch_size=2048,
        data="synthetic",
        routing="balanced",
        precision=Precision(quantization="mxfp8"),
        plan=ParallelPlan(ep=64, remat="full"),
        training=Training(learning_rate=2.2e-4),
    )


def deepseek_v4_proxy() -> Workload:
    """DeepSeek V4 with MTP: every mechanism of the full sizes, small, for two cores."""
    return Workload(
        name="deepseek_v4_proxy",
        model=DEEPSEEK_V4_PROXY,
        sequence_length=512,
        global_batch_size=4,
        plan=ParallelPlan(remat="selective"),
    )
