"""Rematerialization: which activations of a block are recomputed in the backward pass."""

import torch_remat

from models.protocol import LanguageModel
from parallel.plan import Remat


def rematerialize(model: LanguageModel, policy: Remat) -> None:
    """Apply ``policy`` to every block of ``model`` in place.

    ``full`` keeps a block's input alone. ``selective`` also keeps what the block's save regions
    (attention, expert products) produce, so that the cheap rest is recomputed.
    """
    if policy == "none":
        return
    for name, block in model.blocks():
        block.forward = torch_remat.checkpoint(region_name=name)(block.forward)  # type: ignore[method-assign]
