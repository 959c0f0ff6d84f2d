"""Attention of DeepSeek V4: one shared key that is its own value, a window, compressed entries.

Three kinds: a window alone; with every entry of 128 tokens (heavily compressed); or with those of 4
tokens that an indexer chooses (compressed sparse). Queries come from a latent, the trailing
dimensions of heads are rotated, and as values are rotated too, outputs are rotated back. Outputs go
through low-rank projections in groups of heads.

Nothing trains the indexer here: its choice has no gradient, and the objective that the released
networks trained it with is not public. (DeepSeek V3.2, arXiv:2512.02556, trains its indexer by the
KL divergence to the attention that the heads together pay, over single tokens; whether V4 does so
over entries is not said.) Its parameters stay as they begin but for weight decay.

B batch, S sequence, H heads, D head width, E entries of a row, K entries of a query, G groups.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.batch import Context
from models.initialization import Zeros, fan_in, make_parameter
from models.layers.attention import AttentionCore
from models.layers.compressed_attention_config import CompressedAttentionConfig, IndexerConfig
from models.layers.compression import Compressor, EntryMap, map_entries
from models.layers.linear import Linear
from models.layers.norm import RMSNorm, rms_norm
from models.layers.rotary import RotaryScaling, rotary_context, rotate_adjacent
from models.layers.tensor_plan import TensorPlan
from models.ops import choose_entries as choosing
from models.ops import joint_attention as joint
from models.ops.joint_attention import Seen


class Compressed(NamedTuple):
    """What the layers of one kind share in a forward pass."""

    context: Context
    """Rotations of the tokens."""
    entries: EntryMap | None = None
    """None for a window alone."""


def compressed_contexts(
    positions_BS: Tensor, blocks: Iterable[int], rotation: tuple[int, float, RotaryScaling | None]
) -> dict[int, Compressed]:
    """What layers share by the tokens of their entries; dimensions, base and stretching rotate."""
    context = rotary_context(positions_BS, *rotation)
    return {
        block: Compressed(context, map_entries(positions_BS, block, *rotation)) for block in blocks
    }


class Indexer(nn.Module):
    """Chooses each query's entries (B,S,K) from the layer's input and the queries' latent."""

    def __init__(self, config: CompressedAttentionConfig, indexer: IndexerConfig) -> None:
        super().__init__()
        self.head_dim = indexer.head_dim
        self.num_chosen = indexer.num_chosen
        self.block = config.block
        self.width = indexer.num_heads * indexer.head_dim
        self.kernel = ""
        """The kernel that served the last forward, for the record."""
        self.compressor = _compressor(config, indexer.head_dim)
        self.q_up_proj = Linear(config.q_lora_rank, indexer.num_heads * indexer.head_dim)
        self.weight_proj = Linear(config.dim, indexer.num_heads)

    def num_keys(self, sequence_length: int) -> int:
        """Entries that have closed before a query, on average."""
        return sequence_length // 2 // self.block

    @torch.no_grad()
    def forward(
        self, x_BSD: Tensor, latent_BSD: Tensor, context: Context, entries: EntryMap
    ) -> Tensor:
        keys = _rotate_entries(self.compressor(x_BSD, entries), entries)
        q = self.q_up_proj(latent_BSD).unflatten(-1, (-1, self.head_dim))
        q = rotate_trailing(q, context)
        weights = self.weight_proj(x_BSD)
        first, last = entries.first_BS, entries.last_BS
        self.kernel = choosing.kernel_of(q)
        return choosing.choose_entries(
            q, keys, weights, context.positions_BS, first, last, entries.block, self.num_chosen
        )


class CompressedAttentionCore(nn.Module):
    """Window and entries by one softmax; see models.ops.joint_attention."""

    def __init__(self, config: CompressedAttentionConfig) -> None:
        super().__init__()
        self.scale = config.head_dim**-0.5
        self.window = config.window
        self.block = config.block
        self.num_chosen = config.indexer.num_chosen if config.indexer is not None else 0
        self.width = 2 * config.num_heads * config.head_dim
        """Products of a token with one key."""
        self.kernel = ""
        """The kernel, or kernels, that served the last forward, for the record."""
        self.sinks = make_parameter(config.num_heads, init=Zeros())

    def num_keys(self, sequence_length: int) -> int:
        """Those of the window, and entries that have closed, of which a choice may be less."""
        keys = sequence_length // 2
        entries = keys // self.block
        return min(keys, self.window) + min(entries, self.num_chosen or entries)

    def forward(
        self, q: Tensor, kv: Tensor, entries: Tensor, chosen: Tensor | None, shared: Compressed
    ) -> Tensor:
        """(B,S,H,D) from q (B,S,H,D), kv (B,S,D), entries (B,E,D), chosen (B,S,K) or None."""
        self.kernel = joint.kernel_of(q, chosen=chosen is not None)
        assert shared.entries is not None
        seen = Seen(shared.entries.first_BS, shared.entries.last_BS, self.block, chosen)
        positions = shared.context.positions_BS
        return joint.joint_attention(
            q, kv, entries, self.sinks, positions, seen, scale=self.scale, window=self.window
        )


