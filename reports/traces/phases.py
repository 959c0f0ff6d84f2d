"""Forward, backward, recomputation, optimizer and module of each host event, where it shows."""

import re

import numpy as np

from reports.traces.columns import CATEGORY, NONE, Events, Ints
from reports.traces.nesting import Nesting, inherit

PHASES = ("forward", "backward", "recompute", "optimizer", "other")
FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER, OTHER = range(5)

# Marks of annotations and Python functions; operators need their sequence numbers as well.
_MARKS = (
    (
        OPTIMIZER,
        re.compile(
            r"^Optimizer\.(step|zero_grad)|^#* ?(opt|optimizer)(_step)? ?#*$|optimizer_step", re.I
        ),
    ),
    (
        RECOMPUTE,
        re.compile(r"recompute_fn|recompute|remateriali[sz]e|CheckpointFunctionBackward", re.I),
    ),
    (
        BACKWARD,
        re.compile(r"^autograd::engine::evaluate_function|^#* ?(bwd|backward)( \d+)? ?#*$", re.I),
    ),
    (
        FORWARD,
        re.compile(
            r"^#* ?(fwd|forward)( \d+)? ?#*$|^DistributedDataParallel\.forward|^nn\.Module: ", re.I
        ),
    ),
)


def phases(events: Events, nesting: Nesting, names: tuple[str, ...]) -> Ints:
    """Number into PHASES for every event of the trace (OTHER where nothing says).

    Recomputation is a forward operator inside the backward pass: one that records a sequence
    number of its own (it runs with gradients on, which backward operators do not), a module call,
    or a function of torch.utils.checkpoint.
    """
    own = _own_marks(events, names)
    result = own.copy()
    for depth, rows in enumerate(nesting.levels):
        if depth == 0:
            continue
        above = result[nesting.parent[rows]]
        result[rows] = _below(above, own[rows])
    result[result == NONE] = OTHER
    return result


def _own_marks(events: Events, names: tuple[str, ...]) -> Ints:
    by_name = np.array([_mark(name) for name in names] or [NONE], dtype=np.int8)
    marks = by_name[events.name]
    recording = events.category == CATEGORY["cpu_op"]
    recording = recording & (events.sequence >= 0) & (events.forward_thread <= 0)
    marks[recording & (marks == NONE)] = FORWARD
    returning = (events.forward_thread > 0) & (marks == NONE)
    marks[returning] = BACKWARD
    return marks


def _mark(name: str) -> int:
    for phase, pattern in _MARKS:
        if pattern.search(name):
            return phase
    return NONE


def _below(above: Ints, own: Ints) -> Ints:
    """Phase of children with marks `own` under parents of phase `above`."""
    result = np.where(own == NONE, above, own)
    in_backward = (above == BACKWARD) | (above == RECOMPUTE)
    result = np.where(in_backward & (own == FORWARD), RECOMPUTE, result)
    result = np.where((above == RECOMPUTE) & (own == BACKWARD), BACKWARD, result)
    result = np.where((own == RECOMPUTE) & ~in_backward, above, result)
    return np.where(above == OPTIMIZER, OPTIMIZER, result)


def modules(events: Events, nesting: Nesting, names: tuple[str, ...]) -> Ints:
    """For every event the row of the innermost module call around it, -1 without one.

    A backward operator belongs to the module of the forward operator with its sequence number.
    """
    is_module = np.array([name.startswith("nn.Module: ") for name in names] or [False])
    own = np.full(len(events), NONE, dtype=np.int32)
    rows = np.flatnonzero(is_module[events.name])
    own[rows] = rows
    if not len(rows):
        return own
    inside = inherit(nesting, own)
    linked = _linked_by_sequence(events, inside)
    return inherit(nesting, np.where(own == NONE, linked, own))


def _linked_by_sequence(events: Events, inside: Ints) -> Ints:
    """Module row of backward operators, through the forward operator of the same sequence."""
    linked = np.full(len(events), NONE, dtype=np.int32)
    has_sequence = events.sequence >= 0
    forward = np.flatnonzero(has_sequence & (events.forward_thread <= 0) & (inside != NONE))
    backward = np.flatnonzero(has_sequence & (events.forward_thread > 0))
    if not len(forward) or not len(backward):
        return linked
    order = np.argsort(events.sequence[forward], kind="stable")
    forward = forward[order]
    place = np.searchsorted(events.sequence[forward], events.sequence[backward])
    place = np.minimum(place, len(forward) - 1)
    same = events.sequence[forward[place]] == events.sequence[backward]
    linked[backward[same]] = inside[forward[place[same]]]
    return linked
