"""Blocks over several residual streams (DeepSeek V4), and the MTP module made of one.

B batch, S sequence, D model width, N streams; M = N D is the width of the streams side by side.
"""

from torch import Tensor, nn

from models.batch import Context
from models.layers.compressed_attention import Compressed, CompressedAttention
from models.layers.hyper_connections import (
    CollapsingNorm,
    HyperConnection,
    StreamConfig,
    write_back,
)
from models.layers.linear import Linear
from models.layers.moe import MoE
from models.layers.norm import RMSNorm


class StreamBlock(nn.Module):
    """Attention and experts, each reading from and writing back to the streams.

    `context.family` has what layers share by the tokens of their entries.
    """

    def __init__(
        self, streams: StreamConfig, *, attention: CompressedAttention, feed_forward: MoE
    ) -> None:
        super().__init__()
        self.attention_streams = HyperConnection(streams)
        self.attention_norm = RMSNorm(streams.dim, streams.norm_eps)
        self.attention = attention
        self.feed_forward_streams = HyperConnection(streams)
        self.feed_forward_norm = RMSNorm(streams.dim, streams.norm_eps)
        self.feed_forward = feed_forward

    def forward(self, x_BSM: Tensor, context: Context) -> Tensor:
        u_BSD, mixing = self.attention_streams(x_BSM)
        shared: Compressed = context.family[self.attention.block]
        y_BSD = self.attention(self.attention_norm(u_BSD), shared)
        x_BSM = write_back(x_BSM, y_BSD, mixing)
        u_BSD, mixing = self.feed_forward_streams(x_BSM)
        y_BSD = self.feed_forward(self.feed_forward_norm(u_BSD), context.tokens_BS)
        return write_back(x_BSM, y_BSD, mixing)


class StreamMTPBlock(nn.Module):
    """One depth: each stream plus a later token's embedding, one block, a final norm of its own."""

    def __init__(self, streams: StreamConfig, block: StreamBlock) -> None:
        super().__init__()
        dim = self.dim = streams.dim
        self.embedding_norm = RMSNorm(dim, streams.norm_eps)
        self.hidden_norm = RMSNorm(dim, streams.norm_eps)
        self.embedding_proj = Linear(dim, dim)
        self.hidden_proj = Linear(dim, dim)
        self.block = block
        self.norm = CollapsingNorm(streams)

    def forward(
        self, x_BSM: Tensor, embedding_BSM: Tensor, context: Context
    ) -> tuple[Tensor, Tensor]:
        """(streams for the next depth, hidden state (B,S,D) for the output head)."""
        # The streams that come out of the embedding are copies of it.
        embedding_BSD = embedding_BSM[..., : self.dim]
        embedding_BSD = self.embedding_proj(self.embedding_norm(embedding_BSD))
        x_BSND = self.hidden_proj(self.hidden_norm(x_BSM.unflatten(-1, (-1, self.dim))))
        x_BSM = self.block((x_BSND + embedding_BSD[:, :, None]).flatten(2), context)
        return x_BSM, self.norm(x_BSM)
