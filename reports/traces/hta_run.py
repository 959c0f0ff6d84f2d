"""HTA's own analyses, each with its table or the reason why it gives none."""

import contextlib
import io
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from msgspec import Struct

from reports.traces.critical_path import CriticalPath, PathPart, critical_path
from reports.traces.hta_bridge import hta_analysis
from reports.traces.loader import Trace

KERNEL_GAP_NS = 30_000  # HTA's default of 30 us between consecutive kernels


class HtaTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Outcome of one analysis: rows with their columns (times in ns), or why there are none."""

    name: str
    columns: list[str] = []
    rows: list[list[str | int | float | None]] = []
    reason: str | None = None


Analyses = dict[str, Callable[[Any], Any]]


class HtaResult(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What HTA says about traces: its tables, and the critical paths of some ranks."""

    tables: list[HtaTable]
    paths: list[CriticalPath]


def run_hta(traces: Sequence[Trace], path_ranks: Sequence[int] | None = None) -> HtaResult:
    """Every table that HTA can make of loaded traces; its exceptions become reasons.

    No file is read. `path_ranks`: whose critical paths are wanted, by default the first rank's.
    """
    analysis = hta_analysis(traces)
    tables: list[HtaTable] = []
    for name, call in _analyses(traces).items():
        tables += _outcome(name, analysis, call)
    wanted = [traces[0].rank] if path_ranks is None else path_ranks
    paths = [critical_path(analysis, trace) for trace in traces if trace.rank in wanted]
    return HtaResult(tables=tables, paths=paths)


def _analyses(traces: Sequence[Trace]) -> Analyses:
    ranks = [trace.rank for trace in traces]
    return {
        "temporal_breakdown": lambda t: t.get_temporal_breakdown(visualize=False),
        "communication_overlap": lambda t: t.get_comm_comp_overlap(visualize=False),
        "idle_time": lambda t: t.get_idle_time_breakdown(
            ranks=ranks, consecutive_kernel_delay=KERNEL_GAP_NS, visualize=False
        )[0],
        "kernel_breakdown": lambda t: t.get_gpu_kernel_breakdown(visualize=False),
        "launch_stats": lambda t: t.get_cuda_kernel_launch_stats(ranks=ranks, visualize=False),
        "queue_length": lambda t: t.get_queue_length_summary(ranks=ranks),
        "memory_bandwidth": lambda t: t.get_memory_bw_summary(ranks=ranks),
        "user_annotations": lambda t: t.get_gpu_user_annotation_breakdown(
            use_gpu_annotation=False, visualize=False
        ),
        "stragglers": lambda t: pd.DataFrame({"rank": t.get_potential_stragglers()}),
    }


def _outcome(name: str, analysis: Any, call: Callable[[Any], Any]) -> list[HtaTable]:
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = call(analysis)
    except Exception as error:  # HTA raises nearly any type; each becomes a reason that is shown
        return [HtaTable(name=name, reason=f"HTA: {type(error).__name__}: {error}")]
    if isinstance(result, dict):
        parts = [_table(f"{name}_rank{key}", value) for key, value in result.items()]
        return parts or [_empty(name)]
    if isinstance(result, tuple):
        return [_table(f"{name}_{number}", part) for number, part in enumerate(result, 1)]
    return [_table(name, result)]


def _table(name: str, frame: Any) -> HtaTable:
    if not isinstance(frame, pd.DataFrame) or frame.empty:
        return _empty(name)
    frame = frame.reset_index() if any(part is not None for part in frame.index.names) else frame
    columns = [str(column).replace("(us)", "(ns)") for column in frame.columns]
    rows = [[_plain(value) for value in row] for row in frame.itertuples(index=False)]
    return HtaTable(name=name, columns=columns, rows=rows)


def _empty(name: str) -> HtaTable:
    return HtaTable(name=name, reason="HTA gives no rows: nothing of the kind is in the trace")


def _plain(value: Any) -> str | int | float | None:
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and value != value:
        return None
    return value if isinstance(value, (str, int, float)) or value is None else str(value)


def export_hta(result: HtaResult, folder: Path) -> list[Path]:
    """Write each table as CSV, and the reasons as `reasons.txt`; return what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    tables = [*result.tables, *map(_path_table, result.paths)]
    for table in tables:
        if table.reason is None:
            path = folder / f"{table.name}.csv"
            pd.DataFrame(table.rows, columns=table.columns).to_csv(path, index=False)
            written.append(path)
    reasons = [f"{table.name}: {table.reason}" for table in tables if table.reason is not None]
    if reasons:
        path = folder / "reasons.txt"
        path.write_text("\n".join(reasons) + "\n", encoding="utf-8")
        written.append(path)
    return written


def _path_table(path: CriticalPath) -> HtaTable:
    columns = list(PathPart.__struct_fields__)
    rows = [[getattr(part, name) for name in columns] for part in path.parts]
    return HtaTable(
        name=f"critical_path_rank{path.rank}", columns=columns, rows=rows, reason=path.reason
    )
