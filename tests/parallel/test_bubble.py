"""The bubble of a schedule, played from its actions, equals the published closed forms.

p ranks, m microbatches, v stages per rank; F, I, W of one rank's stages together, B = I + W.
Idle time per rank over busy time: (p-1)(F+B) for GPipe and 1F1B, (p-1)(F+B)/v interleaved,
(p-1)(F+B-2W) for zero bubble (ZB1P), half of that for its V.
"""

import pytest

from parallel.bubble import Action, Durations, bubble_fraction, play
from parallel.schedules import Schedule
from tests.parallel.orders import order

SIZES = [(2, 4), (4, 8), (4, 16), (8, 16)]
TIMES = [Durations(1, 1, 1), Durations(1, 2, 1), Durations(2, 3, 1)]


def idle_time(
    schedule: Schedule, ranks: int, microbatches: int, times: Durations, *, stages_per_rank: int = 1
) -> float:
    """Return a rank's mean idle time in a step."""
    per_stage = Durations(*(time / stages_per_rank for time in times))
    fraction = bubble_fraction(
        order(schedule, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank),
        [per_stage] * (ranks * stages_per_rank),
    )
    busy = microbatches * (times.forward + times.backward)
    return fraction * busy / (1 - fraction)


@pytest.mark.parametrize("times", TIMES, ids=str)
@pytest.mark.parametrize("p, m", SIZES)
class TestClosedForms:
    def test_gpipe_and_1f1b(self, p: int, m: int, times: Durations) -> None:
        idle = (p - 1) * (times.forward + times.backward)

        assert idle_time("GPipe", p, m, times) == pytest.approx(idle)
        assert idle_time("1F1B", p, m, times) == pytest.approx(idle)

    @pytest.mark.parametrize("v", [2, 4])
    def test_interleaved(self, p: int, m: int, times: Durations, v: int) -> None:
        idle = (p - 1) * (times.forward + times.backward) / v

        found = idle_time("Interleaved1F1B", p, m, times, stages_per_rank=v)

        assert found == pytest.approx(idle)
        assert idle_time("LoopedBFS", p, m, times, stages_per_rank=v) == pytest.approx(idle)

    def test_zero_bubble(self, p: int, m: int, times: Durations) -> None:
        idle = (p - 1) * (times.forward + times.backward - 2 * times.backward_weight)

        assert idle_time("InterleavedZeroBubble", p, m, times) == pytest.approx(idle)
        v_shaped = idle_time("ZBVZeroBubble", p, m, times, stages_per_rank=2)
        assert v_shaped == pytest.approx(idle / 2)

    def test_dualpipe_v_is_within_its_published_bubble(
        self, p: int, m: int, times: Durations
    ) -> None:
        """(PP/2 - 1)(F&B + B - 3W) for PP stages, F&B = F + B where nothing overlaps."""
        chunk = Durations(*(time / 2 for time in times))
        published = (p - 1) * (chunk.forward + 2 * chunk.backward - 3 * chunk.backward_weight)

        idle = idle_time("DualPipeV", p, m, times, stages_per_rank=2)

        assert 0 < idle <= published + 0.5


def test_fraction_of_1f1b_is_p_minus_1_over_m_plus_p_minus_1() -> None:
    fraction = bubble_fraction(order("1F1B", ranks=4, microbatches=8), [Durations(1, 1, 1)] * 4)

    assert fraction == pytest.approx(3 / 11)


def test_a_slow_stage_makes_the_others_wait() -> None:
    """m microbatches through a stage of n times the work: the others idle (n-1)m more."""
    actions = order("GPipe", ranks=2, microbatches=8)
    fast, slow = Durations(1, 1, 1), Durations(3, 3, 3)

    # Rank 1 works 8 x 9 = 72, after 1 for the first forward and before 2 for the last backward.
    assert bubble_fraction(actions, [fast, slow]) == pytest.approx(1 - (24 + 72) / (2 * 75))


def test_one_rank_never_waits() -> None:
    assert bubble_fraction(order("GPipe", ranks=1, microbatches=3), [Durations(1, 1, 1)]) == 0


def test_an_action_waits_for_its_rank_and_its_input() -> None:
    ends = play(order("GPipe", ranks=2, microbatches=2), [Durations(2, 1, 1), Durations(1, 2, 3)])

    assert ends[Action("forward", 0, 1)] == 4
    assert ends[Action("forward", 1, 1)] == 5
    assert ends[Action("backward", 1, 0)] == 10
    assert ends[Action("backward", 0, 0)] == 12


def test_an_order_that_waits_for_itself_is_refused() -> None:
    actions = {0: [Action("backward", 0, 0), Action("forward", 0, 0)]}

    with pytest.raises(ValueError, match="never reaches"):
        play(actions, [Durations(1, 1, 1)])
