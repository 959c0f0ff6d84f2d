"""Summaries of ranks into one: matched collectives, stragglers, and what went wrong."""

from collections.abc import Iterable, Sequence

from reports.traces.collectives import across_ranks
from reports.traces.point_to_point import between_peers
from reports.traces.problems import TraceError
from reports.traces.summary import Failure, RankSummary, TraceSummary, overall


def merge(
    summaries: Iterable[RankSummary],
    failures: Sequence[Failure] = (),
    *,
    link_bytes_per_second: float | None = None,
) -> TraceSummary:
    """Put ranks together, in the order of their ranks.

    Raises TraceError when two summaries claim the same rank.
    """
    ranks = sorted(summaries, key=lambda summary: summary.rank)
    check_distinct([(summary.rank, summary.path) for summary in ranks])
    busy = {summary.rank: _busy(summary) for summary in ranks}
    cross = across_ranks(
        {summary.rank: summary.collectives for summary in ranks},
        busy,
        link_bytes_per_second=link_bytes_per_second,
    )
    sent = {summary.rank: summary.transfers for summary in ranks}
    peers = between_peers(sent, cross.clock_offsets_ns)
    return TraceSummary(ranks=ranks, cross=cross, failures=list(failures), peers=peers)


def _busy(summary: RankSummary) -> tuple[int, int, int]:
    row = overall(summary)
    compute = row.compute_ns + row.overlapped_communication_ns
    return row.duration_ns, compute, row.idle_host_ns


def check_distinct(owners: Sequence[tuple[int, str]]) -> None:
    """Raise TraceError naming both files when a rank has two."""
    seen: dict[int, str] = {}
    for rank, path in owners:
        if rank in seen:
            raise TraceError(
                f"two files of rank {rank}: {seen[rank]} and {path}; analyse them separately, or "
                "name them rank<N> when the files do not say their rank"
            )
        seen[rank] = path
