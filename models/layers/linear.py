"""Linear maps and embeddings whose values come from models.initialization."""

from torch import nn

from models.initialization import Init, fan_in, make_parameter


class Linear(nn.Linear):
    """A product without bias, (..., in) to (..., out); normal with fan-in variance by default."""

    def __init__(self, in_features: int, out_features: int, *, init: Init | None = None) -> None:
        super().__init__(in_features, out_features, bias=False, device="meta")
        self.weight = make_parameter(out_features, in_features, init=init or fan_in(in_features))


class Embedding(nn.Embedding):
    """A table of token vectors, (B, S) ids to (B, S, D)."""

    def __init__(self, vocab_size: int, dim: int, *, init: Init) -> None:
        super().__init__(vocab_size, dim, device="meta")
        self.weight = make_parameter(vocab_size, dim, init=init)
