"""The part on routing: how evenly experts were loaded, how far tokens went, what was dropped."""

from typing import Any

from reports.blocks import Block, Cell, Column, Table, Text
from reports.load import Run
from reports.numbers import number

NEIGHBOURS = (
    "Routing `balanced`, as published, sends a token's experts to neighbours: a token visits fewer "
    "ranks than a learned choice would send it to, so exchanges between experts' ranks are "
    "cheaper. `balanced_strided` spreads them."
)


def routing(run: Run, anchor: str) -> list[Block]:
    """Return the routing of the counted step; nothing without experts."""
    counts = run.record.counters.get("routing")
    if not counts:
        return []
    columns = [Column(title="Routing"), Column(title="Value", is_numeric=True)]
    caption = "Choices of experts in the counted step, of all ranks."
    notes = [Text(text=NEIGHBOURS)] if run.record.workload.routing == "balanced" else []
    return [Table(columns=columns, rows=rows(counts), caption=caption), *notes]


def rows(counts: dict[str, Any]) -> list[list[Cell]]:
    """Return a row for each count that `bench.expert_load.combine_routing` makes."""
    ranks = f"of {counts['expert_ranks']:,} that have experts"
    shown = [
        ("Tokens of an expert, mean", counts["mean_load"], "over experts and layers"),
        ("Tokens of an expert, most", counts["max_load"], ""),
        ("Most over mean", counts["max_over_mean"], "in the least even layer"),
        ("Ranks that a token visits", counts["ranks_per_token"], ranks),
        ("Choices dropped", counts["dropped_tokens"], ""),
    ]
    return [
        [Cell(text=name), Cell(text=number(value), note=note, value=float(value))]
        for name, value, note in shown
    ]
