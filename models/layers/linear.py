"""Linear maps and embeddings whose values come from models.initialization."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from models.initialization import Init, Zeros, fan_in, make_parameter


class Linear(nn.Linear):
    """A product, (..., in) to (..., out); normal with fan-in variance and no bias by default.

    `product` is the product, of x and the weight: a quantized one replaces it.
    """

    product: Callable[[Tensor, Tensor], Tensor]

    def __init__(
        self, in_features: int, out_features: int, *, init: Init | None = None, bias: bool = False
    ) -> None:
        super().__init__(in_features, out_features, bias=False, device="meta")
        self.weight = make_parameter(out_features, in_features, init=init or fan_in(in_features))
        if bias:
            self.bias = make_parameter(out_features, init=Zeros())
        self.product = F.linear

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x, local(self.weight))
        return y if self.bias is None else y + local(self.bias)


class Embedding(nn.Embedding):
    """A table of token vectors, (B, S) ids to (B, S, D).

    Ids of rows that are not here give zero: NO_TOKEN, and under tensor parallelism the ids of the
    other ranks, whose results are then summed.
    """

    weight: nn.Parameter

    def __init__(self, vocab_size: int, dim: int, *, init: Init) -> None:
        super().__init__(vocab_size, dim, device="meta")
        self.weight = make_parameter(vocab_size, dim, init=init)
        self.first_row = 0
        """The id of the first row that lives on this rank."""

    def forward(self, tokens: Tensor) -> Tensor:
        weight = local(self.weight)
        rows = tokens - self.first_row
        absent = (rows < 0) | (rows >= weight.shape[0])
        return F.embedding(rows.masked_fill(absent, 0), weight).masked_fill(absent[..., None], 0)


def local(weight: Tensor) -> Tensor:
    """The part of a weight that lives on this rank: expert and tensor parallelism divide them."""
    return weight.to_local() if isinstance(weight, DTensor) else weight
