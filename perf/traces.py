"""Loader and analysis of traces against HolisticTraceAnalysis, in the same run on the same core.

    python perf/traces.py [--megabytes 200] [--ranks 64] [--repeat TRACE]

Prints a Markdown table, of a generated trace or of a real one repeated to the same size. Every
measurement is a process of its own, so that memory is that of one loader: its peak resident size
less what it had after its imports. Time is processor time of one core for a single file, which
other work on the machine changes little, and elapsed time for many.
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

from trace_files import kineto_text, write_repeated

Row = tuple[str, float, dict[str, float]]
ROOT = Path(__file__).resolve().parents[1]
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

# TraceLens 171dd74 (2026-08) on a 2-core machine, its perf report on a V100 trace of 50 MB; it has
# no loader that can be timed alone, and is not on PyPI, so its figures are stated, not measured.
TRACELENS_50_MB = {"seconds": 14.0, "memory_mb": 900.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=200.0)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--repeat", type=Path, help="a real trace, plain or gzipped")
    parser.add_argument("--measure", nargs=2, metavar=("WHAT", "PATH"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        what, path = arguments.measure
        print(json.dumps(measure(MEASURED[what], Path(path))))
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = single_rows(_trace(Path(folder), arguments.megabytes, arguments.repeat))
        if arguments.ranks and not arguments.repeat:
            rows.append(ranks_row(Path(folder) / "many", arguments.ranks))
    rows.append(("TraceLens, perf report (stated)", 50.0, TRACELENS_50_MB))
    print(f"load average {os.getloadavg()[0]:.1f}\n\n{_markdown(rows)}")


def _trace(folder: Path, megabytes: float, repeat: Path | None) -> Path:
    path = folder / "rank0.json"
    if repeat is None:
        path.write_text(kineto_text(megabytes), encoding="utf-8")
    else:
        write_repeated(repeat, path, megabytes)
    return path


def single_rows(single: Path) -> list[Row]:
    """One trace: ours before and after HTA, of which the mean, so that all met the same load."""
    size = single.stat().st_size / 1e6
    before = [run(what, single) for what in ("load", "reduce")]
    hta = run("hta", single)
    load, reduce = (
        _mean(one, run(what, single)) for what, one in zip(("load", "reduce"), before, strict=True)
    )
    return [
        ("titanbench, load", size, load),
        ("titanbench, load and all analyses", size, reduce),
        (f"HTA {version('HolisticTraceAnalysis')}, load", size, hta),
    ]


def _mean(first: dict[str, float], second: dict[str, float]) -> dict[str, float]:
    return {key: (value + second[key]) / 2 for key, value in first.items()}


def ranks_row(folder: Path, num_ranks: int) -> Row:
    """Many ranks, which are links to one file."""
    folder.mkdir()
    shared = folder / "rank0.json"
    shared.write_text(kineto_text(50.0), encoding="utf-8")
    for rank in range(1, num_ranks):
        (folder / f"rank{rank}.json").hardlink_to(shared)
    total = num_ranks * shared.stat().st_size / 1e6
    return f"titanbench, {num_ranks} ranks x 50 MB", total, run("ranks", folder)


def _markdown(rows: list[Row]) -> str:
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
