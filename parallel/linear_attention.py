"""Context parallelism of linear attention: heads in exchange for tokens, halos for convolutions.

The state of a head runs through the whole sequence, one token after the other, so ranks that hold
chunks of it would wait for each other. Instead each rank runs a part of the heads through all
tokens. A short convolution sees a few tokens back: those before a chunk come from their owner.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from models.batch import Context
from models.layers.delta_rule import DeltaRuleCore, ShortConvolution
from models.layers.linear import local
from models.ops.short_convolution import short_convolution
from parallel.chunks import Chunks
from parallel.halo import Halo
from parallel.heads import HeadExchange


class ExchangedStates:
    """Stands in for the forward of a `DeltaRuleCore`: all tokens of a part of the heads."""

    def __init__(self, core: DeltaRuleCore, chunks: Chunks, group: dist.ProcessGroup) -> None:
        self.core = core
        self.heads = HeadExchange(chunks, group)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, context: Context
    ) -> Tensor:
        """As ``DeltaRuleCore.forward``, from and to this rank's tokens with all heads."""
        q, k, v, log_decay, beta = self.heads.leave(q, k, v, log_decay, beta)
        out, _ = self.core.advance(q, k, v, log_decay, beta, context.positions_BS, None)
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
