"""The protocol between a model and the code that lays it out, trains it and counts it.

Layout code (parallel/) sees a model only through this: it never asks for a family's name.

* Parameters come from `initialization.make_parameter` and hold no values until
  `initialization.initialize` fills them, so a model is built on any device, the meta device too.
* The dtype of the embedding's output is the compute dtype: with weights cast to bfloat16 (by FSDP's
  mixed precision, say) every product runs in bfloat16. Rotary tables and routers stay float32, and
  so may a residual stream: do not cast the inputs of a block (`cast_forward_inputs=False`).
* A part that rematerialization may keep is a module that takes and returns tensors: `AttentionCore`
  and `GroupedExperts` (where the time goes) and `Router` (whose choice must not change).
"""

from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from models.batch import Context, Losses
from models.counts import FlopsLedger, ParameterCounts
from models.layers.moe import MoE


class NamedBlock(NamedTuple):
    """A unit of sharding, rematerialization and compilation, by its qualified name."""

    name: str
    block: nn.Module


class NamedMoE(NamedTuple):
    """A mixture-of-experts layer, by its qualified name."""

    name: str
    moe: MoE


@runtime_checkable
class ModelConfig(Protocol):
    """A frozen struct of numbers that determines a network."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...

    @property
    def num_layers(self) -> int:
        """Blocks of the main network."""
        ...

    @property
    def num_mtp_layers(self) -> int:
        """Tokens predicted beyond the next."""
        ...

    def build(self, routing: str = "learned") -> "Model":
        """The network on the current default device, without values.

        `routing` is "learned", "balanced" or "random"; ValueError for another.
        """
        ...

    def counts(self) -> ParameterCounts:
        """Exact parameter counts, without building anything."""
        ...

    def flops_per_token(self, sequence_length: int) -> FlopsLedger:
        """FLOPs of forward and backward for one token, term by term, in both conventions."""
        ...


class Model(nn.Module, ABC):
    """A network that turns a batch into losses."""

    config: ModelConfig
    layers: nn.ModuleList
    """Called in order as layer(x_BSD, context)."""
    mtp: nn.ModuleList
    """MTP modules, called as module(x_BSD, embedding_BSD, context); may be empty."""

    @abstractmethod
    def forward(self, tokens_BS: Tensor, labels_BS: Tensor, positions_BS: Tensor) -> Losses:
        """Losses of a batch of packed documents; see models.batch."""

    @abstractmethod
    def context(self, positions_BS: Tensor) -> Context:
        """What the blocks of one forward pass share."""

    def blocks(self) -> list[NamedBlock]:
        """The layers and then the MTP modules, in order of execution."""
        layers = [NamedBlock(f"layers.{i}", layer) for i, layer in enumerate(self.layers)]
        return layers + [NamedBlock(f"mtp.{i}", module) for i, module in enumerate(self.mtp)]

    def moe_layers(self) -> list[NamedMoE]:
        """Every mixture-of-experts layer, those of MTP modules included."""
        return [NamedMoE(name, m) for name, m in self.named_modules() if isinstance(m, MoE)]
