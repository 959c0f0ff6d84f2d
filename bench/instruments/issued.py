"""Which process group each collective of the profiled step was issued on, for the trace.

The profiler's gloo events carry no group. torch's flight recorder notes every collective of gloo
with its group and its number in it; sends and receives, which it leaves out, are noted on their
way through Python. With NCCL the trace has all of it, and nothing is added.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

import msgspec
import torch
import torch.distributed as dist

Row = list[int | str | None]

# Entries that the flight recorder keeps: more than any step issues.
RECORDER_ENTRIES = 20_000
RECORDER_VARIABLE = "TORCH_FR_BUFFER_SIZE"  # read by torch with the first process group


class IssuedCollectives:
    """A context manager around the profiled step; ``rows`` are what was issued in it."""

    def __init__(self) -> None:
        self._is_gloo = dist.is_initialized() and dist.get_backend() == "gloo"
        self._point_to_point: list[Row] = []
        self._start_ns = 0
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        if self._is_gloo:
            self._watch("send")
            self._watch("recv")
        self._start_ns = time.time_ns()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def rows(self) -> list[Row]:
        """Return time in ns, event name, group name, number in the group, global rank of the peer.

        Numbers are of collectives only, peers of sends and receives.
        """
        if not self._is_gloo:
            return []
        found = [*_recorded(self._start_ns), *self._point_to_point]
        return sorted(found, key=lambda row: int(row[0] or 0))

    def _watch(self, kind: str) -> None:
        original: Callable[..., Any] = getattr(dist.ProcessGroup, kind)
        rows = self._point_to_point

        def watched(group: dist.ProcessGroup, tensors: Any, peer: int, tag: int) -> Any:
            rank = dist.get_global_rank(group, peer)
            rows.append([time.time_ns(), f"gloo:{kind}", group.group_name, None, rank])
            return original(group, tensors, peer, tag)

        setattr(dist.ProcessGroup, kind, watched)
        self._undo.callback(setattr, dist.ProcessGroup, kind, original)


def _recorded(start_ns: int) -> list[Row]:
    """Return the flight recorder's collectives since a time; none where torch has no recorder."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return []
    entries = msgspec.json.decode(dump(True, False)).get("entries", [])
    return [
        [
            entry["time_created_ns"],
            entry["profiling_name"],
            entry["process_group"][0],
            entry["collective_seq_id"],
            None,
        ]
        for entry in entries
        if entry["time_created_ns"] >= start_ns and not entry["is_p2p"]
    ]
