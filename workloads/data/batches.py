"""Batches: the part of a step's global batch that one rank trains on in one microbatch.

Logical dimensions: B sequences of one microbatch on one rank, S sequence length.
"""

import platform

import numpy as np
import torch

from models.batch import IGNORE, Batch
from workloads.data import documents as files
from workloads.data.packing import PADDING, TEXT_VOCAB_SIZE, PackedText
from workloads.data.synthetic import SyntheticTokens


class Data:
    """An endless row of sequences, dealt out to steps, ranks and microbatches."""

    def __init__(
        self, sequences: PackedText | SyntheticTokens, *, source: str, global_batch_size: int
    ) -> None:
        self.sequences = sequences
        self.source = source
        self.global_batch_size = global_batch_size

    def batch(
        self, step: int, rank: int, num_ranks: int, microbatch: int, num_microbatches: int
    ) -> Batch:
        """Return the batch, int64 CPU tensors of shape (B, S).

        Step ``step`` trains on sequences ``step * global_batch_size`` and following, whatever the
        number of ranks and microbatches; each rank has a contiguous part of them.

        Raises:
            ValueError: if the global batch does not divide by ranks and microbatches, or a file
                cannot be read any more.
        """
        parts = num_ranks * num_microbatches
        if self.global_batch_size % parts:
            raise ValueError(
                f"workload.global_batch_size={self.global_batch_size} is not a multiple of "
                f"{num_ranks} data ranks x {num_microbatches} microbatches"
            )
        B = self.global_batch_size // parts
        first = step * self.global_batch_size + (rank * num_microbatches + microbatch) * B
        rows = [self.sequences.sequence(first + row) for row in range(B)]
        return Batch(*(torch.from_numpy(np.stack(field)) for field in zip(*rows, strict=True)))

    def describe(self) -> dict[str, bool | int | float | str | None]:
        """Return what the record says about the data; lengths in tokens, reads the files once."""
        sequences = self.sequences
        if isinstance(sequences, SyntheticTokens):
            return {
                "source": self.source,
                "tokens": None,
                "documents": None,
                "mean_document_length": float(sequences.sequence_length),
                "sha256": sequences.fingerprint(),
            }
        num_documents = len(sequences.documents)
        return {
            "source": self.source,
            "tokens": sequences.num_tokens,
            "documents": num_documents,
            "mean_document_length": sequences.num_tokens / num_documents,
            "sha256": files.fingerprint(sequences.documents),
            "python": platform.python_version() if self.source == "text" else None,
        }


def open_data(
    source: str, *, sequence_length: int, global_batch_size: int, vocab_size: int, seed: int
) -> Data:
    """Open ``"text"``, ``"synthetic"``, or the file or folder at the path ``source``.

    Raises:
        ValueError: if the vocabulary is too small for byte tokens, or the path holds no text.
    """
    sequences: PackedText | SyntheticTokens
    if source == "synthetic":
        sequences = SyntheticTokens(
            sequence_length=sequence_length, vocab_size=vocab_size, seed=seed
        )
    else:
        if vocab_size < TEXT_VOCAB_SIZE:
            raise ValueError(
                f"model.vocab_size={vocab_size} is too small for text: 256 bytes, end of document "
                f"and padding need {TEXT_VOCAB_SIZE}; raise it or set workload.data=synthetic"
            )
        documents = files.standard_library(seed) if source == "text" else files.user_files(source)
        sequences = PackedText(documents, sequence_length=sequence_length)
    return Data(sequences, source=source, global_batch_size=global_batch_size)


def count_tokens(batch: Batch) -> tuple[int, int, int]:
    """Return the batch's tokens trained on, its padding, and its targets (labels that count)."""
    padding = int((batch.tokens_BS == PADDING).sum())
    targets = int((batch.labels_BS != IGNORE).sum())
    return batch.tokens_BS.numel() - padding, padding, targets
