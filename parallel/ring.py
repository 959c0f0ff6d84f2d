"""Ring attention (arXiv:2310.01889): keys and values travel from rank to rank, a block at a time.

While a rank attends to the block that is here, the next one arrives. Outputs of blocks are merged
by their log-sum-exp. Backward goes around the ring once more: with output and log-sum-exp of all
keys, each block's gradients are found alone; those of keys and values travel with their block,
summed in float32, and come home after the last rank that sees it.

N ranks, B batch, c tokens of a chunk (see parallel.chunks), s = 2c tokens of a rank, H heads,
C channels of keys and values together.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from models.ops.attention import attention, attention_backward
from parallel.chunks import Chunks
from parallel.packing import pack, unpack


class Transfer(NamedTuple):
    """A tensor on its way to the next rank, and the one of the rank before on its way here."""

    leaving: Tensor
    arriving: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        """Return what has arrived."""
        for work in self.works:
            work.wait()
        return self.arriving


class Saved(NamedTuple):
    """What backward needs: output and log-sum-exp are those over the keys of all ranks."""

    q: Tensor
    k: Tensor
    v: Tensor
    positions_BS: Tensor
    out: Tensor
    lse_BHs: Tensor


class Pair(NamedTuple):
    """A chunk of queries and a chunk of keys before or beside it, by their places on two ranks."""

    query: int
    key: int
    tokens: slice
    """The tokens of the sequence from the first key to the last query."""


def send_on(x: Tensor, group: dist.ProcessGroup) -> Transfer:
    """Start sending ``x`` to the next rank and receiving its like from the one before."""
    N, rank = group.size(), group.rank()
    arriving = torch.empty_like(x)
    operations = [
        dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % N),
        dist.P2POp(dist.irecv, arriving, group=group, group_peer=(rank - 1) % N),
    ]
    return Transfer(x, arriving, dist.batch_isend_irecv(operations))


def visits(own: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank's ``own`` with that rank: this one's first, then those before it.

    The next one travels while the caller works.
    """
    N, rank = group.size(), group.rank()
    here = own
    for step in range(N):
        transfer = send_on(here, group) if step < N - 1 else None
        yield (rank - step) % N, here
        if transfer is not None:
            here = transfer.wait()


def pairs(chunks: Chunks, owner: int, c: int) -> list[Pair]:
    """Return the chunks of queries here and those of keys of ``owner`` that they may see.

    The latest keys come first: a chunk of queries begins with itself, where each sees a key.
    """
    return [
        Pair(place, key_place, slice(keys * c, (queries + 1) * c))
        for place, queries in enumerate(chunks.own)
        for key_place, keys in reversed(list(enumerate(chunks.of(owner))))
        if keys <= queries
    ]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions_BS: Tensor,
        scale: float,
        chunks: Chunks,
        group: dist.ProcessGroup,
    ) -> Tensor:
        queries = q.chunk(2, dim=1)
        merged: list[tuple[Tensor, Tensor] | None] = [None, None]
        for owner, block in visits(pack((k, v)), group):
            keys, values = _chunks(block, k, v)
            for place, key, tokens in pairs(chunks, owner, queries[0].shape[1]):
                positions = positions_BS[:, tokens]
                part = attention(queries[place], keys[key], values[key], positions, scale, 0)
                merged[place] = merge(merged[place], part)
        outs, lses = zip(*(part for part in merged if part is not None), strict=True)
        out = torch.cat(outs, dim=1).to(q.dtype)
        ctx.save_for_backward(q, k, v, positions_BS, out, torch.cat(lses, dim=2))
        ctx.scale, ctx.chunks, ctx.group = scale, chunks, group
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        # Unpacked once: a checkpoint gives its tensors no second time.
        saved = Saved(*ctx.saved_tensors)
        q, k, v, *_ = saved
        dq = torch.zeros_like(q, dtype=torch.float32)
        home, transfer = None, None
        for owner, block in visits(pack((k, v)), ctx.group):
            where = pairs(ctx.chunks, owner, q.shape[1] // 2)
            gradients = _block_backward(saved, block, where, ctx.scale, dq, dout)
            if home is None:
                home = gradients
                continue
            if transfer is not None:
                gradients += transfer.wait()
            transfer = send_on(gradients, ctx.group)
        assert home is not None
        if transfer is not None:
            home += transfer.wait()
        dk, dv = unpack(home, (k, v))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def _block_backward(
    saved: Saved, block: Tensor, where: list[Pair], scale: float, dq: Tensor, dout: Tensor
) -> Tensor:
    """Add to ``dq`` and return the gradients (B, s, C) of a block's keys and values, float32."""
    q, k, v, positions_BS, out, lse = saved
    keys, values = _chunks(block, k, v)
    gradients = torch.zeros_like(block, dtype=torch.float32)
    dkeys, dvalues = _chunks(gradients, k, v)
    by_token = [x.chunk(2, dim=1) for x in (dout, q, out, dq)]
    halves = list(zip(*by_token, lse.chunk(2, dim=2), strict=True))
    for place, key, tokens in where:
        do, queries, outputs, dqueries, lse_BHc = halves[place]
        rest = (lse_BHc.contiguous(), positions_BS[:, tokens], scale, 0)
        found = attention_backward(do, queries, keys[key], values[key], outputs, *rest)
        for total, part in zip((dqueries, dkeys[key], dvalues[key]), found, strict=True):
            total += part
    return gradients


def _chunks(packed: Tensor, k: Tensor, v: Tensor) -> list[tuple[Tensor, ...]]:
    """Return the two chunks of the keys in ``packed``, and those of the values."""
    return [x.chunk(2, dim=1) for x in unpack(packed, (k, v))]


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


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions_BS: Tensor,
    scale: float,
    chunks: Chunks,
    group: dist.ProcessGroup,
) -> Tensor:
    """Return the attention (B, s, H, Dv) of this rank's queries to the keys of all ranks.

    Args:
        q, k, v: (B, s, H or Hkv, D) of this rank's tokens.
        positions_BS: those of the whole sequence.
    """
    return _RingAttention.apply(q, k, v, positions_BS, scale, chunks, group)
