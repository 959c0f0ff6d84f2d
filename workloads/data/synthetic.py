"""Synthetic tokens: seeded, uniform over the vocabulary, one document a sequence, no file."""

import hashlib

import msgspec
import numpy as np

from models.batch import IGNORE
from workloads.data.packing import PADDING, TokenSequence


class SyntheticTokens(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Endless sequences that depend on the seed and their index alone."""

    sequence_length: int
    vocab_size: int
    seed: int

    def sequence(self, index: int) -> TokenSequence:
        """Return sequence ``index``; the token that means padding does not occur in it."""
        generator = np.random.default_rng([self.seed, index])
        has_padding = self.vocab_size > PADDING
        tokens = generator.integers(0, self.vocab_size - has_padding, self.sequence_length)
        if has_padding:
            tokens += tokens >= PADDING
        return TokenSequence(
            tokens_S=tokens,
            labels_S=np.append(tokens[1:], IGNORE),
            positions_S=np.arange(self.sequence_length),
        )

    def fingerprint(self) -> str:
        """Return a sha256 of the first sequence: it changes if the generator ever does."""
        return hashlib.sha256(self.sequence(0).tokens_S.tobytes()).hexdigest()
