"""Operator and kernel classes by name, the same for CUDA, ROCm, XPU and CPU."""

import re
from functools import lru_cache

GEMM = "gemm"
GROUPED_GEMM = "grouped_gemm"
ATTENTION = "attention"
LINEAR_ATTENTION = "linear_attention"
QUANTIZATION = "quantization"
NORM_POINTWISE = "norm_pointwise"
ROUTER = "router_permutation"
OPTIMIZER = "optimizer"
EMBEDDING_LOSS = "embedding_loss"
CONVOLUTION = "convolution"
COMMUNICATION = "communication"
COPY = "copy"
OTHER = "other"

CLASSES = (
    GEMM,
    GROUPED_GEMM,
    ATTENTION,
    LINEAR_ATTENTION,
    QUANTIZATION,
    NORM_POINTWISE,
    ROUTER,
    OPTIMIZER,
    EMBEDDING_LOSS,
    CONVOLUTION,
    COMMUNICATION,
    COPY,
    OTHER,
)

# Names of collectives as kernels, operators and annotations; custom all-reduces of inference
# engines and symmetric-memory kernels are communication although no library's name is in them.
_COMMUNICATION = re.compile(
    r"nccl|rccl|oneccl|xccl|nvshmem|rocshmem|cross_device_reduce|multimem|symm_mem|two_shot|one_shot"
    r"|allreduce_(fusion|kernel)|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast_kernel_comm"
    r"|^gloo:|^mpi:|^ucc:|^c10d::|c10d_functional|record_param_comms|deep_?ep::|::dispatch<|::combine<",
    re.I,
)
_KERNELS: tuple[tuple[str, re.Pattern[str]], ...] = (
    (NORM_POINTWISE, re.compile(r"rope|rotary|rms_?norm|layer_?norm", re.I)),
    (
        ROUTER,
        re.compile(r"moe::dev::(routing|finalize|permute|activation)|moe_(align|sum|permut)", re.I),
    ),
    (
        LINEAR_ATTENTION,
        re.compile(r"delta_rule|linear_attn|(^|_)(kda|gdn|gla)(_|$)|selective_scan|mamba", re.I),
    ),
    (
        ATTENTION,
        re.compile(
            r"flash|fmha|sdpa|attention|attn|mha_|aiter.*mla|paged_kv|flex_attention|ck_tile.*Fmha",
            re.I,
        ),
    ),
    (
        GROUPED_GEMM,
        re.compile(
            r"^bmm_\w*(E4m3|E2m1|Bfloat16|Fp16)|group(ed)?_?(gemm|mm)|moe_?gemm|fused_moe|kernel_grouped_gemm",
            re.I,
        ),
    ),
    (
        CONVOLUTION,
        re.compile(
            r"(?<!un)conv|igemm|bwd_weight|bwd_data|wgrad|dgrad|cudnn.*(fprop|bprop)|miopen|grouped_conv|winograd"
            r"|NCHW2|2NCHW|batched_transpose_\d|SubTensorOp",
            re.I,
        ),
    ),
    (
        QUANTIZATION,
        re.compile(
            r"quant|mxfp|nvfp4|fp8_cast|cast_fp8|to_mx|scale_swizzle|amax|float8|_e4m3|_e8m0", re.I
        ),
    ),
    (
        GEMM,
        re.compile(
            r"gemm|gemv|Cijk_|cutlass|cublas|nvjet|xmma|splitK|matmul|\bmm\b|hgemm|_dot_kernel|wmma"
            r"|kernel_batched_gemm|dot_kernel",
            re.I,
        ),
    ),
    (OPTIMIZER, re.compile(r"adam|adagrad|\bsgd|multi_tensor_apply|muon|lamb_|optimizer", re.I)),
    (
        ROUTER,
        re.compile(
            r"topk|bitonic|radix|sort|permut|moe_align|histogram|scatter|gather_kernel|index_put|bincount"
            r"|searchsorted|cumsum|scan",
            re.I,
        ),
    ),
    (EMBEDDING_LOSS, re.compile(r"embedding|cross_?entropy|nll_loss|\bloss|mse", re.I)),
    (
        NORM_POINTWISE,
        re.compile(
            r"norm|elementwise|pointwise|softmax|silu|gelu|relu|swiglu|rope|rotary|reduce|dropout|bn_|pool"
            r"|CatArray|fill|copy_kernel|triton_(poi|per|red)|vectorized|activation|index|rms|distribution",
            re.I,
        ),
    ),
)
_OPERATORS: tuple[tuple[str, re.Pattern[str]], ...] = (
    (LINEAR_ATTENTION, re.compile(r"delta_rule|chunk_(gdn|kda|gla)", re.I)),
    (
        ATTENTION,
        re.compile(
            r"titanbench::attention|titanbench::choose_entries|scaled_dot_product|flash_attn"
            r"|_attention|flex_att",
            re.I,
        ),
    ),
    (GROUPED_GEMM, re.compile(r"grouped_mm|grouped_gemm|titanbench::mxfp8_grouped_mm", re.I)),
    (QUANTIZATION, re.compile(r"quantiz|mxfp|mx_linear|float8|to_mx", re.I)),
    (
        GEMM,
        re.compile(
            r"^aten::(addmm|mm|bmm|baddbmm|matmul|linear|_scaled_mm|addmv|mv|dot|einsum)\b|^mkl"
        ),
    ),
    (CONVOLUTION, re.compile(r"convolution|conv\dd|conv_", re.I)),
    (EMBEDDING_LOSS, re.compile(r"embedding|cross_entropy|nll_loss|_loss|log_softmax", re.I)),
    (
        ROUTER,
        re.compile(
            r"^aten::(topk|sort|argsort|bincount|histc|scatter|gather|index_put|cumsum|index_add)"
        ),
    ),
    (OPTIMIZER, re.compile(r"_fused_(adam|sgd|adagrad)|_foreach_|^Optimizer\.|\boptimizer", re.I)),
    (COPY, re.compile(r"^aten::(copy_|_to_copy|to|contiguous|clone|pin_memory)$")),
    (
        NORM_POINTWISE,
        re.compile(
            r"^aten::\w*(norm|add|sub|mul|div|silu|gelu|relu|sigmoid|softmax|mean|sum|sqrt|pow|exp|neg|cat|fill"
            r"|zero|where|cos|sin|threshold|dropout|pool|masked|clamp|abs|max|min|eq|lerp|foreach)",
            re.I,
        ),
    ),
)

