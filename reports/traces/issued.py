"""Collectives as our own collector saw them issued, put to the transfers of a gloo trace.

A gloo event has no group, but each of gloo's threads works for one group only. In order of time
every transfer votes for the group of its thread; within a group, name by name, the transfers then
stand in the order in which they were issued.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from reports.traces.columns import Events, Ints

KEY = "titanbench_issued"


class Issued(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True):
    """One collective, send or receive: the event's name, its group, its number in the group.

    sequence: of a collective; peer: global rank of the other side of a send or receive.
    """

    time_ns: int
    name: str
    group: str
    sequence: int | None
    peer: int | None


def issued_of(rows: Any) -> tuple[Issued, ...]:
    """The rows that the collector wrote into the metadata, in order of time; else none."""
    found = []
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, list) and len(row) == 5 and isinstance(row[0], int):
            time_ns, name, group, sequence, peer = row
            found.append(
                Issued(
                    time_ns=time_ns, name=str(name), group=str(group), sequence=sequence, peer=peer
                )
            )
    return tuple(sorted(found, key=lambda one: one.time_ns))


def attributed(
    events: Events, names: tuple[str, ...], rows: Ints, issued: Sequence[Issued]
) -> dict[int, Issued]:
    """What was issued for each transfer; a name whose counts differ stays without."""
    ordered = sorted(rows.tolist(), key=lambda row: int(events.start[row]))
    by_name: dict[str, list[int]] = defaultdict(list)
    for row in ordered:
        by_name[names[events.name[row]]].append(row)
    wanted: dict[str, list[Issued]] = defaultdict(list)
    for one in issued:
        wanted[one.name].append(one)
    sound = [name for name, own in by_name.items() if len(own) == len(wanted[name])]
    threads = _threads(events, by_name, wanted, sound)
    found: dict[int, Issued] = {}
    for name in sound:
        found |= _in_groups(events, by_name[name], wanted[name], threads)
    return found


def _threads(
    events: Events,
    by_name: dict[str, list[int]],
    wanted: dict[str, list[Issued]],
    sound: list[str],
) -> dict[int, str]:
    """The group that most transfers of each worker thread were issued on."""
    votes: dict[int, Counter[str]] = defaultdict(Counter)
    for name in sound:
        for row, one in zip(by_name[name], wanted[name], strict=True):
            if one.peer is None:
                votes[int(events.thread[row])][one.group] += 1
    return {thread: counts.most_common(1)[0][0] for thread, counts in votes.items()}


def _in_groups(
    events: Events, rows: list[int], issued: list[Issued], threads: dict[int, str]
) -> dict[int, Issued]:
    """Pairs of one name: sends and receives in order, collectives in order within each group."""
    if issued[0].peer is not None:
        return dict(zip(rows, issued, strict=True))
    own: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        own[threads[int(events.thread[row])]].append(row)
    found: dict[int, Issued] = {}
    for group in {one.group for one in issued}:
        expected = [one for one in issued if one.group == group]
        if len(expected) == len(own[group]):
            found |= dict(zip(own[group], expected, strict=True))
    return found
