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
from models.layers.attention import AttentionCore
from models.layers.delta_rule import DeltaRuleCore, ShortConvolution
from models.ops.attention import attention_kernel
from models.protocol import Model
from parallel.chunks import Chunks
from parallel.collectives import gather
from parallel.halo import Halo
from parallel.heads import HeadExchange
from parallel.linear_attention import ExchangedStates, HaloConvolution
from parallel.packing import pack, unpack
from parallel.plan import ContextMethod
from parallel.remat import replace_forward
from parallel.ring import ring_attention

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
    """Keys and values travel around the ranks and meet the queries: no rank holds all of them."""

    def __init__(self, core: AttentionCore, chunks: Chunks, group: dist.ProcessGroup) -> None:
        self.core = core
        self.chunks = chunks
        self.group = group

    def exchange(self, *sources: Tensor) -> tuple[Tensor, ...]:
        """Return the sources as they are: the keys and values made of them travel."""
        return sources

    @torch.compiler.disable
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """Attend from both chunks to one rank's keys after another."""
        core, positions = self.core, context.positions_BS
        core.kernel = attention_kernel(q.device.type, q.dtype, q.shape[-1])
        return ring_attention(q, k, v, positions, core.scale, self.chunks, self.group)


def spread_sequence(model: Model, mesh: DeviceMesh, method: ContextMethod) -> None:
    """Divide the sequences of a ``model`` over the ranks of ``mesh``, in place.

    The model then takes whole sequences of tokens, targets and positions, and works on this
    rank's chunks of them.
    """
    chunks = Chunks(mesh.size(), mesh.get_local_rank())
    group = mesh.get_group()
    for module in sequence_mixers(model, mesh.size()):
        if isinstance(module, AttentionCore):
            _replace(module, _attention(module, chunks, group, method))
        elif isinstance(module, DeltaRuleCore):
            replace_forward(module, ExchangedStates(module, chunks, group))
        elif isinstance(module, ShortConvolution):
            replace_forward(module, HaloConvolution(module, chunks, group))
    if model.embedding is not None:
        model.embedding.register_forward_pre_hook(lambda _, args: (chunks.take(args[0]),))
    if model.head is not None:
        model.head.register_forward_pre_hook(_take_labels(chunks))
    whole_context = model.context

    def context(positions_BS: Tensor) -> Context:
        # Rotations are those of this rank's tokens, documents those of all keys.
        return whole_context(chunks.take(positions_BS))._replace(positions_BS=positions_BS)

    model.context = context  # type: ignore[method-assign]


def sequence_mixers(model: Model, num_ranks: int) -> list[nn.Module]:
    """Return the modules in which tokens of a sequence meet.

    Raises:
        ValueError: if a block has none that can be divided.
    """
    found: list[nn.Module] = []
    for name, block in model.blocks():
        mixers = [module for module in block.modules() if isinstance(module, MIXERS)]
        if not any(isinstance(module, MIXES_ALL) for module in mixers):
            raise ValueError(
                f"plan.cp={num_ranks}: the tokens of {name} meet in a way that context "
                "parallelism does not divide; plan.cp=1 works"
            )
        found += mixers
    return found


def _attention(
    core: AttentionCore, chunks: Chunks, group: dist.ProcessGroup, method: ContextMethod
) -> Attention:
    if method == "ulysses":
        return ExchangedHeads(core, chunks, group)
    if core.window:
        return HaloKeys(core, chunks, group)
    return (RingKeys if method == "ring" else GatheredKeys)(core, chunks, group)


def _replace(core: AttentionCore, attention: Attention) -> None:
    core.exchange = attention.exchange  # type: ignore[method-assign]
    replace_forward(core, attention)


def _take_labels(chunks: Chunks) -> Any:
    def take(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, labels, *rest = args
        return (hidden, [chunks.take(label) for label in labels], *rest)

    return take
