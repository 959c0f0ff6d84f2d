"""Context parallelism of linear attention: states or heads travel, and halos for convolutions.

The state of a head runs through the whole sequence. Either each rank keeps its chunks and the
states between chunks are passed on, or each rank runs a part of the heads through all tokens. A
short convolution sees a few tokens back: those before a chunk come from their owner.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from models.batch import Context
from models.layers.delta_rule import DeltaRuleCore, ShortConvolution
from models.layers.linear import local
from models.ops.delta_rule import delta_rule
from models.ops.short_convolution import short_convolution
from parallel.chunks import Chunks
from parallel.halo import Halo
from parallel.heads import HeadExchange
from parallel.plan import ContextMethod
from parallel.states import pass_states


def divided_delta_rule(
    core: DeltaRuleCore, chunks: Chunks, group: dist.ProcessGroup, method: ContextMethod
) -> Callable[..., Tensor]:
    """Return what stands in for the forward of a core: Ulysses exchanges heads, all else states."""
    return (ExchangedStates if method == "ulysses" else PassedStates)(core, chunks, group)


class PassedStates:
    """All heads of the two chunks of this rank, each from the state that those before it leave."""

    def __init__(self, core: DeltaRuleCore, chunks: Chunks, group: dist.ProcessGroup) -> None:
        self.core = core
        self.chunks = chunks
        self.group = group

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, context: Context
    ) -> Tensor:
        """As ``DeltaRuleCore.forward``, from and to this rank's tokens."""
        positions = self.chunks.take(context.positions_BS)
        q, k, v, log_decay, beta, positions = (
            x.unflatten(1, (2, -1)).flatten(0, 1) for x in (q, k, v, log_decay, beta, positions)
        )
        inputs = self.core.inputs(q, k, v, log_decay, beta, positions)
        out = pass_states(inputs, self.chunks, self.group)
        return out.unflatten(0, (-1, 2)).flatten(1, 2)


class ExchangedStates:
    """All tokens of a part of the heads, by all-to-all and back."""

    def __init__(self, core: DeltaRuleCore, chunks: Chunks, group: dist.ProcessGroup) -> None:
        self.core = core
        self.heads = HeadExchange(chunks, group)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, context: Context
    ) -> Tensor:
        """As ``DeltaRuleCore.forward``, from and to this rank's tokens with all heads."""
        q, k, v, log_decay, beta = self.heads.leave(q, k, v, log_decay, beta)
        inputs = self.core.inputs(q, k, v, log_decay, beta, context.positions_BS)
        out, _, _ = delta_rule(inputs, None)
        return self.heads.come_home(out)


class HaloConvolution:
    """Stands in for the forward of a `ShortConvolution`: each chunk behind the tokens before it."""

    def __init__(
        self, convolution: ShortConvolution, chunks: Chunks, group: dist.ProcessGroup
    ) -> None:
        self.convolution = convolution
        self.reach = convolution.weight.shape[1] - 1
        self.halo = Halo(chunks, self.reach, group)

    def __call__(self, x_BSC: Tensor, context: Context) -> Tensor:
        """As ``ShortConvolution.forward``, for the two chunks of this rank."""
        c = x_BSC.shape[1] // 2
        weight = local(self.convolution.weight)
        spans = self.halo.spans(c)
        parts = self.halo.exchange(x_BSC).split([stop - start for start, stop in spans], dim=1)
        outputs = []
        for (_, stop), part in zip(spans, parts, strict=True):
            before, chunk = part[:, :-c], part[:, -c:]
            # Before the first token of a sequence there is none: no position there is ever seen.
            before = F.pad(before, (0, 0, self.reach - before.shape[1], 0))
            positions = context.positions_BS[:, stop - c : stop]
            outputs.append(short_convolution(chunk, weight, positions, before))
        return torch.cat(outputs, dim=1)
