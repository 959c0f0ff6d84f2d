"""Differences of settings between two sides: what was changed, before what came of it."""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from bench.record import RunRecord
from reports.settings import environment_value, flatten
from reports.sides import Entry
from reports.traces.summary import TraceSummary

# Settings first: what is asked for. Then where it ran, and what is only recorded.
GROUPS = ("workload", "model", "plan", "precision", "training", "hardware", "environment")
# What differs between any two runs and explains nothing.
_INCIDENTAL = (
    "environment.cpu.load_average",
    "environment.ranks",
    "environment.hostname",
    "environment.argv",
    "environment.time",
    "environment.created",
    "hardware.peak_source",
)


class Setting(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One setting that differs; empty text where a side does not have it."""

    group: str
    name: str
    before: str
    after: str


def setting_differences(one: Entry, two: Entry) -> list[Setting]:
    """Return every setting that differs, of the records where there are two, else of the traces."""
    if one.record is not None and two.record is not None:
        sides = [dict(record_settings(entry.record)) for entry in (one, two) if entry.record]
    elif one.traces is not None and two.traces is not None:
        sides = [trace_settings(entry.traces) for entry in (one, two) if entry.traces]
    else:
        return []
    return [
        Setting(
            group=name.partition(".")[0],
            name=name.partition(".")[2],
            before=environment_value(name, sides[0].get(name, "")),
            after=environment_value(name, sides[1].get(name, "")),
        )
        for name in dict.fromkeys([*sides[0], *sides[1]])
        if sides[0].get(name, "") != sides[1].get(name, "")
    ]


def record_settings(record: RunRecord) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a record as dotted names and values, the asked-for ones first."""
    yield "workload.kind", record.kind
    parts: dict[str, Any] = msgspec.to_builtins(record)
    for group in GROUPS:
        for name, value in flatten(parts[group], group):
            if not name.startswith(_INCIDENTAL) and not _is_measured_peak(name, record):
                yield name, value


def _is_measured_peak(name: str, record: RunRecord) -> bool:
    """A CPU's peak is measured anew on each machine: it is no setting."""
    return name.startswith("hardware.peak_tflops") and record.hardware.details.get("kind") == "cpu"


def trace_settings(traces: TraceSummary) -> dict[str, Any]:
    """Return what traces say about the job that wrote them."""
    first = traces.ranks[0]
    return {
        "hardware.device": ", ".join(sorted({d for r in traces.ranks for d in r.devices[:1]})),
        "plan.world_size": first.world_size,
        "trace.ranks": len(traces.ranks),
        "trace.backend": first.backend,
        "trace.lane": first.lane,
        "trace.steps": first.num_steps,
        **{f"environment.{name}": value for name, value in sorted(first.versions.items())},
    }
