"""Parts of a run's section that come from its traces; each is empty for a run without traces."""

from collections.abc import Callable, Sequence

from reports.blocks import Block, Text
from reports.collective_parts import collectives
from reports.load import Run
from reports.operator_parts import launches, operators
from reports.trace_answer import TraceAnswer, trace_answer
from reports.trace_parts import causes, coverage, memory, picture, ranks, waterfall_table
from reports.waterfall import run_waterfall

PROFILED_TEXT = (
    "The profiler slows the step that it records: these shares are of that step, the measured "
    "times are without it."
)


def _answer(run: Run) -> TraceAnswer | None:
    if run.traces is None:
        return None
    return trace_answer(run.traces, run_waterfall(run.record, run.traces, run.steps))


def _from_traces(
    *parts: Callable[[TraceAnswer, str], Sequence[Block]],
) -> Callable[..., list[Block]]:
    """Return a part of a run that puts parts of an answer together."""

    def made(run: Run, anchor: str) -> list[Block]:
        answer = _answer(run)
        return [] if answer is None else [block for part in parts for block in part(answer, anchor)]

    return made


def where_time_goes(run: Run, anchor: str) -> list[Block]:
    """Return the waterfall and the sentence that says it, or why there is none."""
    if run.traces_missing:
        return [
            Text(text=f"The traces are not in this report: {run.traces_missing}", tone="warning")
        ]
    answer = _answer(run)
    if answer is None:
        return []
    return [*picture(answer, anchor), Text(text=f"{answer.verdict} {PROFILED_TEXT}")]


trace_causes = _from_traces(causes, waterfall_table, ranks)
trace_collectives = _from_traces(collectives)
trace_operators = _from_traces(operators, launches)
trace_memory = _from_traces(memory, coverage)
