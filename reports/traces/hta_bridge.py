"""HolisticTraceAnalysis on our columns: no second parse, and integer nanoseconds as its time unit.

HTA rounds the microseconds that it parses; fed with integer nanoseconds its interval arithmetic is
exact. Streams are shifted by one where the default stream is 0 (ROCm) and set to 1 where there are
none (XPU), because HTA takes only streams above 0 for device work.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from hta.common.trace import Trace as HtaTrace
from hta.common.trace_symbol_table import TraceSymbolTable
from hta.trace_analysis import TraceAnalysis

from reports.traces.columns import CATEGORIES, NONE, Ints, mask_of
from reports.traces.links import DEVICE, match_ids
from reports.traces.loader import Trace
from reports.traces.steps import windows

_HTA_SPELLING = {"runtime": "cuda_runtime", "driver": "cuda_driver", "sync": "cuda_sync"}


def hta_analysis(traces: Sequence[Trace]) -> TraceAnalysis:
    """HTA's facade over loaded traces; every time that it returns is in nanoseconds.

    All profiler steps are kept (HTA itself drops the last one).
    """
    table = TraceSymbolTable()
    frames = {trace.rank: _frame(trace, table) for trace in traces}
    start = min((int(frame["ts"].min()) for frame in frames.values()), default=0)
    for frame in frames.values():
        frame["ts"] -= start
        frame["end"] -= start
    bridged = HtaTrace.__new__(HtaTrace)
    bridged.trace_files = {trace.rank: trace.path for trace in traces}
    bridged.trace_path = ""
    bridged.traces = frames
    bridged.symbol_table = table
    bridged.meta_data = {trace.rank: {} for trace in traces}
    bridged.min_ts = start
    bridged.is_parsed = True
    analysis = TraceAnalysis.__new__(TraceAnalysis)
    analysis.t = bridged
    return analysis


def _frame(trace: Trace, table: TraceSymbolTable) -> pd.DataFrame:
    events = trace.events
    names, categories = _symbols(trace, table)
    stream = _streams(trace)
    index_correlation = _linked_rows(trace)
    rows = np.arange(len(events), dtype=np.int64)
    frame = pd.DataFrame(
        {
            "index": rows,
            "cat": categories[events.category],
            "name": names[events.name],
            "pid": events.process.astype(np.int64),
            "tid": events.thread.astype(np.int64),
            "ts": events.start.copy(),
            "dur": events.duration.astype(np.int64),
            "end": events.end,
            "stream": stream,
            "correlation": events.correlation.astype(np.int64),
            "index_correlation": index_correlation,
            "iteration": _iterations(trace, index_correlation),
            "external_id": events.external_id.astype(np.int64),
            "bytes": events.bytes.astype(np.int64),
            "memory_bw_gbps": _bandwidth(events.bytes, events.duration),
            "wait_on_stream": np.full(len(events), NONE, dtype=np.int64),
            "wait_on_cuda_event_record_corr_id": np.full(len(events), NONE, dtype=np.int64),
            "input_dims": "-1",
            "input_type": "-1",
            "input_strides": "-1",
        },
        index=rows,
    )
    return frame


def _symbols(trace: Trace, table: TraceSymbolTable) -> tuple[Ints, Ints]:
    """HTA's number of each of our names and of each of our categories."""
    categories = [_HTA_SPELLING.get(name, name) for name in CATEGORIES]
    table.add_symbols([*trace.names, *categories])
    numbers = [table.sym_index[name] for name in trace.names] or [0]
    return np.array(numbers), np.array([table.sym_index[name] for name in categories])


def _streams(trace: Trace) -> Ints:
    events = trace.events
    device = mask_of(events, *DEVICE, "gpu_user_annotation", "sync")
    own = events.stream.astype(np.int64)
    shift = 1 if (own[device] == 0).any() else 0
    # A wait for the whole device is on no stream, and HTA knows it by that.
    nowhere = np.where(mask_of(events, "sync"), NONE, 1)
    own = np.where(own < 0, nowhere, own + shift)
    return np.where(device & mask_of(events, *DEVICE, "sync"), own, NONE)


def _linked_rows(trace: Trace) -> Ints:
    """Row of the launch for device events, of the first device event for launches; 0 or -1."""
    events = trace.events
    device = np.flatnonzero(mask_of(events, *DEVICE) & (events.correlation >= 0))
    waits = np.flatnonzero(mask_of(events, "sync") & (events.correlation >= 0))
    calls = np.flatnonzero(mask_of(events, "runtime", "driver") & (events.correlation >= 0))
    result = np.where(events.correlation >= 0, 0, NONE).astype(np.int64)
    for wanted, others in ((device, calls), (waits, calls), (calls, waits), (calls, device)):
        linked = match_ids(events.correlation, others, wanted)
        result[wanted] = np.where(linked == NONE, result[wanted], linked)
    return result


def _iterations(trace: Trace, index_correlation: Ints) -> Ints:
    """Profiler step of each event: by time on the host, by the launch on the device."""
    events = trace.events
    steps, has_steps = windows(events, trace.names)
    result = np.full(len(events), NONE, dtype=np.int64)
    if not has_steps:
        return result
    for step in steps:
        if step.number is not None:
            result[(events.start >= step.start) & (events.start < step.stop)] = step.number
    device = np.flatnonzero(mask_of(events, *DEVICE))
    launch = index_correlation[device]
    result[device] = np.where(launch > 0, result[launch], NONE)
    return result


def _bandwidth(size: Ints, duration_ns: Ints) -> np.ndarray:
    """GB/s of copies; -1 for what is no copy."""
    rate = np.maximum(size, 0) / np.maximum(duration_ns, 1)
    return np.where(size > 0, rate, -1.0)
