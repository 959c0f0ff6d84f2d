"""Classes, names, phases and modules of work, on several kinds of hardware."""

from pathlib import Path
from typing import Any

import pytest

from reports.traces.classify import context_class, kernel_class, operator_class, resolve
from reports.traces.names import normalise
from reports.traces.reduce import reduce_trace
from reports.traces.summary import RankSummary
from tests.traces.kineto import event, kernel, launch, write


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas", "gemm"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "gemm"),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT16x16x256_MI16", "gemm"),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<>>>", "attention"),
        ("fmhaSm100aKernel_QkvE4m3OBfloat16H64PagedKvCausal", "attention"),
        ("void cutlass::kernel_grouped_gemm<cutlass::bfloat16_t>()", "grouped_gemm"),
        ("bmm_MxE4m3_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_et128x16", "grouped_gemm"),
        ("triton_mxfp8_quantize_cast", "quantization"),
        ("vllm::scaled_fp8_quant_kernel_strided", "quantization"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
            "norm_pointwise",
        ),
        ("vllm::rotary_embedding_kernel", "norm_pointwise"),
        ("moe::dev::routing::routingIndicesHistogramKernel", "router_permutation"),
        ("void at::native::radixSortKVInPlace<2, -1, 16, 8>", "router_permutation"),
        ("multi_tensor_apply_kernel<TensorListMetadata, FusedAdamMathFunctor>", "optimizer"),
        ("at::native::(anonymous namespace)::indexSelect_embedding_kernel", "embedding_loss"),
        ("igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1", "convolution"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("nccldevkernel_reducescatter", "communication"),
        ("vllm::cross_device_reduce_2stage", "communication"),
        ("gemm_kernel_xpu_dpas", "gemm"),
        ("chunk_gated_delta_rule_fwd_kernel_h_blockdim64", "linear_attention"),
        ("chunk_kda_fwd_kernel_intra", "linear_attention"),
        ("something_else", "other"),
    ],
)
def test_kernels_of_every_vendor_find_their_class(name: str, expected: str) -> None:
    assert kernel_class(name) == expected


@pytest.mark.parametrize(
    ("name", "operator", "context"),
    [
        ("titanbench::attention", "attention", "attention"),
        ("titanbench::attention_backward", "attention", "attention"),
        ("titanbench::chosen_attention", "attention", "attention"),
        ("titanbench::choose_entries", "attention", "attention"),
        ("titanbench::delta_rule", "linear_attention", "linear_attention"),
        ("titanbench::delta_rule_transition", "linear_attention", "linear_attention"),
        ("titanbench::short_convolution", "convolution", "convolution"),
        ("titanbench::grouped_mm", "grouped_gemm", "grouped_gemm"),
        ("titanbench::mxfp8_linear", "quantization", "quantization"),
        ("titanbench::mxfp8_grouped_mm", "grouped_gemm", "grouped_gemm"),
        ("aten::mm", "gemm", None),
        ("aten::embedding", "embedding_loss", "embedding_loss"),
        ("aten::topk", "router_permutation", "router_permutation"),
        ("Optimizer.step#AdamW.step", "optimizer", "optimizer"),
        ("c10d::allreduce_", "communication", None),
    ],
)
def test_operators_find_class_and_context(name: str, operator: str, context: str | None) -> None:
    assert operator_class(name) == operator
    assert context_class(name) == context


def test_inside_a_quantized_operator_products_stay_products_and_the_rest_is_quantization() -> None:
    assert resolve("gemm", "quantization", "gemm") == "gemm"
    assert resolve("norm_pointwise", "quantization", "other") == "quantization"
    assert resolve("other", None, "gemm") == "gemm"
    assert resolve("norm_pointwise", "attention", "other") == "attention"
    assert resolve("communication", "optimizer", "other") == "communication"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("triton_poi_fused_add_mul_12", "triton_poi_fused_add_mul_3"),
        (
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x<4096ul>)",
            "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)",
        ),
        ("void k<float, 4>(float*, int)", "k<double, 8>(double*)"),
        ("ProfilerStep#3", "ProfilerStep#99"),
        ("nn.Module: Linear_4", "nn.Module: Linear_17"),
        ("nvjet_tst_128x256_64x4", "nvjet_hsh_64x8"),
        ("Cijk_Ailk_Bljk_BBS_BH_MT32x32x64", "Cijk_Ailk_Bljk_BBS_BH_MT64x16x16"),
    ],
)
def test_names_of_the_same_work_become_equal(first: str, second: str) -> None:
    assert normalise(first) == normalise(second)


