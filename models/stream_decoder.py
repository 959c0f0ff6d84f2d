"""The decoder over several residual streams, as in DeepSeek V4.

B batch, S sequence, D model width, N streams; M = N D is the width of the streams side by side.
"""

from collections.abc import Iterable

from torch import Tensor

from models.decoder import Decoder, DecoderConfig, Rotary
from models.layers.hyper_connections import CollapsingNorm, StreamConfig
from models.layers.stream_block import StreamBlock, StreamMTPBlock


class StreamDecoder(Decoder):
    """A decoder of `StreamBlock`s, whose final norm makes one of the streams."""

    def __init__(
        self,
        config: DecoderConfig,
        layers: Iterable[StreamBlock],
        *,
        streams: StreamConfig,
        rotary: Rotary,
        mtp: Iterable[StreamMTPBlock],
    ) -> None:
        super().__init__(config, layers, rotary=rotary, mtp=mtp)
        self.streams = streams
        self.norm = CollapsingNorm(streams)

    @property
    def stream_width(self) -> int:
        """All streams side by side."""
        return self.streams.num_streams * self.streams.dim

    def embed(self, tokens_BS: Tensor) -> Tensor:
        """The streams that enter the first layer (B,S,M): copies of the embedding."""
        return super().embed(tokens_BS).repeat(1, 1, self.streams.num_streams)
