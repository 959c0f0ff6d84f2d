"""Llama 3.1 (arXiv:2407.21783): dense, grouped queries, rotation stretched to 131,072 tokens."""

import msgspec

from models.counts import FlopsLedger, ParameterCounts, flops_ledger
from models.decoder import Block, Decoder, Rotary, residual_scale
from models.layers.feed_forward import FeedForward
from models.layers.gqa import GroupedQueryAttention, check_heads, gqa_layers, gqa_parameters
from models.layers.rotary import Llama3Scaling


class Llama31Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of a Llama 3.1 network. ValueError where they do not fit together."""

    vocab_size: int = 128256
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int = 8
    head_dim: int = 128
    hidden_dim: int
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    rope_factor: float = 8.0
    rope_original_context: int = 8192
    loss_chunk_tokens: int = 512

    def __post_init__(self) -> None:
        check_heads(self.num_heads, self.num_kv_heads, self.head_dim)

    @property
    def num_mtp_layers(self) -> int:
        """There are no MTP modules."""
        return 0

    def build(self, routing: str = "learned") -> Decoder:
        """The network on the default device, without values; there is nothing to route."""
        scaling = Llama3Scaling(
            factor=self.rope_factor, original_context=self.rope_original_context
        )
        return Decoder(
            self,
            (_block(self) for _ in range(self.num_layers)),
            rotary=Rotary(self.head_dim, self.rope_theta, scaling),
        )

    def counts(self) -> ParameterCounts:
        """Exact parameter counts."""
        attention = gqa_parameters(
            self.dim, self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim
        )
        layers = self.num_layers * (attention + 3 * self.dim * self.hidden_dim + 2 * self.dim)
        return ParameterCounts(
            embedding=self.vocab_size * self.dim,
            layers=layers,
            active_layers=layers,
            final_norm=self.dim,
            head=self.vocab_size * self.dim,
        )

    def flops_per_token(self, sequence_length: int) -> FlopsLedger:
        """FLOPs of forward and backward for one token, term by term."""
        return flops_ledger(
            self.counts(),
            sequence_length=sequence_length,
            attention=gqa_layers(self.num_heads, self.head_dim, num_full=self.num_layers),
        )


def _block(config: Llama31Config) -> Block:
    output_scale = residual_scale(config.num_layers)
    return Block(
        config.dim,
        config.norm_eps,
        attention=GroupedQueryAttention(
            config.dim,
            config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            output_scale=output_scale,
        ),
        feed_forward=FeedForward(config.dim, config.hidden_dim, output_scale=output_scale),
    )


LLAMA3_1_8B = Llama31Config(dim=4096, num_layers=32, num_heads=32, hidden_dim=14336)

LLAMA3_1_70B = Llama31Config(dim=8192, num_layers=80, num_heads=64, hidden_dim=28672)

LLAMA3_1_405B = Llama31Config(dim=16384, num_layers=126, num_heads=128, hidden_dim=53248)

LLAMA3_1_PROXY = Llama31Config(
    vocab_size=512,
    dim=128,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    hidden_dim=384,
    rope_original_context=256,
    loss_chunk_tokens=256,
)
"""Every feature of the full sizes, for two CPU ranks."""
