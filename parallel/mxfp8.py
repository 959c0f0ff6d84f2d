"""MXFP8 products: linear and grouped, as custom operators on torchao's kernels.

Blocks of 32 values share a power-of-two scale (e8m0), the values are e4m3 (OCP Microscaling
Formats 1.0); scales are rounded up (RCEIL). All three products of a layer are quantized:
forward, input gradient and weight gradient. Without an SM100 GPU torchao emulates them: the
values are those of the format, the products run in the tensors' own dtype.

One operator each, so that a trace, a prediction and a GPU show the product the device would
run and not the steps of its emulation. M rows, K inputs, N outputs, E experts.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula
from torchao.prototype.moe_training import mxfp8_grouped_mm as grouped
from torchao.prototype.moe_training.mxfp8_linear import (
    _to_mxfp8_then_scaled_mm as to_mxfp8_then_scaled_mm,
)
from torchao.prototype.moe_training.utils import pad_token_groups, unpad_token_groups
from torchao.prototype.mx_formats.config import (
    MXFP8Dim0CastKernelChoice,
    MXFP8Dim1CastKernelChoice,
    ScaleCalculationMode,
)
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.utils import _to_mxfp8_dim1_kernel_wrapper as to_mxfp8_columns
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

from models.ops.asked_gradients import asked_gradients

BLOCK_SIZE = 32
_SCALE = ScaleCalculationMode.RCEIL
_VALUES = torch.float8_e4m3fn


def kernels_available(device_type: str) -> bool:
    """Return whether ``device_type`` has real MXFP8 kernels; without them they are emulated."""
    return device_type == "cuda" and torch.cuda.get_device_capability() >= (10, 0)


def _preference(x: Tensor) -> KernelPreference:
    native = kernels_available(x.device.type)
    return KernelPreference.AUTO if native else KernelPreference.EMULATED


def _rows(x: Tensor) -> Tensor:
    """Quantize x (M, K) in blocks along its rows."""
    return MXTensor.to_mx(
        x,
        _VALUES,
        BLOCK_SIZE,
        _SCALE,
        _preference(x),
        mxfp8_dim0_cast_kernel_choice=MXFP8Dim0CastKernelChoice.TRITON,
    )


def _columns(x: Tensor) -> Tensor:
    """Quantize x (M, K) in blocks along its columns; returns it transposed, (K, M)."""
    return to_mxfp8_columns(
        x, BLOCK_SIZE, _VALUES, x.dtype, _preference(x), MXFP8Dim1CastKernelChoice.CUDA, _SCALE
    )


@torch.library.custom_op("titanbench::mxfp8_linear", mutates_args=())
def mxfp8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x @ weight.T`` in MXFP8; x (M, K), weight (N, K), both multiples of 32 in K."""
    return to_mxfp8_then_scaled_mm(x, weight, _preference(x), _SCALE)


@mxfp8_linear.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


