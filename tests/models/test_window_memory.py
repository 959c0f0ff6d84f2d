"""Activation memory of a whole layer with a sliding window, at real lengths, on the meta device."""

import pytest
import torch
from torch import Tensor

from models.layers.rotary import rotary_context
from models.muse_spark import MUSE_SPARK_PROXY

LENGTHS = (4096, 8192, 16384, 32768)


def kept_bytes(layer: torch.nn.Module, S: int) -> int:
    """What a layer's forward pass keeps for its backward, parameters apart."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.device("meta"):
        positions = torch.empty(1, S, dtype=torch.int64)
        context = rotary_context(positions, MUSE_SPARK_PROXY.head_dim, 500_000.0, None)
        x = torch.empty(1, S, MUSE_SPARK_PROXY.dim, requires_grad=True)
    parameters = {p.untyped_storage()._cdata for p in layer.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = layer(x, context)
    assert out.shape == x.shape
    return sum(size for storage, size in kept.items() if storage not in parameters)


@pytest.mark.parametrize("layer", [0, 3])
def test_what_a_layer_keeps_grows_linearly_from_4k_to_32k_tokens(layer: int) -> None:
    """A layer with a window, and one without: flash attention keeps no scores of either."""
    with torch.device("meta"):
        attention = MUSE_SPARK_PROXY.build().layers[layer].attention
    assert (attention.core.window > 0) == (layer == 0)
    first, *others = (kept_bytes(attention, S) for S in LENGTHS)

    assert first > 4096 * MUSE_SPARK_PROXY.dim
    assert others == [2 * first, 4 * first, 8 * first]
