"""Norms: root mean square with plain gain, centred gain, gain before or none; layer norm.

D is the normed width, the last dimension.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from models.initialization import Ones, Zeros, make_parameter


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """x over its root mean square along the last dimension, without a gain."""
    return F.rms_norm(x, (x.shape[-1],), None, eps)


class UnitRMSNorm(nn.Module):
    """scale * rms(x), with nothing to learn."""

    def __init__(self, eps: float, *, scale: float = 1.0) -> None:
        super().__init__()
        self.eps = eps
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        x = rms_norm(x, self.eps)
        return x if self.scale == 1.0 else x * self.scale


class RMSNorm(nn.Module):
    """w * rms(x), with w starting at 1."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = make_parameter(dim, init=Ones())

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class CentredRMSNorm(nn.Module):
    """(1 + w) * rms(x), with w starting at 0: weight decay pulls the gain to 1."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = make_parameter(dim, init=Zeros())

    def forward(self, x: Tensor) -> Tensor:
        gain = (1 + self.weight.float()).to(x.dtype)
        return F.rms_norm(x, self.weight.shape, gain, self.eps)


class LayerNorm(nn.Module):
    """w * (x - mean) / deviation + b, with w starting at 1 and b at 0."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = make_parameter(dim, init=Ones())
        self.bias = make_parameter(dim, init=Zeros())

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return F.layer_norm(x, self.weight.shape, weight, bias, self.eps)


class InputScaledRMSNorm(nn.Module):
    """rms((1 + w) * x): the gain weighs the channels before they are normed."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = make_parameter(dim, init=Zeros())

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x * (1 + self.weight.float()).to(x.dtype), self.eps)


Norm = RMSNorm | CentredRMSNorm
"""The kinds that families use before layers and before the head."""
