"""The groups of gloo's collectives: from what our collector notes, on made and on real ranks."""

from pathlib import Path
from typing import Any

import pytest

from bench.instruments.issued import RECORDER_ENTRIES, RECORDER_VARIABLE
from reports.run_traces import read_traces
from reports.traces.collectives import CollectiveTime
from reports.traces.issued import KEY
from reports.traces.reduce import reduce_trace
from tests.rank_pool import RankPool
from tests.traces.kineto import event, step, write

GROUPS = [
    {"pg_name": "0", "pg_desc": "default_pg", "ranks": [0, 1, 2, 3]},
    {"pg_name": "1", "pg_desc": "mesh_dp_shard", "ranks": [0, 2]},
    {"pg_name": "2", "pg_desc": "mesh_tp", "ranks": [0, 1]},
]
DP_THREAD, OTHER_DP_THREAD, TP_THREAD = 11, 12, 21


def gloo(name: str, start_us: float, dur_us: float, thread: int) -> dict[str, Any]:
    args = {"Input Dims": [[1000]], "Input type": ["float"]}
    return event(f"gloo:{name}", "user_annotation", start_us, dur_us, tid=thread, args=args)


def axes(folder: Path, transfers: list[dict[str, Any]], issued: list[list[Any]]) -> list[tuple]:
    """(axis, number in the group) of each transfer in the order of their starts."""
    info = {"backend": "gloo", "rank": 0, "world_size": 4, "pg_config": GROUPS}
    header = {"distributedInfo": info, KEY: issued}
    path = write(folder / "rank0.json", [step(1, 0, 1000), *transfers], **header)
    return [(one.axis, one.sequence) for one in reduce_trace(path).collectives]


def row(time: int, name: str, group: str, sequence: int) -> list[Any]:
    return [time, f"gloo:{name}", group, sequence, None]


def test_a_thread_of_gloo_tells_groups_apart_where_the_order_does_not(tmp_path: Path) -> None:
    """The second all-reduce over dp waits for a thread, so one over tp starts before it."""
    transfers = [
        gloo("all_gather", 5, 5, DP_THREAD),
        gloo("all_gather", 12, 5, TP_THREAD),
        gloo("all_reduce", 20, 100, DP_THREAD),
        gloo("all_reduce", 40, 10, TP_THREAD),
        gloo("all_reduce", 121, 10, DP_THREAD),
        gloo("all_reduce", 140, 10, TP_THREAD),
    ]
    issued = [
        row(1, "all_gather", "1", 1),
        row(2, "all_gather", "2", 1),
        row(3, "all_reduce", "1", 2),
        row(4, "all_reduce", "1", 3),
        row(5, "all_reduce", "2", 2),
        row(6, "all_reduce", "2", 3),
    ]

    assert axes(tmp_path, transfers, issued) == [
        ("dp_shard", 1),
        ("tp", 1),
        ("dp_shard", 2),
        ("tp", 2),
        ("dp_shard", 3),
        ("tp", 3),
    ]


def test_where_the_counts_differ_nothing_is_guessed(tmp_path: Path) -> None:
    transfers = [gloo("all_reduce", 5, 5, DP_THREAD), gloo("all_gather", 12, 5, TP_THREAD)]
    issued = [row(n, "all_reduce", "1", n) for n in range(2)] + [row(3, "all_gather", "2", 7)]

    assert axes(tmp_path, transfers, issued) == [("unknown", None), ("tp", 7)]


def mesh_case(folder: str) -> None:
    """A window with collectives over both axes of a 2 x 2 mesh, and over the world."""
    import torch
    import torch.distributed as dist
    from torch.distributed._functional_collectives import all_reduce, wait_tensor
    from torch.distributed.device_mesh import init_device_mesh

    from bench.instruments.profiler import ProfilerWindow

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    dp, tp = (mesh[axis].get_group() for axis in ("dp_shard", "tp"))
    x, gathered = torch.ones(1000), torch.empty(2000)
    dist.all_reduce(x, group=dp)
    with ProfilerWindow(Path(folder), dist.get_rank(), torch.device("cpu")):
        for _ in range(3):
            dist.all_reduce(x, group=tp)
            dist.all_reduce(x, group=dp)
        dist.all_gather_into_tensor(gathered, x, group=tp)
        wait_tensor(all_reduce(x, "sum", dp))
        dist.all_reduce(x)
        peer = 1 - dist.get_rank(tp)
        operations = [
            dist.P2POp(dist.isend, x, group=tp, group_peer=peer),
            dist.P2POp(dist.irecv, gathered[:1000], group=tp, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore")
def test_a_real_mesh_has_the_axis_and_the_number_of_every_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RECORDER_VARIABLE, str(RECORDER_ENTRIES))
    pool = RankPool(4)
    try:
        pool.run(mesh_case, str(tmp_path))
    finally:
        pool.close()
    traces = read_traces([tmp_path / "traces"], num_workers=1)
    table = {(one.axis, one.kind): one for one in traces.cross.table}
    exposed = {row.axis for row in traces.ranks[0].classes if row.name == "communication"}

    assert {key: counts(one) for key, one in table.items()} == {
        ("tp", "all_reduce"): (12, 12 * 4000, 6),
        ("dp_shard", "all_reduce"): (16, 16 * 4000, 8),
        ("tp", "all_gather"): (4, 4 * 8000, 2),
        ("world", "all_reduce"): (4, 4 * 4000, 1),
    }
    assert traces.cross.num_unmatched == {} and traces.cross.num_by_order == 0
    assert {one.group for one in traces.ranks[3].collectives} == {
        "[2, 3]",
        "[1, 3]",
        "[0, 1, 2, 3]",
    }
    routes = [(one.axis, one.source, one.destination, one.bytes) for one in traces.peers]
    assert routes == [("tp", *pair, 4000) for pair in ((0, 1), (1, 0), (2, 3), (3, 2))]
    assert all(one.num_matched == one.count == 1 for one in traces.peers)
    assert exposed == {"tp", "dp_shard", "world"}


def counts(one: CollectiveTime) -> tuple[int, int | None, int]:
    """Number over all ranks, bytes over all ranks, and occurrences that were matched."""
    return one.count, one.bytes, one.num_matched
