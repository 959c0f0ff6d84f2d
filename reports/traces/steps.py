"""Training steps of a trace: the windows that the profiler's schedule marks on the host."""

import re

import numpy as np
from msgspec import Struct

from reports.traces.columns import Events, Ints, mask_of
from reports.traces.links import DEVICE

_STEP = re.compile(r"^ProfilerStep#(\d+)$")
_COUNTED = ("cpu_op", "user_annotation", "runtime", "driver", *DEVICE)


class Step(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A window [start, stop) in ns; number is the profiler's, None for a part between steps."""

    name: str
    number: int | None
    start: int
    stop: int


def windows(events: Events, names: tuple[str, ...]) -> tuple[list[Step], bool]:
    """Consecutive windows that tile the trace from its first step on, and whether it has steps.

    A step reaches from its own start to the start of the next; the last one to its own end. Work
    that the device still does after that is the window `tail`. A trace without steps is one
    window, `all`, over everything that a host or device event covers.
    """
    marks = _marks(events, names)
    last = _last_end(events)
    if not marks:
        return [_whole(events, last)], False
    steps = []
    for (number, start, stop), following in zip(marks, [*marks[1:], None], strict=True):
        stop = stop if following is None else following[1]
        steps.append(Step(name=f"step {number}", number=number, start=start, stop=stop))
    device = mask_of(events, *DEVICE)
    tail = int(events.end[device].max(initial=0))
    if tail > steps[-1].stop:
        steps.append(Step(name="tail", number=None, start=steps[-1].stop, stop=tail))
    return steps, True


def _marks(events: Events, names: tuple[str, ...]) -> list[tuple[int, int, int]]:
    """Number, start and end of each step, by start; one mark per number."""
    found: dict[int, tuple[int, int, int]] = {}
    numbers = {place: _STEP.match(name) for place, name in enumerate(names)}
    places = [place for place, match in numbers.items() if match]
    rows = np.flatnonzero(np.isin(events.name, places) & mask_of(events, "user_annotation"))
    for row in rows.tolist():
        match = numbers[int(events.name[row])]
        assert match is not None
        number, start = int(match.group(1)), int(events.start[row])
        found.setdefault(number, (number, start, start + int(events.duration[row])))
    return sorted(found.values(), key=lambda mark: mark[1])


def _whole(events: Events, last: int) -> Step:
    counted = mask_of(events, *_COUNTED)
    start = int(events.start[counted].min(initial=np.iinfo(np.int64).max))
    return Step(name="all", number=None, start=min(start, last), stop=last)


def _last_end(events: Events) -> int:
    return int(events.end[mask_of(events, *_COUNTED)].max(initial=0))


def step_edges(steps: list[Step]) -> Ints:
    """Borders of consecutive windows."""
    return np.array([steps[0].start, *(step.stop for step in steps)], dtype=np.int64)
