"""Quantization: which products of a model run in MXFP8."""

import torch

from models.layers.linear import Linear
from models.protocol import Model
from parallel.mxfp8 import BLOCK_SIZE, mxfp8_grouped_mm, mxfp8_linear


def quantize(model: Model) -> None:
    """Run the linear and grouped products of every block in MXFP8, in place.

    Routers, embedding and head stay as they are, as in the published recipes; so does a linear
    layer whose sizes (on this rank) are no whole number of 32-value blocks.
    """
    for _, block in model.blocks():
        for module in block.modules():
            if isinstance(module, Linear) and fits(module):
                module.product = linear_product
    for _, moe in model.moe_layers():
        moe.experts.product = mxfp8_grouped_mm


def linear_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x (..., K) times weight (N, K), in MXFP8, (..., N)."""
    # The kernels read whole rows; a latent that travelled with others is a slice of them.
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return mxfp8_linear(rows, weight).unflatten(0, x.shape[:-1])


def fits(linear: Linear) -> bool:
    """Return whether the layer's sizes are whole blocks."""
    return linear.in_features % BLOCK_SIZE == 0 and linear.out_features % BLOCK_SIZE == 0
