"""Writes small Kineto traces for the tests, laid out as the profiler does."""

import gzip
import json
from pathlib import Path
from typing import Any

BASE_NS = 1_782_967_788_000_000_000


def event(name: str, cat: str, start_us: float, dur_us: float, **fields: Any) -> dict[str, Any]:
    """A complete event; `args` and any other field may be given."""
    tid = fields.pop("tid", 7 if cat in ("kernel", "gpu_memcpy", "gpu_memset") else 1)
    pid = fields.pop("pid", 0 if cat in ("kernel", "gpu_memcpy", "gpu_memset") else 100)
    head = {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid}
    return head | {"ts": start_us, "dur": dur_us} | fields


def kernel(
    name: str,
    start_us: float,
    dur_us: float,
    *,
    correlation: int = -1,
    stream: int = 7,
    **args: Any,
) -> dict[str, Any]:
    """A device kernel."""
    values = {"device": 0, "stream": stream, "correlation": correlation} | args
    return event(name, "kernel", start_us, dur_us, tid=stream, args=values)


def launch(start_us: float, dur_us: float, correlation: int, **fields: Any) -> dict[str, Any]:
    """The host call that launches the kernel with the same correlation."""
    args = {"correlation": correlation}
    return event("cudaLaunchKernel", "cuda_runtime", start_us, dur_us, args=args, **fields)


def step(number: int, start_us: float, dur_us: float) -> dict[str, Any]:
    """A profiler step."""
    return event(f"ProfilerStep#{number}", "user_annotation", start_us, dur_us)


def text(events: list[dict[str, Any]], *, rank: int | None = 0, **header: Any) -> str:
    """A file in the profiler's layout: indented, metadata first."""
    metadata = {"schemaVersion": 1, "baseTimeNanoseconds": BASE_NS} | header
    if rank is not None:
        info = {"backend": "nccl", "rank": rank, "world_size": 8}
        metadata["distributedInfo"] = header.get("distributedInfo", info)
    metadata = {key: value for key, value in metadata.items() if value is not None}
    body = ",\n".join("  " + json.dumps(one, indent=4).replace("\n", "\n  ") for one in events)
    head = json.dumps(metadata, indent=2)[:-2]
    return f'{head},\n  "traceEvents": [\n{body}\n  ],\n  "traceName": "t.json"\n}}'


def write(path: Path, events: list[dict[str, Any]], **header: Any) -> Path:
    """Write a trace, gzipped if the name says so."""
    return write_text(path, text(events, **header))


def write_text(path: Path, content: str | bytes) -> Path:
    """Write text or bytes, gzipped if the name says so."""
    data = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path
