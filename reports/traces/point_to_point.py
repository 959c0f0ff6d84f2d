"""Sends and receives put together: whose data go to whom, how long they travel, and who waits.

The n-th send of a rank to a peer in a group belongs to the peer's n-th receive from it. Where a
trace does not say the peer, as with one kernel for several sends and receives, nothing is matched.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct

from reports.traces.columns import CATEGORY
from reports.traces.communication import POINT_TO_POINT, Facts, issued_facts
from reports.traces.loader import Trace

_GLOO = ("gloo:send", "gloo:recv")


class Transfer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True):
    """A send or receive as one rank saw it. peer: global rank, None if the trace does not say.

    The duration is from the call, or the start of the kernel, until the transfer is done.
    """

    kind: str
    axis: str
    group: str
    peer: int | None
    bytes: int | None
    start_ns: int
    duration_ns: int

    @property
    def stop_ns(self) -> int:
        """When the transfer is done."""
        return self.start_ns + self.duration_ns


class PeerTime(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All transfers over one axis from one rank to another; times are sums in ns.

    source, destination: global ranks; None where the traces do not say the peer, and then count
    is of both sides. transfer_ns: from when both sides are ready until the receiver has the data.
    sender_wait_ns: until the receiver is ready; receiver_wait_ns: until the sender is. None
    without a match.
    """

    axis: str
    source: int | None
    destination: int | None
    count: int
    num_matched: int
    bytes: int | None
    transfer_ns: int | None
    sender_wait_ns: int | None
    receiver_wait_ns: int | None


def transfers(trace: Trace, facts: dict[int, Facts]) -> list[Transfer]:
    """Every send and receive of a rank, in order of time."""
    events = trace.events
    known = {row: one for row, one in facts.items() if one.kind in POINT_TO_POINT}
    numbers = [number for number, name in enumerate(trace.names) if name in _GLOO]
    on_host = np.isin(events.name, numbers) & (events.category == CATEGORY["user_annotation"])
    rows = np.array([r for r in np.flatnonzero(on_host).tolist() if r not in known], np.int64)
    known |= issued_facts(trace, rows)
    found = [
        Transfer(
            kind=one.kind,
            axis=one.axis,
            group=one.group,
            peer=one.peer,
            bytes=one.bytes,
            start_ns=int(events.start[row]),
            duration_ns=int(events.duration[row]),
        )
        for row, one in known.items()
    ]
    return sorted(found, key=lambda one: one.start_ns)


_Route = tuple[str, str, int, int]  # group, axis, source, destination


def between_peers(
    ranks: Mapping[int, Sequence[Transfer]], offsets_ns: Mapping[int, int]
) -> list[PeerTime]:
    """Match the transfers of all ranks; `offsets_ns`: how far each rank's clock is ahead."""
    sent: dict[_Route, list[tuple[int, int]]] = defaultdict(list)
    received: dict[_Route, list[tuple[int, int]]] = defaultdict(list)
    sizes: dict[_Route, list[int | None]] = defaultdict(list)
    nameless: dict[str, list[Transfer]] = defaultdict(list)
    for rank, series in ranks.items():
        for one in series:
            if one.peer is None or one.kind == "point_to_point":
                nameless[one.axis].append(one)
                continue
            is_send = one.kind == "send"
            pair = (rank, one.peer) if is_send else (one.peer, rank)
            route = (one.group, one.axis, *pair)
            times = (one.start_ns - offsets_ns[rank], one.stop_ns - offsets_ns[rank])
            (sent if is_send else received)[route].append(times)
            if is_send or one.peer not in ranks:
                sizes[route].append(one.bytes)
    routes = sorted({*sent, *received})
    found = [_route(route, sent[route], received[route], sizes[route]) for route in routes]
    return found + [_nameless(axis, series) for axis, series in sorted(nameless.items())]


def _route(
    route: _Route,
    sent: list[tuple[int, int]],
    received: list[tuple[int, int]],
    sizes: list[int | None],
) -> PeerTime:
    pairs = list(zip(sent, received, strict=True)) if len(sent) == len(received) else []
    ready = [max(one[0], other[0]) for one, other in pairs]
    transfer = sum(max(r[1] - at, 0) for at, (_, r) in zip(ready, pairs, strict=True))
    sender = sum(max(min(s[1], r[0]) - s[0], 0) for s, r in pairs)
    receiver = sum(max(min(r[1], s[0]) - r[0], 0) for s, r in pairs)
    return PeerTime(
        axis=route[1],
        source=route[2],
        destination=route[3],
        count=max(len(sent), len(received)),
        num_matched=len(pairs),
        bytes=_total(sizes),
        transfer_ns=transfer if pairs else None,
        sender_wait_ns=sender if pairs else None,
        receiver_wait_ns=receiver if pairs else None,
    )


def _nameless(axis: str, series: list[Transfer]) -> PeerTime:
    return PeerTime(
        axis=axis,
        source=None,
        destination=None,
        count=len(series),
        num_matched=0,
        bytes=_total([one.bytes for one in series]),
        transfer_ns=None,
        sender_wait_ns=None,
        receiver_wait_ns=None,
    )


def _total(sizes: Sequence[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) and known else None
