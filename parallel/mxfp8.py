"""MXFP8 products: linear and grouped, as custom operators on torchao's kernels.

Blocks of 32 values share a power-of-two scale (e8m0), the values are e4m3 (OCP Microscaling
Formats 1.0); scales are rounded up (RCEIL). All three products of a layer are quantized:
forward, input gradient and weight gradient. Without an SM100 GPU torchao emulates them: the
values are those of the format, the products run in the tensors' own dtype.

One operator each, so that a trace, a prediction and a GPU show the product the device would
run and not the steps of its emulation. M rows, K inputs, N outputs, E experts.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula
from torchao.prototype.moe_training import mxfp8_grouped_mm as grouped
from torchao.prototype.moe_training.mxfp8_linear import (
    _to_mxfp8_then_scaled_mm as to_mxfp8_then_scaled_mm,
)
from torchao.prototype.moe_training.mxfp8_linear import mx_mm
from torchao.prototype.moe_training.utils import pad_token_groups
from torchao.prototype.mx_formats.config import (
    MXFP8Dim0CastKernelChoice,
    MXFP8Dim1CastKernelChoice,
    ScaleCalculationMode,
)
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

BLOCK_SIZE = 32
_SCALE = ScaleCalculationMode.RCEIL


def kernels_available(device_type: str) -> bool:
    """Return whether ``device_type`` has real MXFP8 kernels; without them they are emulated."""
    return device_type == "cuda" and torch.cuda.get_device_capability() >= (10, 0)


def _preference(x: Tensor) -> KernelPreference:
    native = kernels_available(x.device.type)
    return KernelPreference.AUTO if native else KernelPreference.EMULATED


class _Context(SimpleNamespace):
    """What torchao's autograd functions keep between forward and backward, made by hand.

    The operators below call those functions' two halves separately: autograd proper is attached
    to the operator, which is what the profiler and the FLOPs counter see.
    """

    saved_tensors: tuple[Tensor, ...]


@torch.library.custom_op("titanbench::mxfp8_linear", mutates_args=())
def mxfp8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x @ weight.T`` in MXFP8; x (M, K), weight (N, K), both multiples of 32 in K."""
    return to_mxfp8_then_scaled_mm(x, weight, _preference(x), _SCALE)


@mxfp8_linear.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


@torch.library.custom_op("titanbench::mxfp8_linear_backward", mutates_args=())
def mxfp8_linear_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``x`` and ``weight``; M is padded to whole blocks with zeros."""
    missing = -x.shape[0] % BLOCK_SIZE
    if missing:
        grad, x = (torch.nn.functional.pad(t, (0, 0, 0, missing)) for t in (grad, x))
    context = _Context(
        saved_tensors=(x, weight),
        in_elem_dtype=torch.float8_e4m3fn,
        w_elem_dtype=torch.float8_e4m3fn,
        grad_elem_dtype=torch.float8_e4m3fn,
        block_size=BLOCK_SIZE,
        kernel_preference=_preference(x),
        wgrad_with_hp=False,
        mxfp8_dim0_cast_kernel_choice=MXFP8Dim0CastKernelChoice.TRITON,
        mxfp8_dim1_cast_kernel_choice=MXFP8Dim1CastKernelChoice.CUDA,
        scale_calculation_mode=_SCALE,
    )
    grad_x, grad_weight = mx_mm.backward(context, grad.contiguous())[:2]
    return grad_x[: grad_x.shape[0] - missing].contiguous(), grad_weight.contiguous()


@mxfp8_linear_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


@torch.library.custom_op("titanbench::mxfp8_grouped_mm", mutates_args=())
def mxfp8_grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Return each expert's rows times its weight in MXFP8.

    Args:
        x: rows sorted by expert, (M, K).
        weight: (E, N, K).
        offsets: int32 row ends by expert, (E,); groups are padded to 32 rows inside.

    The product itself comes out in bfloat16, as on the GPU, and is cast to x's dtype.
    """
    if x.shape[0] == 0:
        return x.new_zeros((0, weight.shape[1]))
    return grouped._to_mxfp8_then_scaled_grouped_mm(
        x,
        weight.transpose(-2, -1),
        offsets,
        out_dtype=torch.bfloat16,
        kernel_preference=_preference(x),
        scale_calculation_mode=_SCALE,
        pad_token_groups_for_grouped_mm=True,
    ).to(x.dtype, memory_format=torch.contiguous_format)


@mxfp8_grouped_mm.register_fake
def _(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[1]))


@torch.library.custom_op("titanbench::mxfp8_grouped_mm_backward", mutates_args=())
def mxfp8_grouped_mm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``x`` (M, K) and ``weight`` (E, N, K)."""
    if x.shape[0] == 0:
        return torch.zeros_like(x), torch.zeros_like(weight)
    preference = _preference(x)
    padded, starts, ends = pad_token_groups(x, offsets, BLOCK_SIZE, preference)
    context = _Context(
        saved_tensors=(padded, weight.transpose(-2, -1), offsets, starts, ends),
        out_dtype=torch.bfloat16,
        kernel_preference=preference,
        wgrad_with_hp=False,
        scale_calculation_mode=_SCALE,
        pad_token_groups_for_grouped_mm=True,
        num_tokens=x.shape[0],
    )
    grad_x, grad_weight_t = grouped._MXFP8GroupedMM.backward(context, grad.contiguous())[:2]
    grad_weight = grad_weight_t.transpose(-2, -1)
    return grad_x.to(x.dtype).contiguous(), grad_weight.to(weight.dtype).contiguous()


@mxfp8_grouped_mm_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _save_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    return mxfp8_linear_backward(grad, *ctx.saved_tensors)


def _grouped_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return *mxfp8_grouped_mm_backward(grad, *ctx.saved_tensors), None


mxfp8_linear.register_autograd(_linear_backward, setup_context=_save_inputs)
mxfp8_grouped_mm.register_autograd(_grouped_backward, setup_context=_save_inputs)


@register_flop_formula(torch.ops.titanbench.mxfp8_linear)
def _linear_flops(x: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * x.numel() * weight[0]


@register_flop_formula(torch.ops.titanbench.mxfp8_linear_backward)
def _linear_backward_flops(_: Any, x: torch.Size, weight: torch.Size, *__: Any, **___: Any) -> int:
    return 4 * x.numel() * weight[0]


@register_flop_formula(torch.ops.titanbench.mxfp8_grouped_mm)
def _grouped_flops(x: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * x.numel() * weight[1]


@register_flop_formula(torch.ops.titanbench.mxfp8_grouped_mm_backward)
def _grouped_backward_flops(_: Any, x: torch.Size, weight: torch.Size, *__: Any, **___: Any) -> int:
    return 4 * x.numel() * weight[1]
