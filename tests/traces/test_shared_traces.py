"""Kineto files of real jobs: every one gives an analysis or a reason, and known facts come out.

The files lie beside the repository and are no part of it; without them these tests are skipped.
"""

from functools import cache
from pathlib import Path

import pytest

from reports.traces.analyze import analyze
from reports.traces.breakdown import PARTS
from reports.traces.problems import TraceError
from reports.traces.reduce import reduce_trace
from reports.traces.summary import RankSummary, TraceSummary, overall

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
FILES = sorted(TRACES.rglob("*.json.gz")) if TRACES.exists() else []
pytestmark = pytest.mark.skipif(not FILES, reason="no real traces beside the repository")


@cache
def reduced(name: str) -> RankSummary:
    return reduce_trace(TRACES / name)


def kinds_of(summary: RankSummary) -> dict[str, int]:
    return {warning.kind: warning.count for warning in summary.warnings}


def test_every_file_gives_an_analysis_whose_parts_add_up_or_a_reason() -> None:
    for path in FILES:
        try:
            summary = reduced(str(path.relative_to(TRACES)))
        except TraceError as error:
            assert str(path) in str(error)
            continue
        for row in summary.breakdown:
            assert sum(getattr(row, name) for name in PARTS) == row.duration_ns > 0, path


@pytest.mark.parametrize(
    ("name", "warnings"),
    [
        ("array", {"unknown_rank": 1}),
        ("be", {}),
        ("ctrl", {"control_characters": 36}),
        ("latin1", {"invalid_utf8": 81}),
        ("nan", {"not_a_number": 1}),
        ("nodur", {"no_duration": 447}),
        ("strts", {}),
        ("trunc", {"truncated": 1}),
        ("truncgz", {"truncated": 1}),
        ("torch213_real_quote_in_name", {"quotes": 1, "unknown_rank": 1, "no_steps": 1}),
    ],
)
def test_each_broken_file_gives_one_counted_warning_per_fault(
    name: str, warnings: dict[str, int]
) -> None:
    assert kinds_of(reduced(f"synthetic_bad/{name}.json.gz")) == warnings


@pytest.mark.parametrize("name", ["ctrl", "latin1", "nan", "strts", "array"])
def test_a_mended_file_has_the_breakdown_of_the_sound_one(name: str) -> None:
    sound = reduced("cpu_gloo_torch213/ddp2_mem_stack_rank0.json.gz")
    mended = reduced(f"synthetic_bad/{name}.json.gz")

    assert mended.num_events == sound.num_events
    for part in PARTS:
        assert getattr(overall(mended), part) == getattr(overall(sound), part)


def test_pairs_of_begin_and_end_agree_but_for_the_rounding_of_their_ends() -> None:
    """Each end was written as a rounded double, so a duration may be off by a nanosecond."""
    sound = overall(reduced("cpu_gloo_torch213/ddp2_mem_stack_rank0.json.gz"))
    paired = overall(reduced("synthetic_bad/be.json.gz"))

    assert all(abs(getattr(paired, part) - getattr(sound, part)) < 10 for part in PARTS)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("hta/cpu_only_gloo_w300_rank34.json.gz", 34),
        ("hta/memory_events_v100_w2_rank1.json.gz", 1),
        ("hta/sampled_128w_rank-1.json.gz", 1),
        ("hta/trace_diff_control_a100_w8_rank3.json.gz", 3),
        ("tracelens/b200/eager_trace.json.gz", 0),
    ],
)
def test_ranks_of_real_files(name: str, rank: int) -> None:
    assert (reduced(name).rank, reduced(name).rank_is_known) == (rank, True)


def test_compute_and_idle_of_real_files_are_those_of_interval_arithmetic() -> None:
    """HTA reports 10 153 us of compute for the first, ours and the sum of kernels say 10 772 us."""
    eager = overall(reduced("tracelens/b200/eager_trace.json.gz"))
    busy = eager.compute_ns + eager.overlapped_communication_ns + eager.exposed_communication_ns
    resnet = overall(reduced("tracelens/mi300/resnet_act_checkpoint.json.gz"))

    # HTA counts multimem_all_reduce_kernel as compute, hence its figure holds for the sum less
    # the only nccl kernel (21.6 us).
    assert busy // 1000 - 10_772 in range(30)
    assert resnet.exposed_communication_ns > resnet.compute_ns


