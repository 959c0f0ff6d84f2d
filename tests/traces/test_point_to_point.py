"""Sends and receives over ranks: matched by peer and order, travel told from waiting."""

from pathlib import Path
from typing import Any

import pytest

from reports.traces.point_to_point import PeerTime, Transfer, between_peers
from reports.traces.reduce import reduce_trace
from tests.traces.kineto import event, kernel, step, write


def one(kind: str, peer: int | None, start: int, stop: int, **fields: Any) -> Transfer:
    values = {"axis": "pp", "group": "[0, 1]", "bytes": 4096} | fields
    return Transfer(kind=kind, peer=peer, start_ns=start, duration_ns=stop - start, **values)


def between(ranks: dict[int, list[Transfer]], **offsets: int) -> list[PeerTime]:
    return between_peers(ranks, {rank: offsets.get(f"rank{rank}", 0) for rank in ranks})


def times(row: PeerTime) -> tuple[int | None, int | None, int | None]:
    return row.transfer_ns, row.sender_wait_ns, row.receiver_wait_ns


def test_a_late_receiver_lets_the_sender_wait() -> None:
    (row,) = between({0: [one("send", 1, 0, 105)], 1: [one("recv", 0, 60, 110)]})

    assert (row.source, row.destination, row.count, row.num_matched) == (0, 1, 1, 1)
    assert times(row) == (50, 60, 0)


def test_a_late_sender_lets_the_receiver_wait() -> None:
    (row,) = between({0: [one("send", 1, 80, 105)], 1: [one("recv", 0, 20, 110)]})

    assert times(row) == (30, 0, 60)


def test_data_that_arrived_before_the_receiver_asked_took_no_time_of_it() -> None:
    """The sender is done at 30, after its own 20 ns; the receiver asks at 70 and has them at 72."""
    (row,) = between({0: [one("send", 1, 10, 30)], 1: [one("recv", 0, 70, 72)]})

    assert times(row) == (2, 20, 0)


def test_transfers_of_one_route_are_matched_in_order_and_added_up() -> None:
    sends = [one("send", 1, 0, 10), one("send", 1, 100, 140)]
    receives = [one("recv", 0, 5, 10), one("recv", 0, 90, 145)]
    back = [one("send", 0, 200, 220)], [one("recv", 1, 200, 230)]
    rows = between({0: sends + back[1], 1: receives + back[0]})

    assert [(row.source, row.destination, row.bytes) for row in rows] == [
        (0, 1, 2 * 4096),
        (1, 0, 4096),
    ]
    assert times(rows[0]) == (5 + 45, 5, 10)
    assert times(rows[1]) == (30, 0, 0)


def test_a_clock_that_is_ahead_is_taken_out() -> None:
    ranks = {0: [one("send", 1, 0, 105)], 1: [one("recv", 0, 1060, 1110)]}
    (row,) = between(ranks, rank1=1000)

    assert times(row) == (50, 60, 0)


def test_unequal_numbers_are_not_matched() -> None:
    (row,) = between({0: [one("send", 1, 0, 9), one("send", 1, 20, 30)], 1: [one("recv", 0, 0, 9)]})

    assert (row.count, row.num_matched, row.transfer_ns) == (2, 0, None)


def test_what_has_no_peer_is_counted_and_not_matched() -> None:
    both = [one("point_to_point", None, 0, 10, bytes=None)]
    (row,) = between({0: both, 1: both})

    assert (row.source, row.destination, row.count) == (None, None, 2)
    assert times(row) == (None, None, None) and row.bytes is None


@pytest.mark.parametrize("rank", [0, 1])
def test_peers_of_nccl_are_read_where_the_trace_has_them(tmp_path: Path, rank: int) -> None:
    args = {
        "Collective name": ("send", "recv")[rank],
        "In msg nelems": 1024,
        "dtype": "BFloat16",
        "Group size": 2,
        "Process Group Name": "3",
        "Process Group Description": "mesh_pp",
        "Process Group Ranks": "[4, 5]",
        "Src Rank": 4,
        "Dst Rank": 5,
    }
    rows = [step(1, 0, 100), event("aten::mm", "cpu_op", 1, 2)]
    rows.append(kernel("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 10, 5, **args))
    (transfer,) = reduce_trace(write(tmp_path / "rank4.json", rows, rank=4 + rank)).transfers

    assert (transfer.axis, transfer.peer, transfer.bytes) == ("pp", 5 - rank, 2048)
