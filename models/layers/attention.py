"""The attention core: the one replaceable submodule between the projections of a layer."""

from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from models.batch import Context
from models.layers.linear import local
from models.ops.attention import attention, attention_kernel
from models.ops.attention_sinks import attention_with_sinks


@runtime_checkable
class Attending(Protocol):
    """A module whose work grows with the keys that its queries see."""

    width: int
    """Products of a token with one key."""

    def num_keys(self, sequence_length: int) -> int:
        """Keys of a query as causality leaves them; see models.counts."""
        ...


class AttentionCore(nn.Module):
    """Softmax attention of a layer: q (B,S,H,D), k (B,S,Hkv,D), v (B,S,Hkv,Dv) to (B,S,H,Dv).

    Context parallelism, a key/value cache for decoding and other kernels replace this module; the
    layer around it does not change. A layer calls `exchange` on what its keys and values are made
    of, makes them, and calls `forward`. `sinks` (H,) are logits that take part in the softmax.
    """

    def __init__(
        self, *, scale: float, window: int = 0, width: int, sinks: nn.Parameter | None = None
    ) -> None:
        super().__init__()
        self.scale = scale
        self.window = window
        self.width = width
        """Heads times (query width + value width): products of a token with one key."""
        self.kernel = ""
        """The kernel that served the last forward, for the record."""
        self.sinks = sinks

    def num_keys(self, sequence_length: int) -> int:
        """Half of the sequence, or the window if that is less."""
        return min(sequence_length // 2, self.window or sequence_length)

    def exchange(self, *sources: Tensor) -> tuple[Tensor, ...]:
        """What keys and values are made of, (B,S,...) each, for every key that queries here see.

        The narrowest stage at which positions are known: rotated keys and values themselves, or
        the latent that they come from. Here queries see no keys but their own.
        """
        return sources

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        return self.attend(q, k, v, context.positions_BS)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, positions_BS: Tensor) -> Tensor:
        """Attention of queries that are the last of the keys, whose positions these are."""
        self.kernel = attention_kernel(q.device.type, q.dtype, q.shape[-1])
        if self.sinks is not None:
            sinks_H = local(self.sinks)
            return attention_with_sinks(q, k, v, sinks_H, positions_BS, self.scale, self.window)
        out, _ = attention(q, k, v, positions_BS, self.scale, self.window)
        return out
