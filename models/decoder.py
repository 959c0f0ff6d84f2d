"""The usual decoder, from which most families are made: blocks on one stream, normed before use.

B batch, S sequence, D model width.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from models.batch import Context
from models.initialization import Normal, fan_in
from models.layers.head import OutputHead
from models.layers.linear import Embedding
from models.layers.norm import Norm, RMSNorm
from models.layers.rotary import RotaryScaling, rotary_context
from models.protocol import Model, ModelConfig


class DecoderConfig(ModelConfig, Protocol):
    """What the decoder itself needs to know; its blocks come made."""

    @property
    def norm_eps(self) -> float:
        """Epsilon of the final norm."""
        ...

    @property
    def loss_chunk_tokens(self) -> int:
        """Tokens whose logits exist at once."""
        ...


class Rotary(NamedTuple):
    """Which rotation the blocks share: dimensions rotated per head, base, stretching."""

    dim: int
    theta: float
    scaling: RotaryScaling | None = None


def residual_scale(num_layers: int) -> float:
    """The scale of what a layer adds to the stream twice, so that depth does not add variance."""
    return 1 / math.sqrt(2 * num_layers)


class Block(nn.Module):
    """x + attention(norm x), then x + feed_forward(norm x)."""

    def __init__(
        self,
        dim: int,
        norm_eps: float,
        *,
        attention: nn.Module,
        feed_forward: nn.Module,
        norm: type[Norm] = RMSNorm,
    ) -> None:
        super().__init__()
        self.attention_norm = norm(dim, norm_eps)
        self.attention = attention
        self.feed_forward_norm = norm(dim, norm_eps)
        self.feed_forward = feed_forward

    def forward(self, x_BSD: Tensor, context: Context) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), context)
        return x_BSD + self.feed_forward(self.feed_forward_norm(x_BSD))


class Decoder(Model):
    """Embedding, blocks, MTP modules, final norm and head; see models.protocol.

    `norm` is the kind of the final norm. `tied`: the head's weight is the embedding's, one
    parameter.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layers: Iterable[nn.Module],
        *,
        rotary: Rotary,
        mtp: Iterable[nn.Module] = (),
        norm: type[Norm] = RMSNorm,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.rotary = rotary
        vocab_size, dim = config.vocab_size, config.dim
        # Tied rows serve the head, whose logits start with unit variance; norms take up the rest.
        self.embedding = Embedding(vocab_size, dim, init=fan_in(dim) if tied else Normal(1.0))
        self.layers = nn.ModuleList(layers)
        self.norm = norm(dim, config.norm_eps)
        self.mtp = nn.ModuleList(mtp)
        self.head = OutputHead(
            dim, vocab_size, init=fan_in(dim), chunk_tokens=config.loss_chunk_tokens
        )
        if tied:
            self.tie_embedding()

    def embed(self, tokens_BS: Tensor) -> Tensor:
        """The stream that enters the first layer."""
        assert self.embedding is not None
        return self.embedding(tokens_BS)

    def last_hidden(self, x_BSD: Tensor) -> Tensor:
        """The final norm."""
        assert self.norm is not None
        return self.norm(x_BSD)

    def context(self, positions_BS: Tensor) -> Context:
        """What the blocks of one forward pass share."""
        return rotary_context(positions_BS, *self.rotary)
