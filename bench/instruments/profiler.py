"""The profiler window: one step in one gzipped Kineto trace per rank, outside the measured ones."""

from pathlib import Path
from typing import Self

import torch
from torch.profiler import ProfilerActivity, profile, schedule

TRACES_FOLDER = "traces"


class ProfilerWindow:
    """A context manager that records its body and writes ``traces/rank<N>.json.gz``."""

    def __init__(self, run_folder: Path, rank: int, device: torch.device) -> None:
        self.path = run_folder / TRACES_FOLDER / f"rank{rank}.json.gz"
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            # A schedule of one step is what makes the profiler annotate it (ProfilerStep#0).
            schedule=schedule(wait=0, warmup=0, active=1, repeat=1),
            record_shapes=True,
            profile_memory=True,
        )

    def __enter__(self) -> Self:
        self._profile.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._profile.__exit__(*error)
        if error[0] is None:
            self.path.parent.mkdir(exist_ok=True)
            self._profile.export_chrome_trace(str(self.path))

    def report(self) -> dict[str, str]:
        """Return where the trace lies, relative to the run's folder."""
        return {"trace": f"{TRACES_FOLDER}/{self.path.name}"}
