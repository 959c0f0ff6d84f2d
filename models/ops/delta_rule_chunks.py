"""The gated delta rule in chunks: the WY representation of Gated DeltaNet (arXiv:2412.06464).

Within a chunk the updates u of all tokens come from one triangular system, so a sequence costs
products of matrices and as many steps as it has chunks. Sums of log decays are added up as a scan
does, never subtracted: no exponent is above zero, however strong the decay, and none cancels.

B batch, H heads, N chunks, C tokens of a chunk, D width of keys, Dv of values, G log decays of a
token: D of them, or 1 for all its channels. M pairs of blocks of L tokens at one level.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Span(NamedTuple):
    """Some chunks of every head, in the dtype of the state."""

    q: Tensor
    """(B,H,N,C,D), scaled."""
    k: Tensor
    v: Tensor
    """(B,H,N,C,Dv)."""
    log_decay: Tensor
    """(B,H,N,C,G), at most 0: what a token does to the state before it."""
    beta: Tensor
    """(B,H,N,C,1)."""
    documents: Tensor
    """(B,1,N,C) int64: documents begun in the chunk up to a token; 0 for the one that goes on."""


class SpanGradients(NamedTuple):
    """Gradients with respect to what a span holds, of the same shapes."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor


class _Level(NamedTuple):
    """Decays from the later half of each pair of blocks to the border, and from it to the earlier.

    (B,H,N,M,L,G) each: together the decay between any two tokens on both sides.
    """

    later: Tensor
    earlier: Tensor


class _Chunks(NamedTuple):
    """What is known of each chunk without the state before it."""

    levels: list[_Level]
    entry: Tensor
    """(B,H,N,C,G): decay from the chunk's beginning to a token, 0 in a later document."""
    exit: Tensor
    """(B,H,N,C,G): decay from a token to the chunk's end, 0 if its document ends before."""
    through: Tensor
    """(B,H,N,G,1): decay of the state over the chunk, 0 if its document ends."""
    keys: Tensor
    """(B,H,N,C,C): products of a token's key with earlier ones, decayed."""
    queries: Tensor
    """(B,H,N,C,C): products of a token's query with the keys up to its own, decayed."""
    system: Tensor
    """(B,H,N,C,C) lower, its diagonal is taken as 1."""
    from_values: Tensor
    """(B,H,N,C,Dv): the updates if the state were zero."""
    from_state: Tensor
    """(B,H,N,C,D): what times the state is taken off them."""


def forward(span: Span, state: Tensor) -> tuple[Tensor, Tensor]:
    """(out (B,H,N,C,Dv), state after the span) from the state (B,H,D,Dv) before it."""
    chunks = _prepare(span)
    updates, states, state = _advance(span, chunks, state)
    out = (span.q * chunks.entry) @ states + chunks.queries @ updates
    return out, state


def transition(span: Span, before: Tensor) -> Tensor:
    """What the span makes of [M | b] (B,H,D,D+Dv), for which a state is M times another plus b.

    Its tokens do that to both parts, and their values are added to b.
    """
    chunks = _prepare(span)
    from_values = F.pad(chunks.from_values, (span.k.shape[-1], 0))
    _, _, after = _advance(span, chunks._replace(from_values=from_values), before)
    return after


def state_gradient(span: Span, dout: Tensor, dstate: Tensor) -> Tensor:
    """The gradient of the state before the span alone; see `backward`."""
    _, _, dstate = _retreat(span, _prepare(span), dout, dstate)
    return dstate


