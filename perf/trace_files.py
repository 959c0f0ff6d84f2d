"""Trace files to measure with: a generated one, or a real one repeated until it is large."""

import gzip
import json
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any


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


def write_repeated(source: Path, target: Path, megabytes: float) -> None:
    """Write the events of a real trace one time after another, each time later and with new ids."""
    data = source.read_bytes()
    trace = json.loads(gzip.decompress(data) if source.suffix == ".gz" else data)
    events = [event for event in trace.pop("traceEvents") if isinstance(event, dict)]
    with target.open("w", encoding="utf-8") as file:
        file.write(json.dumps(trace, indent=2)[:-2] + ',\n  "traceEvents": [')
        for number, event in enumerate(_repeated(events)):
            lines = json.dumps(event, indent=4).replace("\n", "\n  ")
            file.write((",\n  " if number else "\n  ") + lines)
            if file.tell() > 1e6 * megabytes:
                break
        file.write('\n  ],\n  "traceName": "t.json"\n}\n')


def _repeated(events: list[dict[str, Any]]) -> Iterator[Mapping[str, Any]]:
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
    first = min(event["ts"] for event in timed)
    span = int(max(event["ts"] + event["dur"] for event in timed) - first) + 1000
    steps = {event["name"] for event in timed if event["name"].startswith("ProfilerStep#")}
    distances = {"ts": span, "ProfilerStep#": len(steps)} | {
        key: 1 + max((_argument(event, key) for event in events), default=0)
        for key in ("correlation", "External id")
    }
    yield from events
    for number in count(1):
        for event in events:
            if event.get("ph") != "M":
                yield _moved(event, {key: number * one for key, one in distances.items()})


def _argument(event: Mapping[str, Any], key: str) -> int:
    args = event.get("args")
    value = args.get(key) if isinstance(args, dict) else None
    return value if isinstance(value, int) else 0


def _moved(event: Mapping[str, Any], distances: Mapping[str, int]) -> Mapping[str, Any]:
    """The event later by a distance, its step and ids moved by theirs."""
    moved = dict(event)
    if "ts" in moved:
        moved["ts"] = round(moved["ts"] + distances["ts"], 3)
    prefix, _, step = str(moved.get("name", "")).partition("#")
    if prefix == "ProfilerStep":
        moved["name"] = f"ProfilerStep#{int(step) + distances['ProfilerStep#']}"
    ids = [key for key in ("correlation", "External id") if _argument(event, key) > 0]
    if ids:
        moved["args"] = event["args"] | {key: event["args"][key] + distances[key] for key in ids}
    return moved
