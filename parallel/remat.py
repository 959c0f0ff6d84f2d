"""Rematerialization: which activations of a block are recomputed in the backward pass."""

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch_remat
from torch import Tensor, nn

from models.layers.attention import AttentionCore
from models.layers.compressed_attention import CompressedAttentionCore, Indexer
from models.layers.delta_rule import DeltaRuleCore
from models.layers.feed_forward import FeedForward
from models.layers.linear import Linear
from models.layers.moe import MoE
from models.protocol import Model
from parallel.plan import Remat

REGIONS: dict[str, tuple[type[nn.Module], ...]] = {
    "attention": (AttentionCore, CompressedAttentionCore, Indexer),
    "delta_rule": (DeltaRuleCore,),
    "experts": (MoE,),
    "feed_forward": (FeedForward,),
    "projections": (Linear,),
}
"""What ``selective`` can keep, as the words of ``plan.remat_save``.

``attention`` is the core between the projections, quadratic in the sequence; ``experts`` the whole
mixture, whose tokens also travel between ranks; ``projections`` every linear map. A region within
a kept one is part of it.
"""


def rematerialize(model: Model, policy: Remat, saved: Collection[str]) -> None:
    """Apply ``policy`` to every block of ``model`` in place.

    ``full`` keeps a block's input alone. ``selective`` also keeps the activations of the regions
    named in ``saved`` (see ``REGIONS``), which the backward pass then does not recompute.
    """
    if policy == "none":
        return
    for name, block in model.blocks():
        rematerialize_block(block, name, saved if policy == "selective" else ())


def rematerialize_block(block: nn.Module, name: str, saved: Collection[str]) -> None:
    """Keep the block's input and the regions named in ``saved`` alone, in place."""
    kinds = tuple(kind for region in saved for kind in REGIONS[region])
    for inner, module in list(_outermost(block, kinds)):
        replace_forward(module, _saved(module.forward, inner))
    replace_forward(block, torch_remat.checkpoint(region_name=name)(block.forward))


def _outermost(
    module: nn.Module, kinds: tuple[type[nn.Module], ...], prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of these kinds that are in no other of them, by qualified name."""
    for name, child in module.named_children():
        if isinstance(child, kinds):
            yield prefix + name, child
        else:
            yield from _outermost(child, kinds, f"{prefix}{name}.")


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
