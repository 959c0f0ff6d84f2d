"""Quantization: which products of a model run in MXFP8."""

from typing import cast

import torch
from torch import nn

from models.protocol import Model
from parallel.mxfp8 import BLOCK_SIZE, mxfp8_grouped_mm, mxfp8_linear


class Mxfp8Linear(nn.Module):
    """A linear layer without bias whose three products run in MXFP8; weight (N, K)."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (..., N) for x (..., K)."""
        rows = x.reshape(-1, x.shape[-1])
        return mxfp8_linear(rows, self.weight).unflatten(0, x.shape[:-1])


def quantize(model: Model) -> None:
    """Run the linear and grouped products of every block in MXFP8, in place.

    Routers, embedding and head stay as they are, as in the published recipes; so does a linear
    layer whose sizes are no whole number of 32-value blocks.
    """
    for _, block in model.blocks():
        for module in list(block.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear) and fits(child):
                    setattr(module, name, Mxfp8Linear(cast(nn.Parameter, child.weight)))
    for _, moe in model.moe_layers():
        moe.experts.product = mxfp8_grouped_mm


def fits(linear: nn.Linear) -> bool:
    """Return whether the layer's sizes are whole blocks and it has no bias."""
    whole = linear.in_features % BLOCK_SIZE == 0 and linear.out_features % BLOCK_SIZE == 0
    return whole and linear.bias is None
