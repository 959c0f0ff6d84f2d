"""What is kept of a trace: small typed tables of one rank, and of all ranks together."""

from msgspec import Struct

from reports.traces.allocations import DeviceMemory
from reports.traces.breakdown import StepBreakdown
from reports.traces.collectives import CrossRank
from reports.traces.communication import Collective
from reports.traces.launches import LaunchTime
from reports.traces.memory_files import RankMemory
from reports.traces.point_to_point import PeerTime, Transfer
from reports.traces.problems import Warning
from reports.traces.tables import ClassTime, ModuleTime, NameTime, OperatorTime

SCHEMA = 2


class Coverage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the trace contains, so that "zero" and "not recorded" can be told apart."""

    device_events: bool
    operators: bool
    launches: bool
    steps: bool
    modules: bool
    memory: bool
    shapes: bool
    collective_metadata: bool


class RankSummary(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank's trace reduced to tables; JSON-serialisable, a few hundred kilobytes at most.

    lane: `device` (kernels) or `operators` (self time on a CPU). num_steps: profiler steps.
    breakdown: one row per window and, last, `all`. See the row types for columns and units.
    """

    schema: int = SCHEMA
    path: str
    rank: int
    rank_is_known: bool
    world_size: int | None
    backend: str | None
    devices: tuple[str, ...]
    versions: dict[str, str]
    lane: str
    num_events: int
    num_steps: int
    coverage: Coverage
    breakdown: list[StepBreakdown]
    classes: list[ClassTime]
    names: list[NameTime]
    operators: list[OperatorTime]
    modules: list[ModuleTime]
    collectives: list[Collective]
    transfers: list[Transfer] = []
    launches: list[LaunchTime]
    memory: list[DeviceMemory]
    warnings: list[Warning]


class Failure(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file that could not be analysed, and why."""

    path: str
    reason: str


class TraceSummary(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All ranks: their summaries by rank, and the tables that need several.

    peers: sends and receives from rank to rank; memory: what files that are about memory alone
    say, such as snapshots of an allocator.
    """

    schema: int = SCHEMA
    ranks: list[RankSummary]
    cross: CrossRank
    failures: list[Failure]
    peers: list[PeerTime] = []
    memory: list[RankMemory] = []


def overall(summary: RankSummary) -> StepBreakdown:
    """The breakdown over the whole window."""
    return summary.breakdown[-1]


def step_rows(summary: RankSummary) -> list[StepBreakdown]:
    """The rows of the profiler's steps only (or the whole window, when there are no steps)."""
    steps = [row for row in summary.breakdown if row.number is not None]
    return steps or [summary.breakdown[-1]]
