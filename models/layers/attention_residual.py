"""Attention residuals: what enters a layer is a learned mixture of earlier states of the stream.

N sources (B,S,D): beginnings of blocks of layers, and the stream since the last one.
"""

from typing import Any

import torch
from torch import Tensor, nn

from models.batch import Context
from models.initialization import Ones, Zeros, make_parameter
from models.layers.norm import RMSNorm


class _Mixture(torch.autograd.Function):
    """sum_j softmax_j(weight . rms(v_j)) v_j in float32, keeping the sources alone for backward."""

    @staticmethod
    def forward(ctx: Any, weight_D: Tensor, eps: float, *sources: Tensor) -> Tensor:
        scores = [_score(source.float(), weight_D, eps)[0] for source in sources]
        shares_NBS1 = torch.stack(scores).softmax(dim=0)
        ctx.save_for_backward(weight_D, shares_NBS1, *sources)
        ctx.eps = eps
        out = torch.zeros_like(sources[0], dtype=torch.float32)
        for share, source in zip(shares_NBS1, sources, strict=True):
            out.addcmul_(share, source.float())
        return out.to(sources[0].dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight_D, shares_NBS1, *sources = ctx.saved_tensors
        grad = grad.float()
        dshares = torch.stack([(grad * v.float()).sum(-1, keepdim=True) for v in sources])
        dscores = shares_NBS1 * (dshares - (shares_NBS1 * dshares).sum(0))
        dweight_D, dsources = torch.zeros_like(weight_D), []
        for share, dscore, source in zip(shares_NBS1, dscores, sources, strict=True):
            v = source.float()
            score, inverse = _score(v, weight_D, ctx.eps)
            along = score * inverse.square() / v.shape[-1]
            dsource = share * grad + dscore * (inverse * weight_D - along * v)
            dsources.append(dsource.to(source.dtype))
            dweight_D += (dscore * inverse * v).flatten(0, -2).sum(0)
        return dweight_D, None, *dsources


def _score(v: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(weight . rms(v), 1 / root mean square of v), (..., 1) each."""
    inverse = torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
    return (v * weight_D).sum(-1, keepdim=True) * inverse, inverse


class AttentionResidual(nn.Module):
    """A mixture of sources (B,S,D), by the score of each one's norm (with a gain) along a query."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        # All sources alike to begin with.
        self.query = make_parameter(dim, init=Zeros())
        self.gain = make_parameter(dim, init=Ones())

    def forward(self, *sources: Tensor) -> Tensor:
        weight_D = self.query.float() * self.gain.float()
        return _Mixture.apply(weight_D, self.eps, *sources)


class ResidualNorm(RMSNorm):
    """The final norm, of a mixture of sources."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__(dim, eps)
        self.residual = AttentionResidual(dim, eps)

    def forward(self, *sources: Tensor) -> Tensor:
        return super().forward(self.residual(*sources))


class MixedBlock(nn.Module):
    """Attention and a feed-forward layer, each on its own mixture of the stream's states.

    The first layer of a block makes what enters it one of these states and starts anew.
    """

    def __init__(
        self,
        dim: int,
        norm_eps: float,
        *,
        attention: nn.Module,
        feed_forward: nn.Module,
        starts_block: bool,
    ) -> None:
        super().__init__()
        self.starts_block = starts_block
        self.attention_residual = AttentionResidual(dim, norm_eps)
        self.attention_norm = RMSNorm(dim, norm_eps)
        self.attention = attention
        self.feed_forward_residual = AttentionResidual(dim, norm_eps)
        self.feed_forward_norm = RMSNorm(dim, norm_eps)
        self.feed_forward = feed_forward

    def forward(self, x_BSD: Tensor, context: Context, *blocks: Tensor) -> Tensor:
        """The stream after the layer, from the stream and its states where blocks began before."""
        h = self.attention_norm(self.attention_residual(*blocks, x_BSD))
        y = self.attention(h, context)
        blocks, x_BSD = ((*blocks, x_BSD), y) if self.starts_block else (blocks, x_BSD + y)
        h = self.feed_forward_norm(self.feed_forward_residual(*blocks, x_BSD))
        return x_BSD + self.feed_forward(h)
