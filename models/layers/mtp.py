"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): predict further tokens.

Depth k at token i sees the hidden state of depth k-1 and the embedding of token i+k, and predicts
token i+k+1. Nothing crosses a document boundary: such targets are masked.

B batch, S sequence, D width.
"""

import torch
from torch import Tensor, nn

from models.batch import IGNORE, NO_TOKEN, Context
from models.layers.linear import Linear
from models.layers.norm import Norm, RMSNorm


class MTPBlock(nn.Module):
    """One depth: merge the hidden state with a later token's embedding, one block, a final norm."""

    def __init__(
        self, dim: int, block: nn.Module, *, norm_eps: float, norm: type[Norm] = RMSNorm
    ) -> None:
        super().__init__()
        self.embedding_norm = norm(dim, norm_eps)
        self.hidden_norm = norm(dim, norm_eps)
        self.merge_proj = Linear(2 * dim, dim)
        self.block = block
        self.norm = norm(dim, norm_eps)

    def forward(
        self, x_BSD: Tensor, embedding_BSD: Tensor, context: Context
    ) -> tuple[Tensor, Tensor]:
        """(hidden state for the next depth, normed hidden state for the output head)."""
        merged = torch.cat((self.embedding_norm(embedding_BSD), self.hidden_norm(x_BSD)), dim=-1)
        x_BSD = self.block(self.merge_proj(merged), context)
        return x_BSD, self.norm(x_BSD)


def shift_tokens(tokens_BS: Tensor, positions_BS: Tensor, depth: int) -> Tensor:
    """Token i + depth at i, NO_TOKEN where that is another document."""
    inside = _same_document(positions_BS, depth)
    return torch.roll(tokens_BS, -depth, dims=1).masked_fill(~inside, NO_TOKEN)


def shift_labels(labels_BS: Tensor, positions_BS: Tensor, depth: int) -> Tensor:
    """The target of depth `depth`: token i + depth + 1, IGNORE where that is another document."""
    inside = _same_document(positions_BS, depth)
    # The last label of a row lies outside of it: the data knows whether the document goes on.
    beyond = torch.zeros_like(inside)
    beyond[:, -depth - 1 :] = True
    inside &= _same_document(positions_BS, depth + 1) | beyond
    return torch.roll(labels_BS, -depth, dims=1).masked_fill(~inside, IGNORE)


def _same_document(positions_BS: Tensor, shift: int) -> Tensor:
    """Whether token i + shift exists in the row and in the document of token i, (B,S) bool."""
    later = torch.roll(positions_BS, -shift, dims=1)
    inside = later == positions_BS + shift
    inside[:, max(positions_BS.shape[1] - shift, 0) :] = False
    return inside