def backward(
    span: Span, state: Tensor, dout: Tensor, dstate: Tensor
) -> tuple[SpanGradients, Tensor]:
    """Gradients of a span's inputs and of the state before it, from those of what `forward` gives.

    `state` is the one before the span, `dstate` the gradient of the one after it.
    """
    chunks = _prepare(span)
    updates, states, _ = _advance(span, chunks, state)
    dupdates, dstates_after, dstate = _retreat(span, chunks, dout, dstate)
    dright_side = _solve(chunks.system.mT, dupdates, upper=True)
    dv = span.beta * dright_side
    residual = span.v - (span.k * chunks.entry) @ states - chunks.keys @ updates
    dq_in, dk_in = dout @ states.mT * chunks.entry, -(dv @ states.mT) * chunks.entry
    dk_out = updates @ dstates_after.mT * chunks.exit
    dproducts = torch.stack((-(dv @ updates.mT), dout @ updates.mT), dim=3)
    dlater, dearlier, terms = _pair_gradients(span, chunks.levels, dproducts)
    own = _same_token_gradients(dproducts)
    width = span.log_decay.shape[-1]
    entry_term = _per_decay(span.q * dq_in + span.k * dk_in, width)
    passed = (dstates_after * states).sum(-1) * chunks.through.squeeze(-1)
    entry_term[..., -1, :] += _per_decay(passed, width)
    exit_term = _per_decay(span.k * dk_out, width)
    gradients = SpanGradients(
        q=dlater[:, :, :, 1] + dq_in + own * span.k,
        k=dlater[:, :, :, 0] + dk_in + dearlier + dk_out + own * span.q,
        v=dv,
        log_decay=_log_decay_gradient(terms, entry_term, exit_term),
        beta=(dright_side * residual).sum(-1, keepdim=True),
    )
    return gradients, dstate


def _prepare(span: Span) -> _Chunks:
    documents = span.documents[..., None]
    levels, prefix, suffix = _decays(span.log_decay)
    same_document = documents == documents.mT
    products = _pair_products(span, levels) * same_document.unsqueeze(3)
    keys, queries = products.unbind(3)
    queries = queries + torch.diag_embed((span.q * span.k).sum(-1))
    entry = prefix.exp() * (documents == 0)
    exit = suffix.exp() * (documents == documents[..., -1:, :])
    system = span.beta * keys
    right_sides = torch.cat((span.beta * span.v, span.beta * span.k * entry), dim=-1)
    solved = _solve(system, right_sides, upper=False)
    from_values, from_state = solved.split([span.v.shape[-1], span.k.shape[-1]], dim=-1)
    through = entry[..., -1, :, None]
    return _Chunks(levels, entry, exit, through, keys, queries, system, from_values, from_state)


