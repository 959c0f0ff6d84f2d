"""What the tests of the models share: small models with values, batches of packed documents."""

from collections.abc import Sequence

import torch
from torch import Tensor

from models.batch import IGNORE, Batch
from models.initialization import collect_inits, initialize
from models.protocol import Model, ModelConfig


def build(config: ModelConfig, *, routing: str = "learned", seed: int = 0) -> Model:
    """The network of a configuration with its initial values."""
    model = config.build(routing)
    initialize(model, collect_inits(model), seed)
    return model


def pack(lengths: Sequence[Sequence[int]], vocab_size: int, *, seed: int = 0) -> Batch:
    """A batch whose rows hold documents of these lengths; a document's last token has no target."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), sum(lengths[0]))
    tokens = torch.randint(0, vocab_size, shape, generator=generator)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    labels = torch.roll(tokens, -1, dims=1)
    labels[torch.roll(positions, -1, dims=1) == 0] = IGNORE
    return Batch(tokens, labels, positions)


def relative_error(ours: Tensor, reference: Tensor) -> float:
    """The largest difference over the largest value of the reference."""
    return ((ours - reference).abs().max() / reference.abs().max()).item()