# Operators whose whole inside belongs to one class, however generic the parts are.
_CONTEXTS: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        OPTIMIZER,
        re.compile(r"^Optimizer\.|^#* ?opt(imizer)?(imizer_step)? ?#*$|optimizer_step", re.I),
    ),
    (LINEAR_ATTENTION, re.compile(r"titanbench::delta_rule")),
    (
        ATTENTION,
        re.compile(
            r"titanbench::(\w*attention|choose_entries)|scaled_dot_product|ScaledDotProduct|flash_attn|FlashAttn"
            r"|_flash_attention|_efficient_attention|flex_attention",
            re.I,
        ),
    ),
    (GROUPED_GEMM, re.compile(r"grouped_mm|grouped_gemm|GroupedMm|GroupedGemm", re.I)),
    (
        CONVOLUTION,
        re.compile(
            r"^aten::(cudnn_|miopen_)?_?convolution|ConvolutionBackward|^aten::conv\dd"
            r"|titanbench::short_convolution"
        ),
    ),
    (QUANTIZATION, re.compile(r"titanbench::mxfp8|mx_linear|float8_linear", re.I)),
    (
        EMBEDDING_LOSS,
        re.compile(
            r"^aten::(embedding|cross_entropy|nll_loss)|EmbeddingBackward|CrossEntropy"
            r"|NllLoss|LogSoftmaxBackward|^aten::_?log_softmax",
            re.I,
        ),
    ),
    (
        ROUTER,
        re.compile(
            r"titanbench::(permute|unpermute|route)|moe_permute|token_permut|^aten::(topk|sort)$"
        ),
    ),
)


@lru_cache(maxsize=1 << 14)  # every analysis of a trace asks it of the same names
def is_communication(name: str) -> bool:
    """Whether a kernel, operator or annotation of this name moves data between ranks."""
    return _COMMUNICATION.search(name) is not None


def kernel_class(name: str) -> str:
    """Class of a device kernel by its name alone."""
    return COMMUNICATION if is_communication(name) else _first(_KERNELS, name) or OTHER


def operator_class(name: str) -> str:
    """Class of a host operator by its name alone."""
    return COMMUNICATION if is_communication(name) else _first(_OPERATORS, name) or OTHER


def context_class(name: str) -> str | None:
    """Class that an operator or annotation gives to everything inside it; None without."""
    return _first(_CONTEXTS, name)


def resolve(own: str, context: str | None, operator: str) -> str:
    """Class of work of class `own`, launched by an operator of class `operator` inside a context.

    Matrix products inside a quantized operator stay matrix products, the rest of it is
    quantization; work that its own name does not explain takes the class of its operator.
    """
    if own in (COMMUNICATION, COPY) and context is None:
        return own
    if context == QUANTIZATION:
        return own if own in (GEMM, GROUPED_GEMM, COMMUNICATION) else QUANTIZATION
    if context == CONVOLUTION:
        return CONVOLUTION if own in (GEMM, OTHER) else own
    if context is not None:
        return COMMUNICATION if own == COMMUNICATION else context
    return operator if own == OTHER else own


def _first(table: tuple[tuple[str, re.Pattern[str]], ...], name: str) -> str | None:
    for result, pattern in table:
        if pattern.search(name):
            return result
    return None
