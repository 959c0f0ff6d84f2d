"""The report of files that are about memory alone, where there are no traces beside them."""

from collections.abc import Sequence

import msgspec

from reports.blocks import Part, Report, Section, Text, Tiles
from reports.numbers import quantity, short_bytes
from reports.trace_memory import memory_blocks, peak_tile, whose
from reports.trace_tables import RankDevice, memory_of_files
from reports.traces.summary import TraceSummary

BYTES_TEXT = (
    "Bytes alive are counted from an allocation to the request to free it. A kind that the source "
    "does not name follows from the phases that make and free a block."
)


def memory_report(traces: TraceSummary, sources: Sequence[str]) -> Report:
    """Return the report: the highest peak in a sentence, then every device of every file."""
    devices = memory_of_files(traces)
    highest = max(devices, key=lambda one: one.memory.peak_bytes)
    failed = [
        Text(text=f"Not analysed: {failure.path}: {failure.reason}", tone="bad")
        for failure in traces.failures
    ]
    parts = [
        Part(title=whose(one), blocks=list(memory_blocks(one, f"memory-{number}")))
        for number, one in enumerate(devices, 1)
    ]
    return Report(
        title="TitanBench memory analysis",
        subtitle=memory_verdict(highest),
        overview=[
            Text(text=", ".join(sources), tone="muted"),
            Tiles(tiles=[peak_tile(highest)]),
            *failed,
        ],
        sections=[
            Section(title="Memory", subtitle="", anchor="memory", badges=[], parts=parts),
        ],
        closing=Part(title="How memory is counted", blocks=[Text(text=BYTES_TEXT)]),
    )


def memory_verdict(one: RankDevice) -> str:
    """Return the peak and the largest kinds in it in a sentence."""
    peak = quantity(one.memory.peak_bytes / 2**30, "GiB")
    kinds = sorted(one.memory.peak_by_kind.items(), key=lambda pair: -pair[1])[:3]
    words = ", ".join(f"{kind.replace('_', ' ')} {short_bytes(n)}" for kind, n in kinds if n)
    return f"At most {peak} are alive on {whose(one)}: {words}."


def memory_json(traces: TraceSummary) -> bytes:
    """Return everything as one JSON document."""
    document = {
        "schema": 1,
        "memory": msgspec.to_builtins(traces.memory),
        "failures": msgspec.to_builtins(traces.failures),
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2)
