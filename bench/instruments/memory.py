"""Memory: the allocator's peak on CUDA, live tensor bytes and resident set size anywhere."""

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch.utils._pytree import tree_leaves


class OnChange(Protocol):
    """Hears that the storage of an id had ``before`` bytes and now has ``after``."""

    def __call__(self, storage_id: int, before: int, after: int, *, resized: bool) -> None:
        """Take note of one change."""


class TensorBytes:
    """Tracks the bytes of every live storage from the given tensors on, and their peak.

    A context manager around the observed step: FSDP frees and refills storages by resizing
    them, which no operator shows, so resizing is watched while it is open. ``on_change`` hears
    of every change of a storage's bytes.
    """

    def __init__(self, standing: Iterable[torch.Tensor], on_change: OnChange | None = None) -> None:
        self._on_change = on_change
        self._live: dict[int, _Storage] = {}
        self._changes: list[tuple[_Storage, int]] = []
        self._num_changes_to_peak = 0
        self._total = 0
        self._peak = 0
        self._resize = torch.UntypedStorage.resize_
        for tensor in standing:
            self._note(tensor.untyped_storage())
        self.standing_bytes = self._total

    def __enter__(self) -> Self:
        original, note = self._resize, self._note

        def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = original(storage, size)
            note(storage, resized=True)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
        return self

    def __exit__(self, *_: object) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def see(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> None:
        """Note the storages of the operator's results."""
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf.untyped_storage())

    def mark(self, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        """Say what live tensors are: their bytes count as ``kind``, from their beginning on."""
        for tensor in tensors:
            self._note(tensor.untyped_storage())
            self._live[id(tensor.untyped_storage())].kind = kind

    @property
    def live_bytes(self) -> int:
        """Bytes of the storages that are alive now."""
        return self._total

    def live_by_kind(self) -> dict[str, int]:
        """Return the bytes that are alive now, by kind; what nobody has marked is "other"."""
        return _sum_by_kind((storage, storage.size) for storage in self._live.values())

    def peak_by_kind(self) -> dict[str, int]:
        """Return the bytes of the peak by kind, as marked by now."""
        return _sum_by_kind(self._changes[: self._num_changes_to_peak])

    def report(self) -> dict[str, int]:
        """Return the peak and what stood before the step, in bytes."""
        return {"peak_tensor_bytes": self._peak, "standing_tensor_bytes": self.standing_bytes}

    def _note(self, tensor_storage: torch.UntypedStorage, *, resized: bool = False) -> None:
        key = id(tensor_storage)
        if key not in self._live:
            weakref.finalize(tensor_storage, self._forget, key)
            self._live[key] = _Storage()
        self._change(key, self._live[key], tensor_storage.nbytes(), resized=resized)

    def _forget(self, key: int) -> None:
        storage = self._live.pop(key, None)
        if storage is not None:
            self._change(key, storage, 0)

    def _change(self, key: int, storage: "_Storage", size: int, *, resized: bool = False) -> None:
        before, storage.size = storage.size, size
        difference = size - before
        if not difference:
            return
        if self._on_change is not None:
            self._on_change(key, before, size, resized=resized)
        self._changes.append((storage, difference))
        self._total += difference
        if self._total > self._peak:
            self._peak = self._total
            self._num_changes_to_peak = len(self._changes)


class _Storage:
    """A storage as it was seen last: what it is and its bytes."""

    __slots__ = ("kind", "size")

    def __init__(self) -> None:
        self.kind = "other"
        self.size = 0


def _sum_by_kind(changes: Iterable[tuple[_Storage, int]]) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for storage, difference in changes:
        totals[storage.kind] += difference
    return dict(totals)


class AllocatorPeak:
    """The CUDA caching allocator's peaks between start and stop; nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None

    def start(self) -> None:
        """Forget earlier peaks."""
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)

    def report(self) -> dict[str, int]:
        """Return allocated and reserved peaks in bytes, or nothing on a CPU."""
        if self._device is None:
            return {}
        return {
            "peak_memory_allocated_bytes": torch.cuda.max_memory_allocated(self._device),
            "peak_memory_reserved_bytes": torch.cuda.max_memory_reserved(self._device),
        }


def peak_rss_bytes() -> int:
    """Return the peak resident set size of this process in bytes (VmHWM of Linux)."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
