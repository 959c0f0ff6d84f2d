"""Device work and the host calls that launched it, by correlation id."""

import numpy as np
from msgspec import Struct

from reports.traces.columns import NONE, Events, Ints, mask_of

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


class Links(Struct, frozen=True, kw_only=True):
    """device: rows of device events by start. launch: row of the call that launched each, or -1."""

    device: Ints
    launch: Ints


def link(events: Events) -> Links:
    """Link each device event to its launch; a graph launch has many."""
    device = np.flatnonzero(mask_of(events, *DEVICE))
    device = device[np.argsort(events.start[device], kind="stable")]
    calls = np.flatnonzero(mask_of(events, "runtime", "driver") & (events.correlation >= 0))
    return Links(device=device, launch=match_ids(events.correlation, calls, device))


def match_ids(ids: Ints, calls: Ints, wanted: Ints) -> Ints:
    """For each row of `wanted`, the first of `calls` with the same id, or -1."""
    result = np.full(len(wanted), NONE, dtype=np.int64)
    if not len(calls) or not len(wanted):
        return result
    calls = calls[np.argsort(ids[calls], kind="stable")]
    place = np.minimum(np.searchsorted(ids[calls], ids[wanted]), len(calls) - 1)
    same = (ids[calls[place]] == ids[wanted]) & (ids[wanted] >= 0)
    result[same] = calls[place[same]]
    return result
