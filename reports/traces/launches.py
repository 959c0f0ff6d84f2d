"""Launch overhead: what the host pays to start device work, and how long that work then waits."""

from collections import defaultdict

import numpy as np
from msgspec import Struct

from reports.traces.columns import NONE, Ints
from reports.traces.links import Links
from reports.traces.loader import Trace
from reports.traces.names import normalise

_LAUNCHES = ("launch", "memcpy", "memset", "urenqueue")


class LaunchTime(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Calls of one name that launch device work; times in ns.

    host_ns: time inside the calls. delay_median_ns: from the end of the call to the start of its
    first device event (0 if that started before the call returned).
    num_shorter: calls whose device work is shorter than the call itself.
    """

    name: str
    count: int
    num_device: int
    host_ns: int
    device_ns: int
    delay_median_ns: int
    delay_p90_ns: int
    num_shorter: int


def launch_times(trace: Trace, links: Links) -> list[LaunchTime]:
    """One row per launching call, the most expensive first; empty without device events."""
    linked = links.launch != NONE
    device, launch = links.device[linked], links.launch[linked]
    if not len(device):
        return []
    calls, first, place = np.unique(launch, return_index=True, return_inverse=True)
    device_ns = np.zeros(len(calls), dtype=np.int64)
    np.add.at(device_ns, place, trace.events.duration[device])
    delay = np.maximum(trace.events.start[device[first]] - trace.events.end[calls], 0)
    counts = np.bincount(place)
    numbers = trace.events.name[calls]
    names: dict[str, list[int]] = defaultdict(list)
    for number in np.unique(numbers).tolist():
        names[normalise(trace.names[number])].append(number)
    rows = []
    for name in sorted(names):
        chosen = np.flatnonzero(np.isin(numbers, names[name]))
        rows.append(
            _row(name, trace.events.duration[calls[chosen]], device_ns, delay, counts, chosen)
        )
    return sorted(rows, key=lambda row: -row.host_ns)


def _row(
    name: str, host: Ints, device: Ints, delay: Ints, counts: Ints, chosen: Ints
) -> LaunchTime:
    return LaunchTime(
        name=name,
        count=len(chosen),
        num_device=int(counts[chosen].sum()),
        host_ns=int(host.sum()),
        device_ns=int(device[chosen].sum()),
        delay_median_ns=int(np.median(delay[chosen])),
        delay_p90_ns=int(np.quantile(delay[chosen], 0.9)),
        num_shorter=int((device[chosen] < host).sum()),
    )


def num_missing_kernels(trace: Trace, links: Links) -> int:
    """Launch calls whose device work is not in the trace although other work is."""
    if not len(links.device):
        return 0
    names = [name.lower() for name in trace.names]
    launching = np.array(["launchkernel" in name or "graphlaunch" in name for name in names])
    rows = np.flatnonzero(launching[trace.events.name] & (trace.events.correlation >= 0))
    device_ids = trace.events.correlation[links.device]
    return int((~np.isin(trace.events.correlation[rows], device_ids)).sum())
