"""Manifold-constrained hyper-connections (DeepSeek V4): several residual streams, mixed per token.

A sublayer reads a weighted sum of the streams and its output is added to each of them with a weight
of its own, while a doubly stochastic matrix mixes them, so that their norm does not grow. All three
are functions of the streams of the token, computed in float32.

B batch, S sequence, N streams, D model width; streams lie side by side in one dimension of N D.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.initialization import Constant, Zeros, fan_in, make_parameter
from models.layers.norm import RMSNorm

INITIAL_SCALE = 0.01
"""Of what depends on the token, to begin with."""


class StreamConfig(NamedTuple):
    """The streams of a network."""

    dim: int
    num_streams: int
    num_iterations: int
    """Of the Sinkhorn-Knopp normalization of rows and columns."""
    eps: float
    norm_eps: float


class Mixing(NamedTuple):
    """How a sublayer's output and the streams make the streams after it."""

    write_BSN: Tensor
    mix_BSNN: Tensor
    """Stream j goes to stream k with weight [j, k]."""


class HyperConnection(nn.Module):
    """Before a sublayer: its input (B,S,D) from the streams (B,S,ND), and how to go on after it."""

    def __init__(self, config: StreamConfig) -> None:
        super().__init__()
        self.config = config
        N = config.num_streams
        self.projection = StreamProjection(config, N * (2 + N), num_scales=3)

    def forward(self, x_BSM: Tensor) -> tuple[Tensor, Mixing]:
        N, eps = self.config.num_streams, self.config.eps
        read, write, mix = self.projection(x_BSM, (N, N, N * N))
        mix_BSNN = doubly_stochastic(mix.unflatten(-1, (N, N)), self.config.num_iterations, eps)
        mixing = Mixing((2 * torch.sigmoid(write)).to(x_BSM.dtype), mix_BSNN.to(x_BSM.dtype))
        return _read(x_BSM, torch.sigmoid(read) + eps), mixing


class CollapsingNorm(RMSNorm):
    """The final norm over streams: norm of their weighted sum, (B,S,ND) to (B,S,D)."""

    def __init__(self, config: StreamConfig) -> None:
        super().__init__(config.dim, config.norm_eps)
        self.stream_eps = config.eps
        self.num_streams = config.num_streams
        self.projection = StreamProjection(config, config.num_streams, num_scales=1)

    def forward(self, x_BSM: Tensor) -> Tensor:
        (read,) = self.projection(x_BSM, (self.num_streams,))
        return super().forward(_read(x_BSM, torch.sigmoid(read) + self.stream_eps))


class StreamProjection(nn.Module):
    """float32 numbers from a token's streams: one product, then a scale for each of the parts."""

    def __init__(self, config: StreamConfig, num_outputs: int, *, num_scales: int) -> None:
        super().__init__()
        width = config.num_streams * config.dim
        self.norm_eps = config.norm_eps
        self.weight = make_parameter(num_outputs, width, init=fan_in(width))
        self.bias = make_parameter(num_outputs, init=Zeros())
        self.scale = make_parameter(num_scales, init=Constant(INITIAL_SCALE))

    def forward(self, x_BSM: Tensor, widths: tuple[int, ...]) -> list[Tensor]:
        x = x_BSM.float()
        # The norm without a gain is a factor per token: applied to the few outputs.
        rms = (x.square().mean(dim=-1, keepdim=True) + self.norm_eps).rsqrt()
        outputs = (F.linear(x, self.weight.float()) * rms).split(widths, dim=-1)
        biases = self.bias.float().split(widths)
        scales = self.scale.float().unbind()
        parts = zip(outputs, scales, biases, strict=True)
        return [output * scale + bias for output, scale, bias in parts]


def write_back(x_BSM: Tensor, y_BSD: Tensor, mixing: Mixing) -> Tensor:
    """The streams after a sublayer with output y, from those before it."""
    streams_BSND = x_BSM.unflatten(-1, (-1, y_BSD.shape[-1]))
    mixed = torch.matmul(mixing.mix_BSNN.mT, streams_BSND)
    return torch.addcmul(mixed, mixing.write_BSN[..., None], y_BSD[:, :, None]).flatten(2)


def doubly_stochastic(logits: Tensor, num_iterations: int, eps: float) -> Tensor:
    """Sinkhorn-Knopp: a softmax over rows, then columns and rows normalized in turn, columns last.

    logits (..., N, N); the first normalization of the columns counts as an iteration.
    """
    x = logits.softmax(dim=-1) + eps
    x = x / (x.sum(dim=-2, keepdim=True) + eps)
    for _ in range(num_iterations - 1):
        x = x / (x.sum(dim=-1, keepdim=True) + eps)
        x = x / (x.sum(dim=-2, keepdim=True) + eps)
    return x


def hyper_connection_parameters(dim: int, num_streams: int) -> int:
    """Parameters before one sublayer."""
    return num_streams * (2 + num_streams) * (num_streams * dim + 1) + 3


def collapsing_parameters(dim: int, num_streams: int) -> int:
    """Parameters of the streams' final sum, without the norm's gain."""
    return num_streams * (num_streams * dim + 1) + 1


def _read(x_BSM: Tensor, weights_BSN: Tensor) -> Tensor:
    """The weighted sum of the streams, summed in float32."""
    streams_BSND = x_BSM.unflatten(-1, (weights_BSN.shape[-1], -1))
    return (weights_BSN[..., None] * streams_BSND).sum(dim=2).to(x_BSM.dtype)
