"""DeepSeek V3 workloads: the published flagship, its variants and its proxy for a CPU."""

from msgspec.structs import replace

from models.deepseek_v3 import (
    DEEPSEEK_V3_671B,
    DEEPSEEK_V3_671B_MTP1,
    DEEPSEEK_V3_DEBUG,
    DEEPSEEK_V3_PROXY,
)
from parallel.plan import ParallelPlan
from workloads.workload import Precision, Training, Workload


def deepseek_v3_671b_mtp1_mxfp8() -> Workload:
    """DeepSeek V3 671B with one MTP module in MXFP8 at 4096 tokens: the published 512-GPU run."""
    return Workload(
        name="deepseek_v3_671b_mtp1_mxfp8",
        model=DEEPSEEK_V3_671B_MTP1,
        sequence_length=4096,
        # Not published for that run; what TorchTitan's verified 671B recipes use.
        global_batch_size=15360,
        data="synthetic",
        routing="balanced",
        precision=Precision(quantization="mxfp8"),
        # Two pipeline stages are published, the rest of the layout is not: one sequence to a
        # microbatch on 512 devices.
        plan=ParallelPlan(pp=2, ep=64, microbatches=60, remat="selective"),
        training=Training(learning_rate=2.2e-4),
        reference="deepseek_v3_671b",
    )


def deepseek_v3_671b_bf16() -> Workload:
    """DeepSeek V3 671B without MTP in BF16 at 4096 tokens."""
    flagship = deepseek_v3_671b_mtp1_mxfp8()
    return replace(
        flagship, name="deepseek_v3_671b_bf16", model=DEEPSEEK_V3_671B, precision=Precision()
    )


def deepseek_v3_proxy() -> Workload:
    """DeepSeek V3 with MTP in MXFP8: every mechanism of the flagship, small, for two cores."""
    return Workload(
        name="deepseek_v3_proxy",
        model=DEEPSEEK_V3_PROXY,
        sequence_length=512,
        global_batch_size=4,
        precision=Precision(quantization="mxfp8"),
        plan=ParallelPlan(remat="selective"),
        reference="deepseek_v3_671b",
    )


def deepseek_v3_debug() -> Workload:
    """DeepSeek V3 at TorchTitan's debug size, 33.0 M parameters, FP32 at 1024 tokens."""
    return Workload(
        name="deepseek_v3_debug",
        model=DEEPSEEK_V3_DEBUG,
        sequence_length=1024,
        global_batch_size=1,
        precision=Precision(compute="float32"),
        training=Training(learning_rate=8e-4),
    )
