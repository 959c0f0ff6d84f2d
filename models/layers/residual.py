"""Gated residual connections that keep the norm of the stream."""

import torch
from torch import Tensor, nn

from models.initialization import Init, make_parameter


class ResidualGate(nn.Module):
    """alpha * x + beta * y per channel, with alpha^2 + beta^2 = 1 and beta = sigmoid(g / t).

    x is the stream in float32, y the output of a sublayer in any dtype; the result is float32.
    alpha^2 is kept above `floor`, so that a channel never loses the stream.
    """

    def __init__(self, dim: int, *, temperature: float, init: Init, floor: float = 1e-3) -> None:
        super().__init__()
        self.temperature = temperature
        self.floor = floor
        self.weight = make_parameter(dim, init=init)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.weight.float() / self.temperature
        beta = torch.sigmoid(logits)
        alpha = (torch.sigmoid(-logits) * (1 + beta)).clamp_min(self.floor).sqrt()
        return torch.addcmul(alpha * x, beta, y.to(x.dtype))
