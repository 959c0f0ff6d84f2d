"""Rematerialization: which activations of a block are recomputed in the backward pass."""

from collections.abc import Callable
from typing import Any

import torch_remat
from torch import Tensor, nn

from models.layers.attention import AttentionCore
from models.layers.compressed_attention import CompressedAttentionCore, Indexer
from models.layers.moe import MoE
from models.protocol import Model
from parallel.plan import Remat

SAVED = (AttentionCore, CompressedAttentionCore, Indexer, MoE)
"""Layers that ``selective`` keeps: attention is quadratic, experts also travel between ranks."""


def rematerialize(model: Model, policy: Remat) -> None:
    """Apply ``policy`` to every block of ``model`` in place.

    ``full`` keeps a block's input alone. ``selective`` also keeps the activations of the layers
    in ``SAVED``, so that the backward pass recomputes projections, norms and dense layers only.
    """
    if policy == "none":
        return
    for name, block in model.blocks():
        if policy == "selective":
            for inner, module in block.named_modules():
                if isinstance(module, SAVED):
                    replace_forward(module, _saved(module.forward, inner))
        replace_forward(block, torch_remat.checkpoint(region_name=name)(block.forward))


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Put ``forward`` in place of the module's own; its hooks and parameters stay."""
    module.forward = forward


def _saved(forward: Callable[..., Tensor], region: str) -> Callable[..., Tensor]:
    def call(*args: Any) -> Tensor:
        output = torch_remat.region(forward, region, recompute=False)(*args)
        # Its consumers are plain operators, which cannot say that they need it in a replay.
        torch_remat.recompute_needs_tensor(output)
        return output

    return call
