"""Quantization: which products of a model run in MXFP8.

Parts of a model go by the layer they belong to:

* ``feed_forward``: the linear maps of gated layers, shared experts included;
* ``experts``: the grouped products of routed experts and what leads to and from their width;
* ``attention``: every other linear map of a block, those of MTP modules included;
* ``head``: the three products of the chunked loss, by choice.

Routers and embedding stay as they are, as in the published recipes.
"""

from collections.abc import Collection, Iterator

from torch import Tensor, nn

from models.layers.feed_forward import FeedForward
from models.layers.head import ChunkProducts
from models.layers.linear import Linear, local
from models.layers.moe import MoE
from models.protocol import Model
from parallel.mxfp8 import (
    BLOCK_SIZE,
    mxfp8_grouped_mm,
    mxfp8_linear,
    mxfp8_linear_input_grad,
    mxfp8_linear_weight_grad,
)


def quantize(model: Model, parts: Collection[str]) -> None:
    """Run the products of the named ``parts`` in MXFP8, in place.

    A linear layer whose sizes (on this rank) are no whole number of 32-value blocks stays as it
    is.
    """
    for _, block in model.blocks():
        for part, linear in linear_maps(block):
            if part in parts and fits(linear):
                linear.product = linear_product
    if "experts" in parts:
        for _, moe in model.moe_layers():
            moe.experts.product = mxfp8_grouped_mm
    if "head" in parts and model.head is not None:
        sizes = local(model.head.weight).shape
        assert not any(size % BLOCK_SIZE for size in sizes), "a workload checks its head"
        model.head.products = ChunkProducts(linear_product, backward_products)


def linear_maps(module: nn.Module, part: str = "attention") -> Iterator[tuple[str, Linear]]:
    """Yield the linear maps inside of ``module``, each with the part that it belongs to."""
    for child in module.children():
        if isinstance(child, Linear):
            yield part, child
        elif isinstance(child, FeedForward):
            yield from linear_maps(child, "feed_forward")
        else:
            yield from linear_maps(child, "experts" if isinstance(child, MoE) else part)


def linear_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x (..., K) times weight (N, K), in MXFP8, (..., N)."""
    # The kernels read whole rows; a latent that travelled with others is a slice of them.
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return mxfp8_linear(rows, weight).unflatten(0, x.shape[:-1])


def backward_products(
    dproduct_CV: Tensor, h_CD: Tensor, weight_VD: Tensor, dhidden_CD: Tensor, dweight_VD: Tensor
) -> None:
    """Write and add the gradients of a chunk of the loss; see ``ChunkProducts.backward``."""
    dhidden_CD.copy_(mxfp8_linear_input_grad(dproduct_CV, weight_VD))
    dweight_VD.add_(mxfp8_linear_weight_grad(dproduct_CV, h_CD))


def fits(linear: Linear) -> bool:
    """Return whether the layer's sizes are whole blocks."""
    return linear.in_features % BLOCK_SIZE == 0 and linear.out_features % BLOCK_SIZE == 0
