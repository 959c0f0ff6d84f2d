"""torch's memory timeline (`export_memory_timeline` as JSON or raw), by its own categories.

It says sizes by category and time, but not who allocated what.
"""

from typing import Any

import numpy as np

from reports.traces.allocations import KIND, DeviceMemory, MemoryPoint, thinned
from reports.traces.columns import Ints

SOURCE = "memory timeline of torch's profiler"
# torch.profiler._memory_profiler numbers its categories in this order; the last is "unknown".
CATEGORIES = (
    "parameter",
    "optimizer_state",
    "input",
    "temporary",
    "activation",
    "gradient",
    "autograd_detail",
    "other",
)


def timeline_memory(document: list[Any]) -> DeviceMemory:
    """The course of `[times in us, sizes by category]`, or of raw `[ns, action, bytes, category]`.

    Raises ValueError when the document is neither.
    """
    times, sizes = _raw(document) if len(document) != 2 else _coalesced(*document)
    total = sizes.sum(axis=1)
    peak = int(np.argmax(total))
    kinds = sorted(CATEGORIES, key=lambda name: KIND[name])
    columns = [CATEGORIES.index(name) for name in kinds]
    points = [
        MemoryPoint(
            time_ns=int(times[row]),
            total_bytes=int(total[row]),
            reserved_bytes=None,
            by_kind=tuple(sizes[row, columns].tolist()),
        )
        for row in thinned(0, len(total), peak).tolist()
    ]
    return DeviceMemory(
        device="the exported device",
        source=SOURCE,
        kinds=tuple(kinds),
        peak_bytes=int(total[peak]),
        peak_time_ns=int(times[peak]),
        peak_reserved_bytes=None,
        peak_by_kind=dict(zip(kinds, sizes[peak, columns].tolist(), strict=True)),
        num_allocations=None,
        num_unmatched_frees=0,
        points=points,
        alive=[],
        largest=[],
    )


def _coalesced(times: list[int], sizes: list[list[int]]) -> tuple[Ints, Ints]:
    """Times in ns and sizes; the first column of each row is torch's own filler of zeros."""
    table = np.array(sizes, dtype=np.int64)
    if table.ndim != 2 or table.shape != (len(times), len(CATEGORIES) + 1) or not len(times):
        raise ValueError(
            f"sizes of {len(CATEGORIES) + 1} columns a time are expected, not {table.shape}"
        )
    return np.array(times, dtype=np.int64) * 1000, table[:, 1:]


def _raw(rows: list[list[int]]) -> tuple[Ints, Ints]:
    """Times in ns and sizes after each raw row; what was there before has time -1."""
    table = np.array(rows, dtype=np.int64)
    if table.ndim != 2 or table.shape[1] != 4:
        raise ValueError(f"rows of 4 numbers are expected, not {table.shape}")
    times = table[:, 0]
    first = int(times[times >= 0].min()) if (times >= 0).any() else 0
    change = np.zeros((len(table), len(CATEGORIES)), dtype=np.int64)
    change[np.arange(len(table)), table[:, 3]] = table[:, 2]
    return np.where(times < 0, first, times), np.cumsum(change, axis=0)
