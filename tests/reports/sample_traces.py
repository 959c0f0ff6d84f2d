"""Two-rank traces with times that a pencil can check, written as the profiler does."""

from pathlib import Path
from typing import Any

from tests.traces.kineto import event, kernel, launch, write

START_US = 100.0  # a device event at time 0 counts as broken
STEP_US = 1000.0
END_US = 900.0  # of the all-reduce, from the start of the step
TRANSFER_US = 200.0


def rank_events(
    *,
    gemm_us: float,
    arrival_us: float,
    gemm: str = "nvjet_tst_128x256_64x4",
    end_us: float = END_US,
    norm_us: float = 0.0,
) -> list[dict[str, Any]]:
    """One step of 1 ms: a matrix product, an optional norm, then an all-reduce until ``end_us``."""
    args = {
        "Collective name": "allreduce",
        "In msg nelems": 1024,
        "Out msg nelems": 1024,
        "dtype": "Float",
        "Group size": 2,
        "Process Group Name": "0",
        "Process Group Description": "mesh_dp_shard",
        "Process Group Ranks": "[0, 1]",
    }
    norm = [
        launch(START_US + 20.0, 5.0, 3),
        kernel("rms_norm_kernel", START_US + gemm_us, norm_us, correlation=3),
    ]
    return [
        event("ProfilerStep#7", "user_annotation", START_US, STEP_US),
        event("aten::mm", "cpu_op", START_US, 10.0),
        launch(START_US + 1.0, 5.0, 1),
        launch(START_US + 12.0, 5.0, 2),
        kernel(gemm, START_US, gemm_us, correlation=1),
        *(norm if norm_us else []),
        kernel(
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
            START_US + arrival_us,
            end_us - arrival_us,
            correlation=2,
            stream=9,
            **args,
        ),
    ]


def write_pair(folder: Path, *ranks: dict[str, Any]) -> Path:
    """Write one trace a rank into ``folder`` and return it; each as ``rank_events`` takes it."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, options in enumerate(ranks):
        info = {"backend": "nccl", "rank": rank, "world_size": len(ranks)}
        path = folder / f"rank{rank}.json.gz"
        write(path, rank_events(**options), rank=rank, distributedInfo=info)
    return folder


def balanced(folder: Path, *, gemm_us: float = 300.0, **options: Any) -> Path:
    """Both ranks alike: the product, then an all-reduce of TRANSFER_US at the end of the step."""
    one = {"gemm_us": gemm_us, "arrival_us": END_US - TRANSFER_US} | options
    return write_pair(folder, one, one)


def late(folder: Path) -> Path:
    """Rank 1 computes 400 us longer than rank 0, which waits for it in the all-reduce."""
    return write_pair(
        folder,
        {"gemm_us": 300.0, "arrival_us": 300.0},
        {"gemm_us": 700.0, "arrival_us": 700.0},
    )
