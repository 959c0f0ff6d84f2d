"""The numbers of compressed attention (DeepSeek V4): parameters, and what its FLOPs come from."""

import msgspec

from models.counts import EntryAttentionLayers
from models.layers.compression import compressor_parameters


class IndexerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The indexer of a layer."""

    num_heads: int
    head_dim: int
    num_chosen: int
    """Entries that a query attends to."""


class CompressedAttentionConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """The numbers of one layer; `block` 0 for a window alone, `indexer` None for all entries."""

    dim: int
    num_heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    num_output_groups: int
    o_lora_rank: int
    window: int
    block: int = 0
    """Tokens of a compressed entry."""
    indexer: IndexerConfig | None = None
    norm_eps: float

    def __post_init__(self) -> None:
        if self.num_heads % self.num_output_groups:
            raise ValueError(
                f"{self.num_heads} heads do not divide into {self.num_output_groups} output groups"
            )
        if self.rope_dim % 2 or self.rope_dim > self.head_dim:
            raise ValueError(f"{self.rope_dim} of {self.head_dim} dimensions to rotate in pairs")
        if self.window < 1:
            raise ValueError(f"window {self.window} must be at least 1")

    @property
    def group_width(self) -> int:
        """Outputs of the heads of a group."""
        return self.num_heads * self.head_dim // self.num_output_groups

    @property
    def num_parameters(self) -> int:
        """Parameters of the layer, the indexer's included."""
        width, latents = self.num_heads * self.head_dim, self.num_output_groups * self.o_lora_rank
        rank, indexer = self.q_lora_rank, self.indexer
        total = self.dim * rank + rank + rank * width + self.dim * self.head_dim + self.head_dim
        total += latents * self.group_width + latents * self.dim + self.num_heads
        overlapping = indexer is not None
        if self.block:
            total += compressor_parameters(
                self.dim, self.head_dim, block=self.block, overlapping=overlapping
            )
        if indexer is not None:
            total += rank * indexer.num_heads * indexer.head_dim + self.dim * indexer.num_heads
            total += compressor_parameters(
                self.dim, indexer.head_dim, block=self.block, overlapping=True
            )
        return total

    def entry_layers(self, num_layers: int) -> dict[str, EntryAttentionLayers]:
        """What the FLOPs of `num_layers` such layers come from, apart from the window's, by term.

        An indexer has products of queries alone, with all entries.
        """
        if not (self.block and num_layers):
            return {}
        entries = EntryAttentionLayers(
            num_layers=num_layers,
            num_heads=self.num_heads,
            width=2 * self.head_dim,
            block=self.block,
            num_chosen=0 if self.indexer is None else self.indexer.num_chosen,
        )
        if self.indexer is None:
            return {"attention_heavily_compressed": entries}
        indexer = EntryAttentionLayers(
            num_layers=num_layers,
            num_heads=self.indexer.num_heads,
            width=self.indexer.head_dim,
            block=self.block,
        )
        return {"attention_compressed_sparse": entries, "indexer": indexer}
