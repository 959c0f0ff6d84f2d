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

import torch
from torch import Tensor, nn

from models.batch import Context, Losses
from models.counts import FlopsLedger, ParameterCounts
from models.layers.encoder import Encoder
from models.layers.head import OutputHead
from models.layers.linear import Embedding
from models.layers.moe import MoE
from models.layers.mtp import shift_labels, shift_tokens
from models.layers.norm import Norm

State = tuple[Tensor, ...]
"""What flows from part to part: nothing before the embedding, x_BSD through the layers, with
what else `num_streams` counts, (x_BSD, hidden states of the prediction heads so far) through MTP
modules, and before the head the hidden states (B,S,D) alone, one per prediction head."""


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
    def dim(self) -> int:
        """Width of the stream between blocks."""
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

        `routing` is one of models.layers.router.Routing; ValueError for another.
        """
        ...

    def counts(self) -> ParameterCounts:
        """Exact parameter counts, without building anything."""
        ...

    def flops_per_token(self, sequence_length: int) -> FlopsLedger:
        """FLOPs of forward and backward for one token, term by term, in both conventions."""
        ...


class Model(nn.Module, ABC):
    """A network that turns a batch into losses.

    A pipeline stage is the same class with some parts absent: `encoder`, `embedding`, `norm` and
    `head` may be None, and so may entries of `layers` and `mtp`. Names of parameters are those of
    the whole.
    """

    config: ModelConfig
    embedding: Embedding | None
    layers: nn.ModuleList
    """Called in order as layer(x_BSD, context)."""
    norm: Norm | None
    mtp: nn.ModuleList
    """MTP modules, called as module(x_BSD, embedding_BSD, context); may be empty."""
    head: OutputHead | None
    mtp_loss_weight: float = 0.0

    @abstractmethod
    def context(self, positions_BS: Tensor) -> Context:
        """What the blocks of one forward pass share."""

    @abstractmethod
    def embed(self, tokens_BS: Tensor) -> Tensor:
        """The stream (B,S,D) that enters the first layer."""

    @abstractmethod
    def last_hidden(self, x_BSD: Tensor) -> Tensor:
        """The final norm: what the main prediction head sees of the last layer's output."""

    @property
    def encoder(self) -> Encoder | None:
        """The network beside the layers, if there is one and it is here."""
        return None

    def drop_encoder(self) -> None:
        """Make this a stage without the encoder."""

    @property
    def ties_embedding(self) -> bool:
        """Whether embedding and head are here and are one parameter."""
        if self.embedding is None or self.head is None:
            return False
        return self.head.weight is self.embedding.weight

    def tie_embedding(self) -> None:
        """Make the embedding the head's weight: dividing or moving a tied model makes two of it."""
        assert self.embedding is not None and self.head is not None
        self.head.weight = self.embedding.weight

    @property
    def stream_width(self) -> int:
        """Width of x_BSD between layers; a family may have several streams side by side."""
        return self.config.dim

    def num_streams(self, layer: int) -> int:
        """Tensors of the state that enters `layer`; a family may keep earlier states beside x."""
        return 1

    def stream_dtype(self, compute_dtype: torch.dtype) -> torch.dtype:
        """The dtype of x_BSD between layers; a family may keep it in float32."""
        return compute_dtype

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor, positions_BS: Tensor) -> Losses:
        """Losses of a batch of packed documents; see models.batch."""
        hidden = self.advance((), tokens_BS, positions_BS)
        return self.losses(hidden, labels_BS, positions_BS)

    def advance(self, state: State, tokens_BS: Tensor, positions_BS: Tensor) -> State:
        """The state after the parts that are here, from the state before them; all but the head.

        A model with MTP modules embeds the tokens for them where it holds the modules.
        """
        context = self.context(positions_BS)._replace(tokens_BS=tokens_BS)
        embeddings = self._embed_all(tokens_BS, positions_BS, first=not state)
        if not state:
            state = (embeddings.pop(0),)
        for layer in self.layers:
            if layer is not None:
                state = (layer(state[0], context),)
        if self.norm is not None:
            hidden = self.last_hidden(state[0])
            state = (state[0], hidden) if self.mtp else (hidden,)
        for depth, module in enumerate(self.mtp, start=1):
            if module is not None:
                x, hidden = module(state[0], embeddings.pop(0), context)
                rest = (*state[1:], hidden)
                state = rest if depth == len(self.mtp) else (x, *rest)
        return state

    def _embed_all(self, tokens_BS: Tensor, positions_BS: Tensor, *, first: bool) -> list[Tensor]:
        """What enters the first layer (if `first`) and the MTP modules here, by one lookup.

        Tokens are shifted, not embeddings: of those a rank may hold a part of the sequence only.
        """
        depths = [depth for depth, module in enumerate(self.mtp, start=1) if module is not None]
        needed = [tokens_BS] if first else []
        needed += [shift_tokens(tokens_BS, positions_BS, depth) for depth in depths]
        return list(self.embed(torch.cat(needed)).chunk(len(needed))) if needed else []

    def losses(self, hidden: State, labels_BS: Tensor, positions_BS: Tensor) -> Losses:
        """The head's losses from the last state."""
        assert self.head is not None, "losses come from the head"
        depths = range(1, len(self.mtp) + 1)
        shifted = [shift_labels(labels_BS, positions_BS, depth) for depth in depths]
        return self.head(hidden, [labels_BS, *shifted], self.mtp_loss_weight)

    def blocks(self) -> list[NamedBlock]:
        """All units that are here, in order of execution: an encoder's, then the sequence's."""
        return self.sequence_blocks()

    def sequence_blocks(self) -> list[NamedBlock]:
        """The layers and then the MTP modules that are here: what works on the tokens' stream."""
        layers = [NamedBlock(f"layers.{i}", layer) for i, layer in enumerate(self.layers)]
        modules = [NamedBlock(f"mtp.{i}", module) for i, module in enumerate(self.mtp)]
        return [named for named in layers + modules if named.block is not None]

    def moe_layers(self) -> list[NamedMoE]:
        """Every mixture-of-experts layer, those of MTP modules included."""
        return [NamedMoE(name, m) for name, m in self.named_modules() if isinstance(m, MoE)]
