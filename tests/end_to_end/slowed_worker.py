"""A rank that really trains, with one thing made slow: what the variable SLOWED names.

``attention``: real work, repeated, on every rank; ``rank``: the same on rank 1 alone;
``collective``: the all-reduce of each step moves more; ``host``: the loader of the data sleeps.
"""

import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from bench import trainer, worker
from models.layers.attention import AttentionCore

SECONDS = 0.4  # of each attention layer; the step itself takes a few tenths
COPIES = 64  # of the batch, so that the repetitions are few: each is an event in the trace
ALL_REDUCE_ELEMENTS = 8 * 2**20
NUM_ALL_REDUCES = 24


def repeat_attention() -> None:
    """Let every attention layer of the forward pass compute for SECONDS more."""
    original = AttentionCore.attend

    @functools.wraps(original)
    def attend(self: AttentionCore, *args: Any) -> torch.Tensor:
        deadline = time.monotonic() + SECONDS
        large = [tensor.repeat(COPIES, *[1] * (tensor.dim() - 1)) for tensor in args]
        with torch.no_grad():
            while time.monotonic() < deadline:
                original(self, *large)
        return original(self, *args)

    AttentionCore.attend = attend


def enlarge_all_reduce() -> None:
    """Let each all-reduce of the trainer be followed by large ones."""
    original: Callable[..., Any] = dist.all_reduce
    ballast = torch.zeros(ALL_REDUCE_ELEMENTS)

    class SlowDistributed:
        """``torch.distributed`` as the trainer sees it."""

        @staticmethod
        def all_reduce(tensor: torch.Tensor) -> None:
            original(tensor)
            for _ in range(NUM_ALL_REDUCES):
                original(ballast)

    trainer.dist = SlowDistributed


def sleep_in_loader() -> None:
    """Let the host wait for its data."""
    original = trainer.Trainer._batch

    @functools.wraps(original)
    def batch(self: trainer.Trainer, *args: Any) -> Any:
        time.sleep(3 * SECONDS)
        return original(self, *args)

    trainer.Trainer._batch = batch


def main() -> int:
    """Slow down what is asked for, then be the worker."""
    slowed = os.environ.get("SLOWED", "")
    rank = int(sys.argv[sys.argv.index("--rank") + 1])
    if slowed == "attention" or (slowed == "rank" and rank == 1):
        repeat_attention()
    if slowed == "collective":
        enlarge_all_reduce()
    if slowed == "host":
        sleep_in_loader()
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
