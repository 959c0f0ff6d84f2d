"""Ring attention (arXiv:2310.01889): keys and values travel from rank to rank, a block at a time.

What travels is what they are made of: a latent is expanded where it arrives, a chunk at a time,
and only if a query may see it. While a rank attends to the block that is here, the next one
arrives. Outputs of chunks are merged by their log-sum-exp.

Backward goes around the ring once more and expands once more: with output and log-sum-exp of all
keys, each chunk's gradients are found alone. Those of the sources travel with their block, summed
in float32, and come home after the last rank that sees it; those of the expansion's weight stay.

N ranks, B batch, c tokens of a chunk (see parallel.chunks), s = 2c tokens of a rank, H heads,
C channels of the sources together.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from models.layers.attention import Expansion
from models.layers.linear import local
from models.ops.asked_gradients import asked_gradients
from models.ops.attention import attention, attention_backward
from parallel.chunks import Chunks
from parallel.packing import pack, unpack
from parallel.rotation import carry_home, visits


class Ring(NamedTuple):
    """Who attends, how, and what is made of the sources on arrival."""

    chunks: Chunks
    group: dist.ProcessGroup
    scale: float
    expansion: Expansion | None

    def keys_and_values(self, sources: list[Tensor], weight: Tensor | None) -> tuple[Tensor, ...]:
        """Return keys and values of a chunk from its sources and the expansion's weight."""
        if self.expansion is None:
            return tuple(sources)
        assert weight is not None and self.expansion.up.bias is None
        latent, *rest = sources
        return self.expansion.split(self.expansion.up.product(latent, weight), *rest)


class QueryChunk(NamedTuple):
    """A chunk of queries here that may see a chunk of keys."""

    place: int
    """Its place among the two chunks of this rank."""
    tokens: slice
    """The tokens of the sequence from the first key to the last query."""


class KeyChunk(NamedTuple):
    """A chunk of keys and the queries here that may see it."""

    place: int
    """Its place among the two chunks of its rank."""
    queries: list[QueryChunk]


class Saved(NamedTuple):
    """What backward needs: output and log-sum-exp are those over the keys of all ranks."""

    positions_BS: Tensor
    weight: Tensor | None
    q: Tensor
    out: Tensor
    lse_BHs: Tensor
    sources: tuple[Tensor, ...]


def seen_keys(chunks: Chunks, owner: int, c: int) -> Iterator[KeyChunk]:
    """Yield the chunks of keys of ``owner`` that queries here may see.

    The latest keys come first: a chunk of queries begins with itself, where each sees a key.
    """
    for place, keys in reversed(list(enumerate(chunks.of(owner)))):
        seen_by = [
            QueryChunk(query_place, slice(keys * c, (queries + 1) * c))
            for query_place, queries in enumerate(chunks.own)
            if keys <= queries
        ]
        if seen_by:
            yield KeyChunk(place, seen_by)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ring: Ring,
        weight: Tensor | None,
        positions_BS: Tensor,
        q: Tensor,
        *sources: Tensor,
    ) -> Tensor:
        queries = q.chunk(2, dim=1)
        merged: list[tuple[Tensor, Tensor] | None] = [None, None]
        for owner, block in visits(pack(sources), ring.group):
            for key_place, seen_by in seen_keys(ring.chunks, owner, queries[0].shape[1]):
                k, v = ring.keys_and_values(_chunk(block, key_place, sources), weight)
                for place, tokens in seen_by:
                    positions = positions_BS[:, tokens]
                    part = attention(queries[place], k, v, positions, ring.scale, 0)
                    merged[place] = merge(merged[place], part)
        outs, lses = zip(*(part for part in merged if part is not None), strict=True)
        out = torch.cat(outs, dim=1).to(q.dtype)
        ctx.save_for_backward(positions_BS, weight, q, out, torch.cat(lses, dim=2), *sources)
        ctx.ring = ring
        ctx.kept = None
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        weight_asked, others_asked = _asked(ctx)
        if ctx.kept is not None and ctx.kept[0] is dout and not others_asked:
            (_, dweight), ctx.kept = ctx.kept, None
            return None, dweight, *[None] * (len(ctx.needs_input_grad) - 2)
        # Unpacked once: a checkpoint gives its tensors no second time.
        positions_BS, weight, q, out, lse_BHs, *sources = ctx.saved_tensors
        saved = Saved(positions_BS, weight, q, out, lse_BHs, tuple(sources))
        here = _Backward(ctx.ring, saved, dout)
        shares = (here.share(*visit) for visit in visits(pack(sources), ctx.ring.group))
        home = unpack(carry_home(shares, ctx.ring.group), sources)
        dsources = (total.to(x.dtype) for total, x in zip(home, sources, strict=True))
        dweight = None if here.dweight is None else here.dweight.to(weight.dtype)
        # A backward in two parts asks for it later: it takes the journey to find it.
        ctx.kept = None if weight_asked else (dout, dweight)
        return None, dweight, None, here.dq.to(q.dtype), *dsources


