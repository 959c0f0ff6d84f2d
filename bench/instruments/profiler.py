"""The profiler window: one step in one gzipped Kineto trace per rank, outside the measured ones.

Each rank reduces its own trace to a summary beside it, so that nothing central ever has to parse
the traces of all ranks.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import msgspec
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from bench.instruments.issued import IssuedCollectives
from bench.record import write_atomic
from reports.run_traces import TRACES_FOLDER, summary_path
from reports.traces.issued import KEY as ISSUED_KEY
from reports.traces.problems import TraceError
from reports.traces.reduce import reduce_trace
from reports.traces.sanitize import sanitize_metadata
from reports.traces.summary import RankSummary, overall


class ProfilerWindow:
    """A context manager that records its body and writes ``traces/rank<N>.json.gz``.

    All ranks begin together: what one of them spends on starting the profiler is not in the trace.
    ``metadata`` goes into the trace under ``titanbench``, in a form that leaves it valid JSON.
    """

    def __init__(
        self,
        run_folder: Path,
        rank: int,
        device: torch.device,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self._metadata = sanitize_metadata(dict(metadata or {}))
        self.path = run_folder / TRACES_FOLDER / f"rank{rank}.json.gz"
        self._issued = IssuedCollectives()
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            # A schedule of one step is what makes the profiler annotate it (ProfilerStep#1); the
            # profiler starts in the step before it, which is empty.
            schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
            record_shapes=True,
            profile_memory=True,
        )

    def __enter__(self) -> Self:
        self._profile.__enter__()
        if dist.is_initialized():
            dist.barrier()
        self._profile.step()
        self._profile.add_metadata_json("titanbench", self._metadata)
        self._issued.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._issued.__exit__()
        rows = self._issued.rows()
        if rows:
            self._profile.add_metadata_json(ISSUED_KEY, sanitize_metadata(rows))
        self._profile.__exit__(*error)
        if error[0] is None:
            self.path.parent.mkdir(exist_ok=True)
            self._profile.export_chrome_trace(str(self.path))

    def report(self) -> dict[str, Any]:
        """Reduce the trace and return where it lies and its exposed communication.

        A trace that cannot be reduced is no reason to fail a run: it becomes the ``reason``.
        """
        report = {"trace": f"{TRACES_FOLDER}/{self.path.name}"}
        try:
            summary = reduce_trace(self.path)
        except TraceError as error:
            return {**report, "reason": str(error)}
        write_atomic(summary_path(self.path), msgspec.json.encode(summary))
        return {**report, **exposed_communication(summary)}


def exposed_communication(summary: RankSummary) -> dict[str, float]:
    """Return the share of the profiled step with a collective and no computation, in percent."""
    step = overall(summary)
    if not step.duration_ns:
        return {}
    return {"exposed_communication_percent": 100 * step.exposed_communication_ns / step.duration_ns}
