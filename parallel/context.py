"""Context parallelism: sequences divided over ranks, keys and values brought to the queries.

Every rank reads whole sequences of tokens and takes its two chunks (see parallel.chunks) after
targets and later tokens (MTP) have been found, so documents and predictions cross chunks freely.

N ranks, B batch, S sequence, c = S / 2N tokens of a chunk, H heads, C channels.
"""

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from models.batch import Context
from models.layers.attention import AttentionCore, Expansion
from models.layers.delta_rule import DeltaRuleCore, ShortConvolution
from models.ops.attention import attention_kernel
from models.protocol import Model
from parallel.chunks import Chunks
from parallel.collectives import gather
from parallel.halo import Halo
from parallel.heads import HeadExchange
from parallel.linear_attention import HaloConvolution, divided_delta_rule
from parallel.packing import pack, unpack
from parallel.plan import ContextMethod
from parallel.remat import replace_forward
from parallel.ring import Ring, ring_attention

MIXES_ALL = (AttentionCore, DeltaRuleCore)
MIXERS = (*MIXES_ALL, ShortConvolution)


class Attention(Protocol):
    """What takes the place of a core's two methods."""

    def exchange(self, *sources: Tensor) -> tuple[Tensor, ...]:
        """As ``AttentionCore.exchange``."""
        ...

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """As ``AttentionCore.forward``."""
        ...


class GatheredKeys:
    """Every rank sees what all keys and values are made of, and attends from its two chunks."""

    def __init__(self, core: AttentionCore, chunks: Chunks, group: dist.ProcessGroup) -> None:
        self.core = core
        self.chunks = chunks
        self.group = group

    def exchange(self, *sources: Tensor) -> tuple[Tensor, ...]:
        """Return the sources of the whole sequence, by one all-gather."""
        whole = self.chunks.join(gather(pack(sources), self.group))
        return unpack(whole, sources)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """Attend from each chunk to the keys up to its end."""
        outputs = []
        c = q.shape[1] // 2
        for queries, chunk in zip(q.chunk(2, dim=1), self.chunks.own, strict=True):
            seen = (slice(None), slice((chunk + 1) * c))
            positions = context.positions_BS[seen]
            outputs.append(self.core.attend(queries, k[seen], v[seen], positions))
        return torch.cat(outputs, dim=1)


class HaloKeys:
    """For a window of w tokens: only the w - 1 tokens before each chunk travel."""

    def __init__(self, core: AttentionCore, chunks: Chunks, group: dist.ProcessGroup) -> None:
        self.core = core
        self.chunks = chunks
        self.halo = Halo(chunks, core.window - 1, group)

    def exchange(self, *sources: Tensor) -> tuple[Tensor, ...]:
        """Return the sources of the first chunk behind its halo, then those of the second."""
        return unpack(self.halo.exchange(pack(sources)), sources)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """Attend from each chunk to itself and its halo."""
        outputs = []
        c = q.shape[1] // 2
        spans = self.halo.spans(c)
        widths = [stop - start for start, stop in spans]
        keys, values = k.split(widths, dim=1), v.split(widths, dim=1)
        parts = zip(spans, q.chunk(2, dim=1), keys, values, strict=True)
        for (start, stop), queries, key, value in parts:
            positions = context.positions_BS[:, start:stop]
            outputs.append(self.core.attend(queries, key, value, positions))
        return torch.cat(outputs, dim=1)


class ExchangedHeads:
    """Ulysses (arXiv:2309.14509): all tokens of a part of the heads, by all-to-all and back."""

    def __init__(self, core: AttentionCore, chunks: Chunks, group: dist.ProcessGroup) -> None:
        self.core = core
        self.heads = HeadExchange(chunks, group)

    def exchange(self, *sources: Tensor) -> tuple[Tensor, ...]:
        """Return the sources as they are: keys and values travel with the queries."""
        return sources

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """Attend from all tokens, with this rank's share of the heads."""
        q, k, v = self.heads.leave(q, k, v)
        return self.heads.come_home(self.core.attend(q, k, v, context.positions_BS))


