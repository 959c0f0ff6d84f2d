"""The protocol between a model and the code that lays it out, trains it and counts it.

Layout code (parallel/) sees a model only through this: it never asks for a family's name.

* Parameters come from `initialization.make_parameter` and hold no values until
  `initialization.initialize` fills them, so a model is built on any device, the meta device too.
* The dtype of the embedding's output is the compute dtype: with weights cast to bfloat16 (by FSDP's
  mixed precision, say) every product runs in bfloat16. Rotary tables and routers stay float32, and
  so may a residual stream: do not cast the inputs of a block (`cast_forward_inputs=False`).
* Rematerialization finds what to save by module type: `AttentionCore`, `Router`, `GroupedExperts`
  and the dispatcher take and return flat tensors, so each can be wrapped as one region.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from models.batch import Losses
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

    vocab_size: int
    dim: int
    num_layers: int
    num_mtp_layers: int

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


@runtime_checkable
class Model(Protocol):
    """A network that turns a batch into losses. It is an nn.Module."""

    config: Any
    forward: Callable[[Tensor, Tensor, Tensor], Losses]
    """(tokens_BS, labels_BS, positions_BS) to Losses."""

    def blocks(self) -> list[NamedBlock]:
        """The units in order of execution, each called as block(x_BSD, context).

        An MTP block is one unit, called as block(x_BSD, embedding_BSD, context).
        """
        ...

    def moe_layers(self) -> list[NamedMoE]:
        """Every mixture-of-experts layer, those of MTP blocks included."""
        ...
