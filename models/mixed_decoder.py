"""The decoder whose layers read mixtures of earlier states of the stream, as in Kimi K3.

B batch, S sequence, D model width.
"""

from collections.abc import Iterable

from torch import Tensor

from models.decoder import Decoder, DecoderConfig, Rotary
from models.layers.attention_residual import MixedBlock, ResidualNorm
from models.protocol import State


class MixedDecoder(Decoder):
    """A decoder of `MixedBlock`s; see models.protocol.

    The state between layers is the stream and its states at the beginnings of blocks before; the
    stream starts anew after every `residual_block` layers' first. Nothing is rotated.
    """

    def __init__(
        self, config: DecoderConfig, layers: Iterable[MixedBlock], *, residual_block: int
    ) -> None:
        super().__init__(config, layers, rotary=Rotary(0, 1.0), norm=ResidualNorm)
        self.residual_block = residual_block

    def last_hidden(self, x_BSD: Tensor, *blocks: Tensor) -> Tensor:
        """The final norm of the mixture of all states."""
        assert isinstance(self.norm, ResidualNorm)
        return self.norm(*blocks, x_BSD)

    def num_streams(self, layer: int) -> int:
        """The stream, and its state at the beginning of each block before the layer."""
        return 1 - (-layer // self.residual_block)

    def advance(self, state: State, tokens_BS: Tensor, positions_BS: Tensor) -> State:
        """The state after the parts that are here, from the state before them; all but the head."""
        context = self.context(positions_BS)
        x, *blocks = state or (self.embed(tokens_BS),)
        for layer in self.layers:
            if isinstance(layer, MixedBlock):
                before, x = x, layer(x, context, *blocks)
                blocks = [*blocks, before] if layer.starts_block else blocks
        return (x, *blocks) if self.norm is None else (self.last_hidden(x, *blocks),)