def test_recomputation_shows_in_a_trace_with_activation_checkpoints() -> None:
    summary = reduced("tracelens/mi300/resnet_act_checkpoint.json.gz")
    phases = {row.phase for row in summary.classes}
    recomputed = sum(r.exclusive_ns for r in summary.modules if r.phase == "recompute")
    forward = sum(r.exclusive_ns for r in summary.modules if r.phase == "forward")

    assert {"forward", "backward", "recompute"} <= phases
    # Only the blocks are recomputed, not the stem and head: nearly as much as the forward pass.
    assert 0.5 < recomputed / forward < 1.1


def test_collectives_of_resnet_are_read_from_the_metadata_and_the_rest_counted() -> None:
    """17 kernels, 12 with metadata; each step reduces the same two buckets of BF16 gradients."""
    summary = reduced("tracelens/mi300/resnet_act_checkpoint.json.gz")
    sizes = [one.bytes for one in summary.collectives if one.kind == "all_reduce"]

    assert len(summary.collectives) == 17
    assert kinds_of(summary)["unlinked_collectives"] == 5
    assert set(sizes) == {2 * 2_873_320, 2 * 8_816_192}
    assert {one.axis for one in summary.collectives} == {"world"}


@cache
def dlrm() -> TraceSummary:
    return analyze([TRACES / "param_dlrm8"], num_workers=1)


def test_collectives_of_eight_real_ranks_are_matched_without_metadata() -> None:
    """Kernels are called SendRecv; the host's annotation says that they are all-to-alls.

    All ranks end a collective within 6 us of each other, so the match is right and one clock holds.
    """
    cross = dlrm().cross
    kinds = [(one.kind, one.bytes) for one in cross.matched]

    assert kinds == [
        ("all_to_all", 4 * 6144),
        ("all_to_all", 8 * 24),
        ("all_to_all", 4 * 384),
        ("all_to_all", 4 * 3392),
        ("all_reduce", 4 * 394241),
        ("all_to_all", 4 * 6144),
        ("all_reduce", 4 * 112),
        ("all_reduce", 4 * 226960),
    ]
    assert cross.num_unmatched == {} and set(cross.clock_offsets_ns.values()) == {0}
    assert all(one.whole and one.num_ranks == 8 for one in cross.matched)


def test_the_transfer_of_real_all_to_alls_is_microseconds_the_rest_is_waiting() -> None:
    """Rank 1 spends 7 635 us in the first, rank 7 only 10 us: it comes last and waits for none."""
    first = dlrm().cross.matched[0]

    assert (first.last_rank, first.transfer_ns, first.skew_ns) == (7, 10_000, 7_624_000)


def test_the_straggler_of_real_ranks_is_the_one_that_arrives_last() -> None:
    """Rank 7 starts its step 7.5 ms after rank 1 and comes last to the first five collectives,
    500 us after everyone else to each of the first two, and then hardly waits anywhere."""
    first, *others = dlrm().cross.stragglers

    assert (first.rank, first.num_last) == (7, 5)
    assert first.delay_ns == 1_309_000 and first.first_ns == 505_000
    assert first.cause == "host"
    assert {row.cause for row in others} == {"none"}


def test_a_gloo_rank_that_was_slowed_by_20_ms_is_named() -> None:
    names = [f"cpu_gloo_torch213/ddp2_plain_rank{rank}.json.gz" for rank in range(2)]
    cross = analyze([TRACES / name for name in names], num_workers=1).cross
    first = cross.stragglers[0]
    reduces = [one for one in cross.matched if one.kind == "all_reduce"]

    assert (first.rank, first.cause) == (1, "host")
    assert [one.last_rank for one in reduces] == [1, 1, 1]
    assert all(20_000_000 < one.skew_ns < 21_000_000 for one in reduces)


def test_two_profiles_of_one_rank_in_a_folder_are_refused() -> None:
    with pytest.raises(TraceError, match="two files of rank 0"):
        analyze([TRACES / "cpu_gloo_torch213"], num_workers=1)


def test_memory_of_a_real_file_adds_up_to_the_allocators_total() -> None:
    (device, _) = reduced("hta/memory_events_v100_w2_rank1.json.gz").memory

    assert device.peak_bytes == sum(device.peak_by_kind.values())
    assert device.num_unmatched_frees >= 0
    assert all(sum(point.by_kind) == point.total_bytes for point in device.points)
