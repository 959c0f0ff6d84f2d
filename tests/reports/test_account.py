"""The account of a step: every nanosecond has one cause, and a late rank is named."""

import pytest

from reports.account import CALLS, COMPUTE, HOST, IDLE, LATE, TRANSFER, account, by_cause
from reports.run_traces import read_traces
from tests.reports.sample_traces import balanced, late
from tests.traces.kineto import event, write


def lines_of(folder):
    books = account(read_traces([folder], num_workers=1))
    return books, {(line.cause, line.item): line for line in books.lines}


def test_waiting_and_what_is_waited_for_are_the_late_ranks_line(tmp_path):
    """Rank 0 waits 400 us of its 600 us all-reduce; rank 1 computes 400 us longer."""
    books, lines = lines_of(late(tmp_path))

    assert lines[LATE, "rank 1"].by_rank == {0: 400_000, 1: 400_000}
    assert lines[LATE, "rank 1"].why == {"gemm": 400_000}
    assert lines[COMPUTE, "gemm"].by_rank == {0: 300_000, 1: 300_000}
    assert lines[TRANSFER, "all_reduce over dp_shard"].by_rank == {0: 200_000, 1: 200_000}
    idle = lines[HOST, ""].ns if (HOST, "") in lines else lines[IDLE, ""].ns
    assert idle == 200_000
    assert books.total_ns == 2_000_000 and books.per_step_ms(books.total_ns) == 1.0


def test_balanced_ranks_have_no_late_line(tmp_path):
    _, lines = lines_of(balanced(tmp_path))

    assert not [key for key in lines if key[0] == LATE]
    assert lines[COMPUTE, "gemm"].ns == 2 * 300_000


@pytest.mark.parametrize("make", [balanced, late])
def test_causes_add_up_to_the_steps(tmp_path, make):
    books, _ = lines_of(make(tmp_path))

    assert sum(by_cause(books.lines).values()) == books.total_ns
    assert all(sum(line.by_rank.values()) == line.ns for line in books.lines)


def test_a_single_rank_cannot_tell_waiting_from_transfer(tmp_path):
    folder = late(tmp_path)
    (folder / "rank1.json.gz").unlink()
    _, lines = lines_of(folder)

    assert lines[TRANSFER, "all_reduce over dp_shard"].ns == 600_000
    assert not [key for key in lines if key[0] == LATE]


def test_a_hook_that_waits_for_a_transfer_is_no_computation(tmp_path):
    """The engine's frame runs 500 us, 100 in a product; a transfer goes on for 350 of the rest."""
    frame = "autograd::engine::evaluate_function: RegisterPostBackwardFunctionBackward"
    events = [
        event("ProfilerStep#1", "user_annotation", 100.0, 500.0),
        event(frame, "cpu_op", 100.0, 500.0),
        event("aten::mm", "cpu_op", 100.0, 100.0),
        event("gloo:all_reduce", "user_annotation", 250.0, 350.0, tid=9),
    ]
    write(tmp_path / "rank0.json", events)
    _, lines = lines_of(tmp_path)

    assert {key[:1]: line.ns for key, line in lines.items()} == {
        (COMPUTE,): 100_000,
        (TRANSFER,): 350_000,
        (CALLS,): 50_000,
    }


def test_the_same_frame_without_a_transfer_is_the_engines_own_work(tmp_path):
    frame = "autograd::engine::evaluate_function: MmBackward0"
    events = [
        event(frame, "cpu_op", 100.0, 500.0),
        event("gloo:all_reduce", "user_annotation", 590.0, 100.0, tid=9),
    ]
    write(tmp_path / "rank0.json", events)
    books, _ = lines_of(tmp_path)

    assert by_cause(books.lines)[COMPUTE] == 500_000
