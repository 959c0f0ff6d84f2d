"""Compressed sparse attention by Attention Gym: its gather_attn and lightning_indexer.

Written and tested against Attention Gym 0.0.17 on a CPU, with its reference implementation behind
the same two functions; the fused kernels, which need CUDA, have not run here. Both number entries
within a document where our operators number them within a row, and take one row at a time.

`titanbench::gathered_attention` is what models.ops.joint_attention computes from two kernels, by
one: a window, chosen entries and sinks. Its backward runs the kernel again, recorded.

B batch, S sequence, H heads, D width, E entries of a row, K chosen per query.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from models.ops.attention_flash import cumulative_lengths
from models.ops.recorded import leaves, recorded


class _Row(NamedTuple):
    """The documents of a row of the batch: ends of their tokens and of their entries, int32."""

    row: slice
    token_ends: Tensor
    entry_ends: Tensor


def choose_entries(
    q: Tensor,
    keys: Tensor,
    weights: Tensor,
    positions: Tensor,
    first: Tensor,
    block: int,
    num_chosen: int,
    *,
    impl: str = "fused",
) -> Tensor:
    """As `models.ops.choose_entries.choose_entries`; `impl` is Attention Gym's, or "reference"."""
    import attn_gym.sparse

    found = [
        attn_gym.sparse.lightning_indexer(
            *(x[row].contiguous() for x in (q, keys, weights.to(q.dtype))),
            min(num_chosen, keys.shape[1]),
            causal=True,
            compress_ratio=block,
            cu_seqlens=token_ends,
            cu_seqlens_k=entry_ends,
            impl=impl,
        )
        for row, token_ends, entry_ends in _rows(positions, block)
    ]
    chosen = torch.cat(found)
    return torch.where(chosen < 0, -1, chosen + first[..., None].int())


@torch.library.custom_op("titanbench::gathered_attention", mutates_args=())
def gathered_attention(
    q: Tensor,
    kv: Tensor,
    entries: Tensor,
    sinks: Tensor,
    positions: Tensor,
    first: Tensor,
    chosen: Tensor,
    block: int,
    scale: float,
    window: int,
    impl: str,
) -> Tensor:
    """(B,S,H,D) of q (B,S,H,D), kv (B,S,D), entries (B,E,D), sinks (H,), chosen (B,S,K) int32."""
    rest = (positions, first, chosen, block, scale, window, impl)
    return _attend(q, kv, entries, sinks, rest=rest)


@gathered_attention.register_fake
def _(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape)


@torch.library.custom_op("titanbench::gathered_attention_backward", mutates_args=())
def gathered_attention_backward(
    dout: Tensor,
    q: Tensor,
    kv: Tensor,
    entries: Tensor,
    sinks: Tensor,
    positions: Tensor,
    first: Tensor,
    chosen: Tensor,
    block: int,
    scale: float,
    window: int,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, kv, entries and sinks."""
    with recorded():
        inputs = leaves(q, kv, entries, sinks)
        out = _attend(*inputs, rest=(positions, first, chosen, block, scale, window, impl))
        dq, dkv, dentries, dsinks = torch.autograd.grad(out, inputs, dout)
    return dq.contiguous(), dkv.contiguous(), dentries.contiguous(), dsinks


@gathered_attention_backward.register_fake
def _(dout: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs[:4])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.block, ctx.scale, ctx.window, ctx.impl = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    rest = (ctx.block, ctx.scale, ctx.window, ctx.impl)
    gradients = gathered_attention_backward(dout.contiguous(), *ctx.saved_tensors, *rest)
    return *gradients, *(None,) * 7


gathered_attention.register_autograd(_backward, setup_context=_setup_context)


def _attend(
    q: Tensor, kv: Tensor, entries: Tensor, sinks: Tensor, *, rest: tuple[Any, ...]
) -> Tensor:
    import attn_gym.sparse

    positions, first, chosen, block, scale, window, impl = rest
    in_document = torch.where(chosen < 0, -1, chosen - first[..., None].int())
    outputs = [
        attn_gym.sparse.gather_attn(
            q[row].transpose(1, 2).contiguous(),
            kv[row, None],
            entries[row, None],
            in_document[row],
            sinks.float(),
            sliding_window_size=window,
            cu_seqlens=token_ends,
            cu_seqlens_k=entry_ends,
            scale=scale,
            impl=impl,
        )
        for row, token_ends, entry_ends in _rows(positions, block)
    ]
    return torch.cat(outputs).transpose(1, 2).contiguous()


def _rows(positions_BS: Tensor, block: int) -> Iterator[_Row]:
    """Each row's documents: a part of a block that its document's end cuts off is no entry."""
    for row in range(len(positions_BS)):
        token_ends, _ = cumulative_lengths(positions_BS[row : row + 1])
        entry_ends = (token_ends.diff() // block).cumsum(0, dtype=torch.int32)
        yield _Row(slice(row, row + 1), token_ends, torch.nn.functional.pad(entry_ends, (1, 0)))


def _num_products(q_shape: torch.Size, chosen_shape: torch.Size, window: int) -> int:
    return q_shape.numel() * (min(q_shape[1], window) + chosen_shape[2])


@register_flop_formula(torch.ops.titanbench.gathered_attention)
def gathered_attention_flops(q_shape: torch.Size, *shapes: Any, **_: Any) -> int:
    """Two products with the window's keys and the chosen entries."""
    return 4 * _num_products(q_shape, shapes[5], shapes[8])


@register_flop_formula(torch.ops.titanbench.gathered_attention_backward)
def gathered_attention_backward_flops(
    dout_shape: torch.Size, q_shape: torch.Size, *shapes: Any, **_: Any
) -> int:
    """The forward again and five products, of which three belong to no model FLOPs."""
    return 14 * _num_products(q_shape, shapes[5], shapes[8])
