"""Collectives over ranks: alignment, clocks, waiting told from transfer, bandwidth, stragglers."""

import msgspec
import numpy as np
import pytest

from reports.traces.collectives import CrossRank, across_ranks, bus_factor
from reports.traces.communication import Collective, axis_of, kind_of
from reports.traces.sizes import item_bytes, tensor_bytes

NUM_RANKS, NUM_COLLECTIVES = 8, 200
TRANSFER_NS, PERIOD_NS = 295_300, 620_000


def series(seed: int = 0, late_rank: int | None = None, late_ns: int = 0) -> dict[int, list]:
    """All-reduces of 8 ranks that end everywhere at once; arrivals spread by up to 80 us."""
    generator = np.random.default_rng(seed)
    ranks: dict[int, list[Collective]] = {rank: [] for rank in range(NUM_RANKS)}
    for number in range(NUM_COLLECTIVES):
        period = int(generator.integers(-90_000, 90_000))
        arrivals = number * PERIOD_NS + period + generator.integers(0, 80_000, NUM_RANKS)
        if late_rank is not None:
            arrivals[late_rank] += late_ns
        end = int(arrivals.max()) + TRANSFER_NS
        for rank, arrival in enumerate(arrivals.tolist()):
            ranks[rank].append(one_collective(arrival, end - arrival))
    return ranks


def one_collective(start: int, duration: int, **fields: object) -> Collective:
    values = {
        "kind": "all_reduce",
        "axis": "dp",
        "group": "[0, 1, 2, 3, 4, 5, 6, 7]",
        "group_size": NUM_RANKS,
        "bytes": 2_621_440,
        "sequence": None,
        "start_ns": start,
        "duration_ns": duration,
        "exposed_ns": duration,
        "step": "all",
        "source": "metadata",
    }
    return Collective(**(values | fields))


def cross(ranks: dict[int, list[Collective]], link: float | None = None) -> CrossRank:
    busy = dict.fromkeys(ranks, (NUM_COLLECTIVES * PERIOD_NS, 0, 0))
    return across_ranks(ranks, busy, link_bytes_per_second=link)


def transfers(result: CrossRank) -> set[int]:
    return {one.transfer_ns for one in result.matched}


def test_the_last_arrivals_own_duration_is_the_transfer_and_nobody_is_blamed() -> None:
    result = cross(series())

    assert len(result.matched) == NUM_COLLECTIVES
    assert transfers(result) == {TRANSFER_NS}
    assert result.num_unmatched == {} and result.shifts == {}
    assert set(result.clock_offsets_ns.values()) == {0}
    assert max(row.delay_share for row in result.stragglers) < 0.01
    assert {row.cause for row in result.stragglers} == {"none"}


def test_bus_bandwidth_follows_nccl_tests_and_is_set_against_the_link() -> None:
    result = cross(series(), link=900e9 / 2)
    rate = 2_621_440 / (TRANSFER_NS * 1e-9) * 2 * 7 / 8

    assert result.table[0].bus_bandwidth == pytest.approx(rate)
    assert result.table[0].link_fraction == pytest.approx(rate / 450e9)
    assert [bus_factor(kind, 4) for kind in ("all_reduce", "all_gather", "broadcast")] == [
        1.5,
        0.75,
        1.0,
    ]


def test_a_window_that_misses_the_first_collective_makes_no_false_straggler() -> None:
    """TraceLens calls rank 3 a straggler with 99.5 % here, and 580 us of end skew."""
    ranks = series()
    ranks[3] = ranks[3][1:]
    result = cross(ranks)

    assert transfers(result) == {TRANSFER_NS}
    assert result.shifts == {"[0, 1, 2, 3, 4, 5, 6, 7]|all_reduce": {3: 1}}
    assert result.num_unmatched == {rank: 1 for rank in range(8) if rank != 3}
    assert {row.cause for row in result.stragglers} == {"none"}


def test_the_first_rank_may_be_the_one_that_misses_collectives() -> None:
    ranks = series()
    ranks[0] = ranks[0][2:]
    result = cross(ranks)

    assert transfers(result) == {TRANSFER_NS}
    assert len(result.matched) == NUM_COLLECTIVES - 2


