"""The pipeline bubble: a schedule's own actions played through with the duration of each.

F, B, I and W are the times of a stage's forward, whole backward, input gradient and weight gradient
for one microbatch; B = I + W. What travels between stages takes no time here.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]


class Action(NamedTuple):
    """One computation of a rank: what, for which stage, for which microbatch."""

    kind: Kind
    stage: int
    microbatch: int


class Durations(NamedTuple):
    """Times of one stage for one microbatch, in any unit that all stages share."""

    forward: float
    backward_input: float
    backward_weight: float

    @property
    def backward(self) -> float:
        """The whole backward."""
        return self.backward_input + self.backward_weight


def bubble_fraction(
    actions: Mapping[int, Sequence[Action]], durations: Sequence[Durations]
) -> float:
    """Return the share of all ranks' time in which a rank has nothing to do, 0 to 1.

    Args:
        actions: the actions of each rank, in its order.
        durations: of each stage.

    Raises:
        ValueError: if an action waits for one that never comes.
    """
    end = max(play(actions, durations).values())
    busy = sum(_duration(a, durations) for order in actions.values() for a in order)
    return 1 - busy / (end * len(actions))


def play(
    actions: Mapping[int, Sequence[Action]], durations: Sequence[Durations]
) -> dict[Action, float]:
    """Return when each action ends: it starts when its rank is free and what it needs is there."""
    ends: dict[Action, float] = {}
    positions = dict.fromkeys(actions, 0)
    free = dict.fromkeys(actions, 0.0)
    whole = _whole_backwards(actions)
    progress = True
    while progress:
        progress = False
        for rank, order in actions.items():
            while positions[rank] < len(order):
                action = order[positions[rank]]
                needed = _needs(action, len(durations), whole)
                if any(before not in ends for before in needed):
                    break
                start = max([free[rank], *(ends[before] for before in needed)])
                ends[action] = free[rank] = start + _duration(action, durations)
                positions[rank] += 1
                progress = True
    stuck = [order[positions[r]] for r, order in actions.items() if positions[r] < len(order)]
    if stuck:
        raise ValueError(f"the schedule never reaches {stuck[0]}: what it needs does not come")
    return ends


def _whole_backwards(actions: Mapping[int, Sequence[Action]]) -> set[tuple[int, int]]:
    """Return (stage, microbatch) of every backward that is not split."""
    return {
        (a.stage, a.microbatch) for order in actions.values() for a in order if a.kind == "backward"
    }


def _needs(action: Action, num_stages: int, whole: set[tuple[int, int]]) -> list[Action]:
    """Return the actions that must have ended before."""
    kind, stage, microbatch = action
    if kind == "forward":
        return [Action("forward", stage - 1, microbatch)] if stage else []
    if kind == "backward_weight":
        return [Action("backward_input", stage, microbatch)]
    if stage == num_stages - 1:
        return [Action("forward", stage, microbatch)]
    above: Kind = "backward" if (stage + 1, microbatch) in whole else "backward_input"
    return [Action(above, stage + 1, microbatch)]


def _duration(action: Action, durations: Sequence[Durations]) -> float:
    return getattr(durations[action.stage], action.kind)
