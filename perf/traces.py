"""Loader and analysis of traces against HolisticTraceAnalysis, in the same run on the same core.

    python perf/traces.py [--megabytes 200] [--ranks 64]

Prints a Markdown table. Every measurement is a process of its own, so that memory is that of one
loader: its peak resident size less what it had after its imports. Time is processor time of one
core for a single file, which other work on the machine does not change, and elapsed time for many.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

# TraceLens 171dd74 (2026-08) on a 2-core machine, its perf report on a V100 trace of 50 MB; it has
# no loader that can be timed alone, and is not on PyPI, so its figures are stated, not measured.
TRACELENS_50_MB = {"seconds": 14.0, "memory_mb": 900.0}


def kineto_text(megabytes: float, step_us: float = 2_000_000.0) -> str:
    """A training trace in the profiler's layout: operators, launches, kernels, flows, memory."""
    size = sum(len("".join(_operator_block(0.0, number))) for number in range(10)) / 10
    parts = [_HEADER]
    for number in range(int(megabytes * 1e6 / size)):
        if number % 10_000 == 0:
            parts.append(_STEP % (number // 10_000, number * 200.0, step_us - 1))
        parts += _operator_block(number * 200.0, number)
    return "".join(parts).rstrip().rstrip(",") + '\n  ],\n  "traceName": "t.json"\n}\n'


_HEADER = """
{
  "schemaVersion": 1,
  "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3", "numSms": 132}],
  "record_shapes": 1,
  "traceEvents": [
"""
_STEP = """  {
    "ph": "X", "cat": "user_annotation", "name": "ProfilerStep#%d", "pid": 100, "tid": 100,
    "ts": %.3f, "dur": %.3f,
    "args": {
      "External id": 1,"Record function id": 1, "Ev Idx": 0
    }
  },
"""
_OPERATOR = """  {
    "ph": "X", "cat": "cpu_op", "name": "%s", "pid": 100, "tid": 100,
    "ts": %.3f, "dur": %.3f,
    "args": {
      "External id": %d,"Record function id": 0, "Sequence number": %d, "Fwd thread id": 0,
      "Ev Idx": %d
    }
  },
"""
_LAUNCH = """  {
    "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 100, "tid": 100,
    "ts": %.3f, "dur": 4.125,
    "args": {
      "External id": %d, "cbid": 211, "correlation": %d
    }
  },
  {
    "ph": "s", "id": %d, "pid": 100, "tid": 100, "ts": %.3f,
    "cat": "ac2g", "name": "ac2g"
  },
"""
_KERNEL = """  {
    "ph": "X", "cat": "kernel", "name": "%s", "pid": 0, "tid": %d,
    "ts": %.3f, "dur": %.3f,
    "args": {
      "External id": %d, "queued": 0, "device": 0, "context": 1, "stream": %d, "correlation": %d,
      "registers per thread": 96, "shared memory": 0, "blocks per SM": 4.740741,
      "warps per SM": 75.851852,
      "grid": [512, 1, 1], "block": [512, 1, 1], "est. achieved occupancy %%": 75
    }
  },
  {
    "ph": "f", "id": %d, "pid": 0, "tid": %d, "ts": %.3f,
    "cat": "ac2g", "name": "ac2g", "bp": "e"
  },
"""
_OPERATORS = ("aten::mm", "aten::add", "c10d::allreduce_")
_KERNELS = (
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas", 7),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", 7),
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 20),
)


def _operator_block(start: float, number: int) -> list[str]:
    parts = []
    last = 3 if number % 10 == 0 else 2  # every tenth block ends with a collective
    for offset, (name, (kernel, stream)) in enumerate(
        zip(_OPERATORS[:last], _KERNELS[:last], strict=True)
    ):
        at, key = start + 60.0 * offset, 3 * number + offset
        parts.append(_OPERATOR % (name, at, 40.25, key, key, key))
        parts.append(_OPERATOR % ("aten::empty", at + 1, 3.5, key, key, key))
        parts.append(_LAUNCH % (at + 10, key, key, key, at + 10))
        parts.append(
            _KERNEL % (kernel, stream, at + 20, 50.375, key, stream, key, key, stream, at + 20)
        )
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=200.0)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--measure", nargs=2, metavar=("WHAT", "PATH"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        what, path = arguments.measure
        print(json.dumps(measure(MEASURED[what], Path(path))))
        return
    with tempfile.TemporaryDirectory() as folder:
        print(table(Path(folder), arguments.megabytes, arguments.ranks))