def test_names_of_different_work_stay_different() -> None:
    template = "void at::native::vectorized_elementwise_kernel<4, at::native::{}<float>, x>(int)"
    names = [
        template.format("FillFunctor"),
        template.format("CUDAFunctor_addFunctor"),
        "aten::mm",
        "aten::addmm",
    ]

    assert len({normalise(name) for name in names}) == 4


def training_step() -> list[dict[str, Any]]:
    """Forward, backward with recomputation, optimizer; each operator launches one kernel."""
    rows: list[dict[str, Any]] = []
    forward = {"Sequence number": 5, "Fwd thread id": 0}
    backward = {"Sequence number": 5, "Fwd thread id": 1}
    again = {"Sequence number": 9, "Fwd thread id": 0}
    rows.append(event("nn.Module: Linear_0", "python_function", 0, 20))
    rows.append(event("aten::linear", "cpu_op", 1, 18, args=forward))
    rows.append(event("aten::addmm", "cpu_op", 2, 10))
    head = "autograd::engine::evaluate_function: AddmmBackward0"
    rows.append(event(head, "cpu_op", 30, 40, args=backward))
    rows.append(event("aten::linear", "cpu_op", 31, 9, args=again))
    rows.append(event("AddmmBackward0", "cpu_op", 41, 20, args=backward))
    rows.append(event("aten::mm", "cpu_op", 42, 8))
    rows.append(event("Optimizer.step#AdamW.step", "user_annotation", 80, 20))
    rows.append(event("aten::_foreach_mul_", "cpu_op", 81, 10))
    rows.append(event("aten::copy_", "cpu_op", 110, 5))
    for number, (start, name) in enumerate(
        [(3, "gemm"), (33, "gemm"), (43, "gemm"), (82, "elementwise_kernel"), (111, "elementwise")]
    ):
        rows.append(launch(start, 1, number))
        rows.append(kernel(name, 200 + 10 * number, number + 1, correlation=number))
    return rows


def reduced(tmp_path: Path, rows: list[dict[str, Any]]) -> RankSummary:
    return reduce_trace(write(tmp_path / "rank0.json", rows))


def test_phases_follow_from_sequence_numbers_and_annotations(tmp_path: Path) -> None:
    summary = reduced(tmp_path, training_step())
    found = {(row.phase, row.name): row.exclusive_ns for row in summary.classes}

    assert found == {
        ("forward", "gemm"): 1000,
        ("recompute", "gemm"): 2000,
        ("backward", "gemm"): 3000,
        ("optimizer", "optimizer"): 4000,
        ("other", "norm_pointwise"): 5000,
    }


def test_modules_own_their_forward_and_through_sequence_numbers_their_backward(
    tmp_path: Path,
) -> None:
    summary = reduced(tmp_path, training_step())

    assert {(row.module, row.phase): row.exclusive_ns for row in summary.modules} == {
        ("Linear", "forward"): 1000,
        ("Linear", "backward"): 3000,
        ("Linear", "recompute"): 2000,
    }


def test_device_time_of_operators_is_that_of_the_kernels_they_launch(tmp_path: Path) -> None:
    summary = reduced(tmp_path, training_step())
    device = {(row.name, row.phase): row.device_ns for row in summary.operators if row.device_ns}

    assert device == {
        ("aten::addmm", "forward"): 1000,
        ("aten::linear", "recompute"): 2000,
        ("aten::mm", "backward"): 3000,
        ("aten::_foreach_mul_", "optimizer"): 4000,
        ("aten::copy_", "other"): 5000,
    }


def test_launches_are_paired_with_their_kernels(tmp_path: Path) -> None:
    rows = [
        event("hipModuleLaunchKernel", "cuda_runtime", 10, 4, args={"correlation": 1}),
        kernel("a", 20, 2, correlation=1, stream=0),
        event("cudaGraphLaunch", "cuda_runtime", 30, 5, args={"correlation": 2}),
        kernel("b", 40, 10, correlation=2),
        kernel("c", 50, 10, correlation=2),
        event("cudaLaunchKernel", "cuda_runtime", 60, 5, args={"correlation": 3}),
    ]
    summary = reduced(tmp_path, rows)
    found = {row.name: row for row in summary.launches}
    graph, hip = found["cudaGraphLaunch"], found["hipModuleLaunchKernel"]

    assert (graph.num_device, graph.device_ns, graph.delay_median_ns) == (2, 20_000, 5_000)
    assert (hip.num_shorter, hip.delay_median_ns, hip.host_ns) == (1, 6_000, 4_000)
    assert {one.kind: one.count for one in summary.warnings}["missing_kernels"] == 1