@torch.library.custom_op("titanbench::mxfp8_linear_input_grad", mutates_args=())
def mxfp8_linear_input_grad(grad: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient (M, K) of x from that of the product, (M, N)."""
    return torch.mm(_rows(grad.contiguous()), _columns(weight).t())


@mxfp8_linear_input_grad.register_fake
def _(grad: Tensor, weight: Tensor) -> Tensor:
    return grad.new_empty((grad.shape[0], weight.shape[1]))


@torch.library.custom_op("titanbench::mxfp8_linear_weight_grad", mutates_args=())
def mxfp8_linear_weight_grad(grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient (N, K) of the weight; M is padded to whole blocks with zeros."""
    missing = -x.shape[0] % BLOCK_SIZE
    if missing:
        grad, x = (torch.nn.functional.pad(t, (0, 0, 0, missing)) for t in (grad, x))
    return torch.mm(_columns(grad.contiguous()), _columns(x).t())


@mxfp8_linear_weight_grad.register_fake
def _(grad: Tensor, x: Tensor) -> Tensor:
    return grad.new_empty((grad.shape[1], x.shape[1]))


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


@torch.library.custom_op("titanbench::mxfp8_grouped_mm_input_grad", mutates_args=())
def mxfp8_grouped_mm_input_grad(grad: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Return the gradient (M, K) of x from that of the product, (M, N)."""
    num_rows, preference = grad.shape[0], _preference(grad)
    if num_rows == 0:
        return grad.new_zeros((0, weight.shape[2]))
    padded, starts, ends = pad_token_groups(grad.contiguous(), offsets, BLOCK_SIZE, preference)
    product = grouped._compute_dgrad(
        padded, weight.transpose(-2, -1), ends, BLOCK_SIZE, torch.bfloat16, _SCALE, preference
    )
    rows = unpad_token_groups(product, offsets, starts, num_rows, BLOCK_SIZE, preference)
    return rows.to(grad.dtype).contiguous()


@mxfp8_grouped_mm_input_grad.register_fake
def _(grad: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return grad.new_empty((grad.shape[0], weight.shape[2]))


@torch.library.custom_op("titanbench::mxfp8_grouped_mm_weight_grad", mutates_args=())
def mxfp8_grouped_mm_weight_grad(grad: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """Return the gradient (E, N, K) of the weight."""
    preference = _preference(x)
    if x.shape[0] == 0:
        return x.new_zeros((offsets.shape[0], grad.shape[1], x.shape[1]))
    (grad_rows, *_), (x_rows, _, ends) = (
        pad_token_groups(rows.contiguous(), offsets, BLOCK_SIZE, preference) for rows in (grad, x)
    )
    product_EKN = grouped._compute_wgrad(
        grad_rows, x_rows, ends, BLOCK_SIZE, torch.bfloat16, _SCALE, False, preference
    )
    return product_EKN.transpose(-2, -1).to(x.dtype).contiguous()


@mxfp8_grouped_mm_weight_grad.register_fake
def _(grad: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    return grad.new_empty((offsets.shape[0], grad.shape[1], x.shape[1]))


def _save_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    input_asked, weight_asked = asked_gradients(ctx)
    return (
        mxfp8_linear_input_grad(grad, weight) if input_asked else None,
        mxfp8_linear_weight_grad(grad, x) if weight_asked else None,
    )


def _grouped_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, offsets = ctx.saved_tensors
    input_asked, weight_asked, _ = asked_gradients(ctx)
    return (
        mxfp8_grouped_mm_input_grad(grad, weight, offsets) if input_asked else None,
        mxfp8_grouped_mm_weight_grad(grad, x, offsets) if weight_asked else None,
        None,
    )


mxfp8_linear.register_autograd(_linear_backward, setup_context=_save_inputs)
mxfp8_grouped_mm.register_autograd(_grouped_backward, setup_context=_save_inputs)


@register_flop_formula(torch.ops.titanbench.mxfp8_linear)
def _linear_flops(x: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * x.numel() * weight[0]


@register_flop_formula(torch.ops.titanbench.mxfp8_linear_input_grad)
def _linear_input_grad_flops(grad: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * grad.numel() * weight[1]


@register_flop_formula(torch.ops.titanbench.mxfp8_linear_weight_grad)
def _linear_weight_grad_flops(grad: torch.Size, x: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * grad.numel() * x[1]


@register_flop_formula(torch.ops.titanbench.mxfp8_grouped_mm)
def _grouped_flops(x: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * x.numel() * weight[1]


@register_flop_formula(torch.ops.titanbench.mxfp8_grouped_mm_input_grad)
def _grouped_input_grad_flops(grad: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * grad.numel() * weight[2]


@register_flop_formula(torch.ops.titanbench.mxfp8_grouped_mm_weight_grad)
def _grouped_weight_grad_flops(grad: torch.Size, x: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * grad.numel() * x[1]
