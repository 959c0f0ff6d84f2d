"""Training data: real text that every machine has, seeded synthetic tokens, or a user's files."""

from workloads.data.batches import Data, count_tokens, open_data
from workloads.data.packing import END_OF_DOCUMENT, PADDING, TEXT_VOCAB_SIZE

__all__ = [
    "END_OF_DOCUMENT",
    "PADDING",
    "TEXT_VOCAB_SIZE",
    "Data",
    "count_tokens",
    "open_data",
]
