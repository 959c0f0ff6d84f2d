"""Attention by the flash kernels of CUDA, over packed documents of different lengths.

The documents of all rows become one stream with cumulative lengths, which is what the kernel's
variable-length form takes; values narrower than the keys (MLA) are padded and cut again.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def forward(
    q: Tensor, k: Tensor, v: Tensor, positions_BS: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """(out (B,S,H,Dv), log-sum-exp (B,H,S) float32) for q (B,S,H,D), k (B,Sk,Hkv,D), v."""
    B, S, H, D = q.shape
    lengths = _lengths(q, k, positions_BS)
    causal = k.shape[1] == positions_BS.shape[1]
    stream = [_stream(x, D) for x in (q, k, v)]
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *stream, *lengths, 0.0, causal, False, scale=scale, **_window(window)
    )
    if not causal:
        # The kernel's sign for a query without keys.
        lse = lse.masked_fill(lse == float("inf"), float("-inf"))
    lse_BHS = lse.view(H, B, S).transpose(0, 1).contiguous()
    return out.view(B, S, H, D)[..., : v.shape[-1]].contiguous(), lse_BHS


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    positions_BS: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv), contiguous, of the shapes of q, k and v."""
    B, S, H, D = q.shape
    stream = [_stream(x, D) for x in (dout, q, k, v, out)]
    # Without dropout the kernel reads no random state: it only wants the tensors to exist.
    rng_state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty((), dtype=torch.uint64, device=q.device)
    gradients = torch.ops.aten._flash_attention_backward(
        *stream,
        lse.transpose(0, 1).reshape(H, B * S),
        *_lengths(q, k, positions_BS),
        0.0,
        k.shape[1] == positions_BS.shape[1],
        rng_state,
        unused,
        scale=scale,
        **_window(window),
    )
    dq, dk, dv = (
        gradient.view(*x.shape[:3], D)[..., : x.shape[-1]].contiguous()
        for gradient, x in zip(gradients, (q, k, v), strict=True)
    )
    return dq, dk, dv


def _stream(x_BSHD: Tensor, width: int) -> Tensor:
    """(B,S,H,D) to (B*S,H,width), padded with zeros."""
    x = x_BSHD.flatten(0, 1)
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


def _window(window: int) -> dict[str, int]:
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


def _lengths(q: Tensor, k: Tensor, positions_BS: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """What the kernel takes: ends of queries and of keys, the most queries and the most keys.

    Within a document it lets the last query see the last key, as queries at the end of it need.
    """
    if q.shape[1] == positions_BS.shape[1]:
        ends, longest = cumulative_lengths(positions_BS)
        return ends, ends, longest, longest
    query_ends, most_queries = cumulative_lengths(positions_BS, slice(-q.shape[1], None))
    key_ends, most_keys = cumulative_lengths(positions_BS, slice(k.shape[1]))
    return query_ends, key_ends, most_queries, most_keys


def cumulative_lengths(positions_BS: Tensor, counted: slice = slice(None)) -> tuple[Tensor, int]:
    """(int32 offsets of the documents in the stream, length of the longest).

    The stream has the `counted` tokens of every row.
    """
    starts_BS = positions_BS == 0
    starts_BS[:, 0] = True
    starts = torch.nonzero(starts_BS.flatten()).flatten()
    ends = torch.cat([starts, starts.new_tensor([positions_BS.numel()])])
    if counted != slice(None):
        counted_BS = torch.zeros_like(positions_BS)
        counted_BS[:, counted] = 1
        ends = F.pad(counted_BS.flatten().cumsum(0), (1, 0))[ends]
    return ends.int(), int(ends.diff().max())
