"""The attention core: the one replaceable submodule between the projections of a layer."""

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from models.batch import Context
from models.layers.linear import Linear, local
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


class Expansion(NamedTuple):
    """Makes keys (B,S,Hkv,D) and values (B,S,Hkv,Dv) of narrower sources, token by token."""

    up: Linear
    """Widens the first source, a latent."""
    split: Callable[..., tuple[Tensor, Tensor]]
    """Takes what `up` made and the other sources."""

    def __call__(self, latent: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        return self.split(self.up(latent), *rest)


class AttentionCore(nn.Module):
    """Softmax attention of a layer: q (B,S,H,D), k (B,S,Hkv,D), v (B,S,Hkv,Dv) to (B,S,H,Dv).

    Context parallelism, a key/value cache for decoding and other kernels replace this module; the
    layer around it does not change. A layer calls `mix` with what its keys and values are made of.
    `sinks` (H,) are logits that take part in the softmax.
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

    def mix(
        self,
        q: Tensor,
        sources: tuple[Tensor, ...],
        context: Context,
        expansion: Expansion | None = None,
    ) -> Tensor:
        """Attention to the keys and values that are `sources`, or that `expansion` makes of them.

        Sources, (B,S,...) each, are the narrowest stage at which positions are known, so that they
        can travel: rotated keys and values themselves, or the latent that they come from.
        """
        sources = self.exchange(*sources)
        k, v = sources if expansion is None else expansion(*sources)
        return self(q, k, v, context)

    def exchange(self, *sources: Tensor) -> tuple[Tensor, ...]:
        """The sources of every key that queries here see: no keys but their own."""
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
