"""The encoder: a network beside the layers, whose features enter their stream, as a vision tower's.

B batch, S sequence.
"""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from models.batch import Context


class Encoder(nn.Module, ABC):
    """What makes features of a part of the tokens; it is in the stage that has the embedding.

    It sees whole sequences on every rank that divides them: those ranks repeat its work, and
    layout code leaves each of them its own tokens of what comes out.
    """

    @abstractmethod
    def forward(self, tokens_BS: Tensor, context: Context) -> tuple[Tensor, ...]:
        """Tensors (B,S,...) of the whole sequence, from its tokens and the model's context."""

    @abstractmethod
    def flops_per_token(self, sequence_length: int) -> int:
        """FLOPs of forward and backward, spread over the tokens of a sequence."""
