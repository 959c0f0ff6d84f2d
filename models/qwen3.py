"""Qwen3 (arXiv:2505.09388): normed queries and keys; dense, or experts in every layer."""

from msgspec.structs import replace

from models.counts import FlopsLedger, ParameterCounts, flops_ledger
from models.decoder import Block, Decoder, Rotary, residual_scale
from models.layers.gqa import gqa_layers
from models.layers.norm import RMSNorm
from models.layers.qwen import QwenConfig, qwen_attention, qwen_feed_forward


class Qwen3Config(QwenConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of a Qwen3 network. ValueError where they do not fit together."""

    vocab_size: int = 151936
    head_dim: int = 128
    rope_theta: float = 1_000_000.0

    @property
    def num_mtp_layers(self) -> int:
        """There are no MTP modules."""
        return 0

    def build(self, routing: str = "learned") -> Decoder:
        """The network on the default device, without values."""
        return Decoder(
            self,
            (qwen3_block(self, routing) for _ in range(self.num_layers)),
            rotary=Rotary(self.head_dim, self.rope_theta),
            tied=self.tied,
        )

    def counts(self) -> ParameterCounts:
        """Exact parameter counts."""
        attention = self.attention_parameters(gated=False)
        rest, active_rest = self.feed_forward_parameters(shared=False)
        return ParameterCounts(
            embedding=self.vocab_size * self.dim,
            layers=self.num_layers * (attention + rest),
            active_layers=self.num_layers * (attention + active_rest),
            final_norm=self.dim,
            head=self.vocab_size * self.dim,
            tied=self.tied,
        )

    def flops_per_token(self, sequence_length: int) -> FlopsLedger:
        """FLOPs of forward and backward for one token, term by term."""
        return flops_ledger(
            self.counts(),
            sequence_length=sequence_length,
            attention=gqa_layers(self.num_heads, self.head_dim, num_full=self.num_layers),
        )


def qwen3_block(config: Qwen3Config, routing: str) -> Block:
    """A layer of the network."""
    scale = residual_scale(config.num_layers)
    return Block(
        config.dim,
        config.norm_eps,
        attention=qwen_attention(config, RMSNorm, gated=False, output_scale=scale),
        feed_forward=qwen_feed_forward(config, routing, output_scale=scale),
    )


QWEN3_1_7B = Qwen3Config(
    dim=2048, num_layers=28, num_heads=16, num_kv_heads=8, hidden_dim=6144, tied=True
)

QWEN3_4B = Qwen3Config(
    dim=2560, num_layers=36, num_heads=32, num_kv_heads=8, hidden_dim=9728, tied=True
)

QWEN3_8B = Qwen3Config(dim=4096, num_layers=36, num_heads=32, num_kv_heads=8, hidden_dim=12288)

QWEN3_32B = Qwen3Config(dim=5120, num_layers=64, num_heads=64, num_kv_heads=8, hidden_dim=25600)

QWEN3_30B_A3B = Qwen3Config(
    dim=2048,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    hidden_dim=768,
    num_experts=128,
    num_experts_per_token=8,
)

QWEN3_235B_A22B = replace(QWEN3_30B_A3B, dim=4096, num_layers=94, num_heads=64, hidden_dim=1536)

QWEN3_PROXY = Qwen3Config(
    vocab_size=512,
    dim=128,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    hidden_dim=64,
    num_experts=16,
    num_experts_per_token=4,
    loss_chunk_tokens=256,
)
"""Every feature of the mixtures of experts, for two CPU ranks."""

QWEN3_DENSE_PROXY = replace(
    QWEN3_PROXY, hidden_dim=384, num_experts=0, num_experts_per_token=0, tied=True
)
"""Every feature of the small dense sizes, for two CPU ranks."""