def _asked(ctx: Any) -> tuple[bool, bool]:
    """Return whether the gradient of the weight is asked for, and whether that of others is."""
    asked = asked_gradients(ctx)
    if ctx.ring.expansion is None:
        return True, True
    return asked[0], any(asked[1:])


class _Backward:
    """A backward pass on this rank, which sums the gradients of queries and weight in float32."""

    def __init__(self, ring: Ring, saved: Saved, dout: Tensor) -> None:
        q, weight = saved.q, saved.weight
        self.ring = ring
        self.saved = saved
        self.dq = torch.zeros_like(q, dtype=torch.float32)
        self.dweight = None if weight is None else torch.zeros_like(weight, dtype=torch.float32)
        by_token = [x.chunk(2, dim=1) for x in (dout, q, saved.out, self.dq)]
        self.halves = list(zip(*by_token, saved.lse_BHs.chunk(2, dim=2), strict=True))

    def share(self, owner: int, block: Tensor) -> Tensor:
        """Return what queries here add to the gradients (B, s, C) of a block, in float32."""
        gradients = torch.zeros_like(block, dtype=torch.float32)
        for place, seen_by in seen_keys(self.ring.chunks, owner, block.shape[1] // 2):
            found = self._sources(_chunk(block, place, self.saved.sources), seen_by)
            gradients.chunk(2, dim=1)[place].copy_(pack(found))
        return gradients

    def _sources(self, chunk: list[Tensor], seen_by: list[QueryChunk]) -> list[Tensor]:
        """Return the gradients of the sources of a chunk."""
        if self.dweight is None or self.saved.weight is None:
            return self._keys_and_values(chunk, seen_by)
        leaves = [x.detach().requires_grad_() for x in (*chunk, self.saved.weight)]
        with torch.enable_grad():
            expanded = self.ring.keys_and_values(leaves[:-1], leaves[-1])
        found = self._keys_and_values(expanded, seen_by)
        narrow = [total.to(x.dtype) for total, x in zip(found, expanded, strict=True)]
        *dsources, dweight = torch.autograd.grad(expanded, leaves, narrow)
        self.dweight += dweight
        return dsources

    def _keys_and_values(self, chunk: Sequence[Tensor], seen_by: list[QueryChunk]) -> list[Tensor]:
        """Return the gradients of the keys and values of a chunk, in float32."""
        k, v = chunk
        dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in chunk)
        for place, tokens in seen_by:
            dout, q, out, dq, lse_BHc = self.halves[place]
            rest = (lse_BHc.contiguous(), self.saved.positions_BS[:, tokens], self.ring.scale, 0)
            found = attention_backward(dout, q, k, v, out, *rest)
            for total, part in zip((dq, dk, dv), found, strict=True):
                total += part
        return [dk, dv]


def _chunk(packed: Tensor, place: int, like: tuple[Tensor, ...]) -> list[Tensor]:
    """Return one of the two chunks of the sources in ``packed``."""
    return list(unpack(packed.chunk(2, dim=1)[place], like))


def merge(a: tuple[Tensor, Tensor] | None, b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return output (B, c, H, Dv) in float32 and log-sum-exp (B, H, c) over the keys of both.

    Every query of ``a`` saw a key; one of ``b`` may have seen none.
    """
    out_b, lse_b = b[0].float(), b[1]
    if a is None:
        return out_b, lse_b
    out_a, lse_a = a
    lse = torch.logaddexp(lse_a, lse_b)
    share_of_b = (lse_b - lse).exp().transpose(1, 2)[..., None]
    return torch.lerp(out_a, out_b, share_of_b), lse


def ring_attention(ring: Ring, q: Tensor, sources: tuple[Tensor, ...], positions: Tensor) -> Tensor:
    """Return the attention (B, s, H, Dv) of this rank's queries to the keys of all ranks.

    Args:
        ring: of ranks, with whose chunks the tensors here agree.
        q: (B, s, H, D) of this rank's tokens.
        sources: (B, s, ...) each of this rank's tokens; see ``AttentionCore.mix``.
        positions: (B, S) of the whole sequence.
    """
    # An input of its own, so that its gradient goes the way of every weight's.
    weight = None if ring.expansion is None else local(ring.expansion.up.weight)
    return _RingAttention.apply(ring, weight, positions, q, *sources)
