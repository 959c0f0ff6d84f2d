"""The peak of a CPU: no data sheet states one, so its matrix products are timed, once.

The result is cached per CPU, number of threads and version of torch in the user's cache folder.
"""

import contextlib
import re
import time
from pathlib import Path

import msgspec
import torch

from bench.env import cache_folder, cpu_model
from bench.record import write_atomic

DTYPES = (torch.float32, torch.bfloat16)
SIZES = (512, 1024, 2048)
SECONDS_PER_SIZE = 0.3
LEAST_REPEATS = 3


class CpuPeak(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fastest product seen per dtype, in TFLOPS, and how it was measured."""

    float32: float
    bfloat16: float
    how: str


def cpu_peak(threads: int) -> CpuPeak:
    """Return the peak with ``threads`` threads, from the cache or measured now (seconds)."""
    return _cached(threads) or measure_again(threads)


def measure_again(threads: int) -> CpuPeak:
    """Measure, keep the best of now and before, and return it.

    A peak that was taken on a busy machine is too low, and an MFU against it too high.
    """
    now, before = measure(threads), _cached(threads)
    peak = now
    if before is not None:
        peak = CpuPeak(
            float32=max(now.float32, before.float32),
            bfloat16=max(now.bfloat16, before.bfloat16),
            how=now.how,
        )
    path = _cache_path(threads)
    with contextlib.suppress(OSError):  # a read-only home costs a few seconds a run, no more
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, msgspec.json.encode(peak))
    return peak


def _cached(threads: int) -> CpuPeak | None:
    """Return what was measured before; None if nothing was, or by another version of this."""
    try:
        return msgspec.json.decode(_cache_path(threads).read_bytes(), type=CpuPeak)
    except (OSError, msgspec.MsgspecError):
        return None


def measure(threads: int) -> CpuPeak:
    """Time square products of several sizes with ``threads`` threads and return the best."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        best = {dtype: max(_tflops(size, dtype) for size in SIZES) for dtype in DTYPES}
    finally:
        torch.set_num_threads(before)
    sizes = ", ".join(str(size) for size in SIZES)
    return CpuPeak(
        float32=best[torch.float32],
        bfloat16=best[torch.bfloat16],
        how=f"measured: best square matrix product of sizes {sizes}, threads={threads}, "
        f"torch {torch.__version__}, {cpu_model()}",
    )


def _tflops(size: int, dtype: torch.dtype) -> float:
    """Return the speed of the fastest of several products of two ``size`` x ``size`` matrices."""
    left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
    out = left @ right
    best = float("inf")
    repeats = 0
    begin = time.perf_counter()
    while repeats < LEAST_REPEATS or time.perf_counter() - begin < SECONDS_PER_SIZE:
        start = time.perf_counter()
        torch.mm(left, right, out=out)
        best = min(best, time.perf_counter() - start)
        repeats += 1
    return 2 * size**3 / best / 1e12


def _cache_path(threads: int) -> Path:
    """Return the file of this CPU, this number of threads and this torch."""
    name = f"{cpu_model()}-{threads}-threads-torch-{torch.__version__}"
    return cache_folder() / f"cpu-peak-{re.sub(r'[^A-Za-z0-9.+]+', '-', name)}.json"