class CompressedAttention(nn.Module):
    """A layer of any of the three kinds, model width to model width."""

    def __init__(self, config: CompressedAttentionConfig, *, output_scale: float) -> None:
        super().__init__()
        self.head_dim, self.norm_eps = config.head_dim, config.norm_eps
        self.block = config.block
        width, rank = config.num_heads * config.head_dim, config.q_lora_rank
        latents = config.num_output_groups * config.o_lora_rank
        self.q_down_proj = Linear(config.dim, rank)
        self.q_norm = RMSNorm(rank, config.norm_eps)
        self.q_up_proj = Linear(rank, width)
        self.kv_proj = Linear(config.dim, config.head_dim)
        self.kv_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.compressor = _compressor(config, config.head_dim) if config.block else None
        self.indexer = None if config.indexer is None else Indexer(config, config.indexer)
        self.core = CompressedAttentionCore(config) if config.block else _window_core(config)
        self.group_proj = GroupedLinear(config.group_width, latents, config.num_output_groups)
        self.o_proj = Linear(latents, config.dim, init=fan_in(latents, scale=output_scale))

    @property
    def tensor_plan(self) -> TensorPlan:
        """Refuses to be divided: all query heads share one key/value head, which is compressed."""
        return TensorPlan(heads=(1,))

    def forward(self, x_BSD: Tensor, shared: Compressed) -> Tensor:
        context, entries = shared
        latent = self.q_norm(self.q_down_proj(x_BSD))
        q = self.q_up_proj(latent).unflatten(-1, (-1, self.head_dim))
        q = rotate_trailing(rms_norm(q, self.norm_eps), context)
        kv = rotate_trailing(self.kv_norm(self.kv_proj(x_BSD))[:, :, None], context)
        if self.compressor is None or entries is None:
            # Another view of the value: torch.compile takes no tensor twice here.
            out = self.core(q, kv, kv.view_as(kv), context)
        else:
            table = _rotate_entries(self.compressor(x_BSD, entries), entries)
            chosen = None if self.indexer is None else self.indexer(x_BSD, latent, context, entries)
            out = self.core(q, kv.squeeze(2), table, chosen, shared)
        out = rotate_trailing(out, context._replace(sin_BSR=-context.sin_BSR))
        return self.o_proj(self.group_proj(out.flatten(2)))


class GroupedLinear(nn.Module):
    """Groups of inputs each to their own outputs, (..., G I) to (..., G O): block-diagonal."""

    def __init__(self, group_inputs: int, num_outputs: int, num_groups: int) -> None:
        super().__init__()
        self.num_groups = num_groups
        self.weight = make_parameter(num_outputs, group_inputs, init=fan_in(group_inputs))

    def forward(self, x: Tensor) -> Tensor:
        weight_GIO = self.weight.unflatten(0, (self.num_groups, -1)).mT
        x_GTI = x.flatten(0, -2).unflatten(-1, (self.num_groups, -1)).transpose(0, 1)
        return torch.bmm(x_GTI, weight_GIO).transpose(0, 1).reshape(*x.shape[:-1], -1)


def rotate_trailing(x_BSHD: Tensor, context: Context) -> Tensor:
    """Rotate adjacent pairs of the last 2R of the last dimension; the rest stays."""
    rotated = 2 * context.cos_BSR.shape[-1]
    kept, turned = x_BSHD.split((x_BSHD.shape[-1] - rotated, rotated), dim=-1)
    return torch.cat((kept, rotate_adjacent(turned, context)), dim=-1)


def _rotate_entries(table_BED: Tensor, entries: EntryMap) -> Tensor:
    return rotate_trailing(table_BED[:, :, None], entries.context).squeeze(2)


def _compressor(config: CompressedAttentionConfig, entry_dim: int) -> Compressor:
    return Compressor(
        config.dim,
        entry_dim,
        block=config.block,
        overlapping=config.indexer is not None,
        norm_eps=config.norm_eps,
    )


def _window_core(config: CompressedAttentionConfig) -> AttentionCore:
    return AttentionCore(
        scale=config.head_dim**-0.5,
        window=config.window,
        width=2 * config.num_heads * config.head_dim,
        sinks=make_parameter(config.num_heads, init=Zeros()),
    )
