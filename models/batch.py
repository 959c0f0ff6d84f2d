"""What goes through a model: a batch of tokens in, the context of its blocks, losses out.

B batch, S sequence, R rotary pairs (half the rotated dimensions).
"""

from typing import Any, NamedTuple

from torch import Tensor

IGNORE = -100
"""The label of a token that has no target."""


NO_TOKEN = -1
"""The id of no token: its embedding is zero."""


class Batch(NamedTuple):
    """One microbatch of packed documents."""

    tokens_BS: Tensor
    """int64 token ids."""
    labels_BS: Tensor
    """int64 id of the next token, or IGNORE."""
    positions_BS: Tensor
    """int64 position within the document: a document starts where it is 0."""


class Context(NamedTuple):
    """What every block of one forward pass shares."""

    positions_BS: Tensor
    cos_BSR: Tensor
    """float32 cosines of the rotary angles."""
    sin_BSR: Tensor
    """float32 sines of the rotary angles."""
    tokens_BS: Tensor | None = None
    """int64 token ids: some routers choose by them."""
    family: Any = None
    """What the blocks of one family share beyond this; only they read it."""


class Losses(NamedTuple):
    """Sums over the tokens of a microbatch; the trainer divides by the number of valid targets.

    Where several ranks compute one batch, each rank's detached sums are its share of the whole.
    """

    total: Tensor
    """Differentiable float32 scalar: main_sum + weight * mean over depths of the MTP sums."""
    main_sum: Tensor
    """Detached float32 scalar: cross-entropy of the next token."""
    mtp_sum: Tensor
    """Detached float32 scalar: mean over the MTP depths of their cross-entropy sums, 0 without."""