def test_a_clock_that_is_ahead_is_found_and_taken_out() -> None:
    """TraceLens reports 5 063 us of start skew and blames rank 7."""
    ahead = 5_000_000
    ranks = series()
    for rank in range(4, 8):
        ranks[rank] = [
            msgspec.structs.replace(one, start_ns=one.start_ns + ahead) for one in ranks[rank]
        ]
    result = cross(ranks)
    offsets = result.clock_offsets_ns

    assert transfers(result) == {TRANSFER_NS}
    assert {offsets[high] - offsets[low] for high in range(4, 8) for low in range(4)} == {ahead}
    assert {row.cause for row in result.stragglers} == {"none"}


def test_a_rank_that_always_comes_late_is_named_with_its_share() -> None:
    late = 400_000
    ranks = series(late_rank=5, late_ns=late)
    window = NUM_COLLECTIVES * PERIOD_NS
    busy = {rank: (window, 10_000, late * 190 if rank == 5 else 0) for rank in ranks}
    first = across_ranks(ranks, busy).stragglers[0]

    assert (first.rank, first.num_last, first.cause) == (5, NUM_COLLECTIVES, "host")
    assert 0.9 * late < first.delay_ns / NUM_COLLECTIVES < 1.1 * late
    assert first.delay_share == pytest.approx(first.delay_ns / window)


def test_a_late_profiler_window_is_not_called_communication() -> None:
    """One collective of 17.5 s is the start of the windows, not a slow link."""
    ranks = series()
    for rank in range(7):
        first = ranks[rank][0]
        early = first.start_ns - 17_500_000_000
        ranks[rank][0] = msgspec.structs.replace(
            first, start_ns=early, duration_ns=first.duration_ns + 17_500_000_000
        )
    result = cross(ranks)

    assert transfers(result) == {TRANSFER_NS} or max(transfers(result)) < 2 * TRANSFER_NS
    assert result.stragglers[0].rank == 7
    assert result.stragglers[0].cause == "window start"


def test_sequence_numbers_decide_when_every_rank_has_them() -> None:
    ranks = series()
    for rank in ranks:
        ranks[rank] = [
            msgspec.structs.replace(one, sequence=number) for number, one in enumerate(ranks[rank])
        ]
    ranks[2] = ranks[2][5:]
    result = cross(ranks)

    assert result.num_by_sequence == NUM_COLLECTIVES - 5 and result.num_by_order == 0
    assert transfers(result) == {TRANSFER_NS}
    assert result.num_unmatched == {rank: 5 for rank in range(8) if rank != 2}


def test_groups_of_one_name_over_different_ranks_stay_apart() -> None:
    ranks = {
        rank: [one_collective(0, 10, group=f"[{rank // 2 * 2}, {rank // 2 * 2 + 1}]", group_size=2)]
        for rank in range(4)
    }

    assert sorted(one.group for one in cross(ranks).matched) == ["[0, 1]", "[2, 3]"]


def test_ranks_missing_from_the_traces_are_said() -> None:
    ranks = {rank: one for rank, one in series().items() if rank < 2}

    assert {one.whole for one in cross(ranks).matched} == {False}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("allreduce", "all_reduce"),
        ("nccl:_all_gather_base", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("allgather_into_tensor_coalesced", "all_gather"),
        (
            "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "all_reduce",
        ),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)", "point_to_point"),
        ("gloo:all_to_all", "all_to_all"),
        ("c10d::alltoall_base_", "all_to_all"),
        ("gloo:barrier", "barrier"),
        ("c10d::send", "send"),
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", "other"),
    ],
)
def test_kinds_are_read_from_every_spelling(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_axes_come_from_the_groups_description() -> None:
    described = ["mesh_dp_shard", "mesh_tp", "EXPERT_MODEL_PARALLEL_GROUP", "default_pg", ""]

    assert [axis_of(text, 4) for text in described] == [
        "dp_shard",
        "tp",
        "ep",
        "world",
        "group of 4",
    ]
    assert axis_of("", None) == "unknown"


def test_sizes_follow_from_shapes_and_types() -> None:
    assert tensor_bytes('[[394241]] ["float"]') == 4 * 394241
    assert tensor_bytes('[[8, 16], []] ["c10::BFloat16", ""]') == 2 * 128
    assert tensor_bytes('[[3]] ["unknown"]') is None
    assert [item_bytes(name) for name in ("Float8_e4m3fn", "BFloat16", "long int", None)] == [
        1,
        2,
        8,
        None,
    ]