def table(folder: Path, megabytes: float, num_ranks: int) -> str:
    """Generate the traces, measure, and lay out the results."""
    single = folder / "rank0.json"
    single.write_text(kineto_text(megabytes), encoding="utf-8")
    size = single.stat().st_size / 1e6
    rows = [("titanbench, load", size, run("load", single))]
    rows.append(("titanbench, load and all analyses", size, run("reduce", single)))
    rows.append((f"HTA {version('HolisticTraceAnalysis')}, load", size, run("hta", single)))
    many = folder / "many"
    many.mkdir()
    shared = many / "rank0.json"
    shared.write_text(kineto_text(50.0), encoding="utf-8")
    for rank in range(1, num_ranks):
        (many / f"rank{rank}.json").hardlink_to(shared)
    total = num_ranks * shared.stat().st_size / 1e6
    rows.append((f"titanbench, {num_ranks} ranks x 50 MB", total, run("ranks", many)))
    rows.append(("TraceLens, perf report (stated)", 50.0, TRACELENS_50_MB))
    return _markdown(rows)


def _markdown(rows: list[tuple[str, float, dict[str, float]]]) -> str:
    hta = next(size / values["seconds"] for name, size, values in rows if name.startswith("HTA"))
    lines = [
        "| what | JSON (MB) | time (s) | MB/s | times HTA | memory added (MB) | MB per MB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, size, values in rows:
        rate, memory = size / values["seconds"], values["memory_mb"]
        lines.append(
            f"| {name} | {size:.0f} | {values['seconds']:.1f} | {rate:.1f} | {rate / hta:.1f} "
            f"| {memory:.0f} | {memory / size:.2f} |"
        )
    return "\n".join(lines)


def run(what: str, path: Path) -> dict[str, float]:
    """Measure in a fresh process; its result is the last line that it prints."""
    command = [sys.executable, str(Path(__file__).resolve()), "--measure", what, str(path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    )
    result: dict[str, float] = json.loads(done.stdout.decode().strip().splitlines()[-1])
    return result


def measure(prepare: Callable[[], Callable[[Path], object]], path: Path) -> dict[str, float]:
    """Seconds, and peak memory (MB, with all child processes) beyond that of the imports."""
    call = prepare()
    before, peak, stop = _tree_bytes(), [0], threading.Event()
    watcher = threading.Thread(target=_watch, args=(peak, stop), daemon=True)
    watcher.start()
    start = time.perf_counter(), time.process_time()
    result = call(path)
    elapsed, used = time.perf_counter() - start[0], time.process_time() - start[1]
    stop.set()
    watcher.join()
    assert result is not None
    seconds = elapsed if path.is_dir() else used
    return {"seconds": seconds, "memory_mb": max(0, peak[0] - before) / 1e6}


def _watch(peak: list[int], stop: threading.Event) -> None:
    while not stop.wait(0.02):
        peak[0] = max(peak[0], _tree_bytes())


def _tree_bytes() -> int:
    """Resident memory of this process and its children."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return sum(_resident_bytes(pid) for pid in [str(os.getpid()), *children])


def _resident_bytes(pid: str) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except (FileNotFoundError, ProcessLookupError):
        return 0  # a child that has just ended holds nothing


def _prepare_load() -> Callable[[Path], object]:
    from reports.traces.loader import load

    return load


def _prepare_reduce() -> Callable[[Path], object]:
    from reports.traces.reduce import reduce_trace

    return reduce_trace


def _prepare_ranks() -> Callable[[Path], object]:
    from reports.traces.analyze import analyze

    return lambda path: analyze([path])


def _prepare_hta() -> Callable[[Path], object]:
    from hta.trace_analysis import TraceAnalysis

    return lambda path: TraceAnalysis(trace_files={0: str(path)})


MEASURED = {
    "load": _prepare_load,
    "reduce": _prepare_reduce,
    "ranks": _prepare_ranks,
    "hta": _prepare_hta,
}

if __name__ == "__main__":
    main()