class RingKeys:
    """What keys and values are made of travels around the ranks: no rank holds all of it."""

    def __init__(self, core: AttentionCore, chunks: Chunks, group: dist.ProcessGroup) -> None:
        self.core = core
        self.chunks = chunks
        self.group = group

    def mix(
        self,
        q: Tensor,
        sources: tuple[Tensor, ...],
        context: Context,
        expansion: Expansion | None = None,
    ) -> Tensor:
        """As ``AttentionCore.mix``; the core expands what arrives, and may be kept as a region."""
        return self.core(q, sources, context, expansion)

    @torch.compiler.disable
    def __call__(
        self,
        q: Tensor,
        sources: tuple[Tensor, ...],
        context: Context,
        expansion: Expansion | None,
    ) -> Tensor:
        """Attend from both chunks to one rank's keys after another."""
        core = self.core
        core.kernel = attention_kernel(q.device.type, q.dtype, q.shape[-1])
        ring = Ring(self.chunks, self.group, core.scale, expansion)
        return ring_attention(ring, q, sources, context.positions_BS)


def spread_sequence(model: Model, mesh: DeviceMesh, method: ContextMethod) -> None:
    """Divide the sequences of a ``model`` over the ranks of ``mesh``, in place.

    The model then takes whole sequences of tokens, targets and positions, and works on this
    rank's chunks of them.
    """
    chunks = Chunks(mesh.size(), mesh.get_local_rank())
    group = mesh.get_group()
    for module in sequence_mixers(model, mesh.size()):
        if isinstance(module, AttentionCore):
            divide_attention(module, chunks, group, method)
        elif isinstance(module, DeltaRuleCore):
            replace_forward(module, divided_delta_rule(module, chunks, group, method))
        elif isinstance(module, ShortConvolution):
            replace_forward(module, HaloConvolution(module, chunks, group))
    if model.embedding is not None:
        model.embedding.register_forward_pre_hook(lambda _, args: (chunks.take(args[0]),))
    if model.encoder is not None:
        # Before tensor parallelism's hook, which divides what this one leaves.
        model.encoder.register_forward_hook(_take_features(chunks), prepend=True)
    if model.head is not None:
        model.head.register_forward_pre_hook(_take_labels(chunks))
    whole_context = model.context

    def context(positions_BS: Tensor) -> Context:
        # Rotations are those of this rank's tokens, documents (and the family's own) of all keys.
        whole = whole_context(positions_BS)
        cos_BSR, sin_BSR = chunks.take(whole.cos_BSR), chunks.take(whole.sin_BSR)
        return whole._replace(cos_BSR=cos_BSR, sin_BSR=sin_BSR)

    model.context = context  # type: ignore[method-assign]


def sequence_mixers(model: Model, num_ranks: int) -> list[nn.Module]:
    """Return the modules in which tokens of a sequence meet.

    Raises:
        ValueError: if a block has none that can be divided.
    """
    found: list[nn.Module] = []
    for name, block in model.sequence_blocks():
        mixers = [module for module in block.modules() if isinstance(module, MIXERS)]
        if not any(isinstance(module, MIXES_ALL) for module in mixers):
            raise ValueError(
                f"plan.cp={num_ranks}: the tokens of {name} meet in a way that context "
                "parallelism does not divide; plan.cp=1 works"
            )
        found += mixers
    return found


def divide_attention(
    core: AttentionCore, chunks: Chunks, group: dist.ProcessGroup, method: ContextMethod
) -> None:
    """Make ``core`` attend from the chunks of a rank to all keys that they see, in place."""
    if method == "ring" and not core.window:
        ring = RingKeys(core, chunks, group)
        core.mix = ring.mix  # type: ignore[method-assign]
        replace_forward(core, ring)
        return
    kind = ExchangedHeads if method == "ulysses" else HaloKeys if core.window else GatheredKeys
    attention: Attention = kind(core, chunks, group)
    core.exchange = attention.exchange  # type: ignore[method-assign]
    replace_forward(core, attention)


def _take_features(chunks: Chunks) -> Any:
    def take(_: nn.Module, args: Any, features: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(chunks.take(x_BSD) for x_BSD in features)

    return take


def _take_labels(chunks: Chunks) -> Any:
    def take(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, labels, *rest = args
        return (hidden, [chunks.take(label) for label in labels], *rest)

    return take
