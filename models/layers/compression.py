"""Compression: blocks of tokens pooled into entries, by a learned softmax over the block.

Blocks start anew with each document and one that the document's end cuts off makes no entry, so
that packed documents have exactly the entries that they have apart. The entries of a row stand one
after the other in a table of fixed size; what is left of it at the end nobody sees.

B batch, S sequence, E entries of a row, D width of an entry, m tokens of a block, R rotary pairs.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.batch import Context
from models.initialization import Zeros, make_parameter
from models.layers.linear import Linear
from models.layers.norm import RMSNorm
from models.layers.rotary import RotaryScaling, rotary_context


class EntryMap(NamedTuple):
    """Where the entries of a batch come from and who sees them."""

    block: int
    """Tokens of an entry."""
    ends_BE: Tensor
    """int64 last token of each entry's block; the row's last token for an entry that is none."""
    follows_BE: Tensor
    """bool: another block of the document comes before this one."""
    first_BS: Tensor
    last_BS: Tensor
    """int64: each token sees the entries [first, last) of its row, those that have closed."""
    context: Context
    """Rotations of the entries, which stand at their first tokens' positions."""


def map_entries(
    positions_BS: Tensor, block: int, dim: int, theta: float, scaling: RotaryScaling | None
) -> EntryMap:
    """The entries of packed documents; shapes depend on that of the batch alone."""
    B, S = positions_BS.shape
    complete_BS = (positions_BS + 1) // block
    last_BS = ((positions_BS + 1) % block == 0).cumsum(1)
    numbers_BE = torch.arange(1, S // block + 1, device=positions_BS.device).expand(B, -1)
    ends_BE = torch.searchsorted(last_BS, numbers_BE.contiguous()).clamp_max(S - 1)
    starts_BE = (positions_BS.gather(1, ends_BE) + 1 - block).clamp_min(0)
    return EntryMap(
        block,
        ends_BE,
        starts_BE > 0,
        last_BS - complete_BS,
        last_BS,
        rotary_context(starts_BE, dim, theta, scaling),
    )


class Compressor(nn.Module):
    """Entries (B,E,D) of a layer's inputs (B,S,dim), normed and not yet rotated.

    An entry is the sum of its tokens' values, weighted per channel by a softmax over the block. If
    `overlapping` a token has two values, one for the entry of its block and one for the next
    block's, which then is a softmax over twice as many tokens.
    """

    def __init__(
        self, dim: int, entry_dim: int, *, block: int, overlapping: bool, norm_eps: float
    ) -> None:
        super().__init__()
        self.overlapping = overlapping
        width = entry_dim * (2 if overlapping else 1)
        self.value_proj = Linear(dim, width)
        self.gate_proj = Linear(dim, width)
        self.position_bias = make_parameter(block, width, init=Zeros())
        self.norm = RMSNorm(entry_dim, norm_eps)

    def forward(self, x_BSD: Tensor, entries: EntryMap) -> Tensor:
        back_m = torch.arange(entries.block - 1, -1, -1, device=x_BSD.device)
        tokens_BEm = (entries.ends_BE[..., None] - back_m).clamp_min(0)
        values, gates = self.value_proj(x_BSD), self.gate_proj(x_BSD)
        bias = self.position_bias.float()
        if self.overlapping:
            before_BEm = (tokens_BEm - entries.block).clamp_min(0)
            (for_next, values), (gates_for_next, gates) = values.chunk(2, -1), gates.chunk(2, -1)
            bias_for_next, bias = bias.chunk(2, -1)
            first_BE11 = ~entries.follows_BE[..., None, None]
            earlier_gates = _take(gates_for_next, before_BEm).float() + bias_for_next
            earlier_gates = earlier_gates.masked_fill(first_BE11, float("-inf"))
            earlier = _take(for_next, before_BEm)
        pooled = _take(values, tokens_BEm)
        logits = _take(gates, tokens_BEm).float() + bias
        if self.overlapping:
            pooled = torch.cat((earlier, pooled), dim=2)
            logits = torch.cat((earlier_gates, logits), dim=2)
        weights = logits.softmax(dim=2).to(pooled.dtype)
        return self.norm((weights * pooled).sum(dim=2))


def compressor_parameters(dim: int, entry_dim: int, *, block: int, overlapping: bool) -> int:
    """Parameters of a compressor."""
    width = entry_dim * (2 if overlapping else 1)
    return 2 * dim * width + block * width + entry_dim


def _take(x_BSD: Tensor, tokens_BEm: Tensor) -> Tensor:
    """(B,E,m,D): the vectors of these tokens of each row."""
    B, S, _ = x_BSD.shape
    rows_B11 = torch.arange(B, device=x_BSD.device)[:, None, None] * S
    index = (tokens_BEm + rows_B11).flatten()
    return x_BSD.flatten(0, 1).index_select(0, index).unflatten(0, tokens_BEm.shape)