def _advance(span: Span, chunks: _Chunks, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(updates (B,H,N,C,Dv), the state before each chunk (B,H,N,D,Dv), the state at the end)."""
    k_out = span.k * chunks.exit
    updates = torch.empty_like(chunks.from_values)
    states = updates.new_empty(*updates.shape[:3], *state.shape[-2:])
    for n in range(updates.shape[2]):
        states[:, :, n] = state
        updates[:, :, n] = chunks.from_values[:, :, n] - chunks.from_state[:, :, n] @ state
        state = chunks.through[:, :, n] * state + k_out[:, :, n].mT @ updates[:, :, n]
    return updates, states, state


def _retreat(
    span: Span, chunks: _Chunks, dout: Tensor, dstate: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of updates, of the state after each chunk, and of the one before the span.

    Shapes as those of `_advance`. No state takes part: outputs are linear in it.
    """
    k_out = span.k * chunks.exit
    dupdates = chunks.queries.mT @ dout
    from_outputs = (span.q * chunks.entry).mT @ dout
    dstates_after = torch.empty_like(from_outputs)
    for n in reversed(range(dupdates.shape[2])):
        dstates_after[:, :, n] = dstate
        dupdates[:, :, n] += k_out[:, :, n] @ dstate
        dstate = chunks.through[:, :, n] * dstate + from_outputs[:, :, n]
        dstate = dstate - chunks.from_state[:, :, n].mT @ dupdates[:, :, n]
    return dupdates, dstates_after, dstate


def _solve(system: Tensor, right_sides: Tensor, *, upper: bool) -> Tensor:
    return torch.linalg.solve_triangular(system, right_sides, upper=upper, unitriangular=True)


def _decays(log_decay: Tensor) -> tuple[list[_Level], Tensor, Tensor]:
    """The levels from blocks of one token on, and sums within the chunk: up to, and after, a token.

    Blocks double from level to level; a sum over the larger block is that over the smaller one and,
    on the far side of the border, the total of the other.
    """
    prefix, suffix = log_decay, torch.zeros_like(log_decay)
    levels, C = [], log_decay.shape[-2]
    width = 1
    while width < C:
        before, after = _halves(prefix, width), _halves(suffix, width)
        levels.append(_Level(before[1].exp(), after[0].exp()))
        totals = [half[..., -1:, :] for half in before]
        prefix = _join_halves(before[0], before[1] + totals[0])
        suffix = _join_halves(after[0] + totals[1], after[1])
        width *= 2
    return levels, prefix, suffix


def _halves(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """(..., C, X) to the earlier and the later halves (..., M, L, X) of blocks of 2L tokens."""
    blocks = x.unflatten(-2, (-1, 2, width))
    return blocks[..., 0, :, :], blocks[..., 1, :, :]


def _join_halves(earlier: Tensor, later: Tensor) -> Tensor:
    return torch.stack((earlier, later), dim=-3).flatten(-4, -2)


def _scaled_halves(span: Span, level: _Level) -> tuple[Tensor, Tensor]:
    """Keys and queries (B,H,N,M,2L,D) of the later halves and keys (B,H,N,M,L,D) of the earlier."""
    width = level.later.shape[-2]
    later = [_halves(x, width)[1] * level.later for x in (span.k, span.q)]
    return torch.cat(later, dim=-2), _halves(span.k, width)[0] * level.earlier


def _below_border(products: Tensor, width: int) -> Tensor:
    """The view (B,H,N,2,L,L,M) of products (B,H,N,2,C,C) in which the levels' blocks lie."""
    blocks = products.unflatten(-1, (-1, 2 * width)).unflatten(-3, (-1, 2 * width))
    return blocks.diagonal(dim1=-4, dim2=-2)[..., width:, :width, :]


def _pair_products(span: Span, levels: list[_Level]) -> Tensor:
    """(B,H,N,2,C,C): products of keys, and of queries, with earlier keys, decayed; else 0."""
    *outer, C, _ = span.k.shape
    products = span.k.new_zeros(*outer, 2, C, C)
    for level in levels:
        width = level.later.shape[-2]
        later, earlier = _scaled_halves(span, level)
        blocks = (later @ earlier.mT).unflatten(-2, (2, width))
        _below_border(products, width).copy_(blocks.movedim(3, -1))
    return products


def _pair_gradients(
    span: Span, levels: list[_Level], dproducts: Tensor
) -> tuple[Tensor, Tensor, list[_Level]]:
    """Gradients (B,H,N,2,C,D) of the later keys and queries, and (B,H,N,C,D) of earlier keys.

    And those of the logarithms of each level's decays.
    """
    documents = span.documents[..., None]
    dproducts *= (documents == documents.mT).unsqueeze(3)
    *outer, C, D = span.k.shape
    dlater, dearlier = span.k.new_zeros(*outer, 2, C, D), torch.zeros_like(span.k)
    keys_and_queries, terms = torch.stack((span.k, span.q), dim=3), []
    for level in levels:
        width = level.later.shape[-2]
        later, earlier = _scaled_halves(span, level)
        blocks = _below_border(dproducts, width).movedim(-1, 3).flatten(-3, -2)
        dx = (blocks @ earlier).unflatten(-2, (2, width)).movedim(-3, 3) * level.later.unsqueeze(3)
        dk = (blocks.mT @ later) * level.earlier
        _halves(dlater, width)[1].add_(dx)
        _halves(dearlier, width)[0].add_(dk)
        later_term = (_halves(keys_and_queries, width)[1] * dx).sum(3)
        terms.append(
            _Level(
                _per_decay(later_term, level.later.shape[-1]),
                _per_decay(_halves(span.k, width)[0] * dk, level.later.shape[-1]),
            )
        )
    return dlater, dearlier, terms


def _same_token_gradients(dproducts: Tensor) -> Tensor:
    """(B,H,N,C,1): gradient of the product of a token's query with its own key."""
    return dproducts[:, :, :, 1].diagonal(dim1=-2, dim2=-1)[..., None]


def _log_decay_gradient(terms: list[_Level], entry_term: Tensor, exit_term: Tensor) -> Tensor:
    """(B,H,N,C,G) from the gradients of all sums of log decays: `_decays` backwards.

    Sums again and no differences: nothing of another document is left over by rounding.
    """
    prefix, suffix = entry_term, exit_term
    for term in reversed(terms):
        width = term.later.shape[-2]
        before, after = _halves(prefix, width), _halves(suffix, width)
        dtotals = before[1].sum(-2), after[0].sum(-2)
        before = before[0].clone(), before[1] + term.later
        for half, dtotal in zip(before, dtotals, strict=True):
            half[..., -1, :] += dtotal
        prefix, suffix = _join_halves(*before), _join_halves(after[0] + term.earlier, after[1])
    return prefix


def _per_decay(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else x.sum(-1, keepdim=True)
