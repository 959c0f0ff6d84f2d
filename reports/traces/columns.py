"""Events as columns of numpy arrays; names, threads and shapes are stored once and numbered."""

from collections.abc import Hashable
from typing import Any, TypeVar

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Ints = NDArray[np.signedinteger[Any]]  # of 64 bits for times, narrower where that suffices
Bools = NDArray[np.bool_]

NONE = -1

# Modern category for each spelling that a version of the profiler has used.
CATEGORIES = (
    "",
    "cpu_op",
    "user_annotation",
    "kernel",
    "gpu_memcpy",
    "gpu_memset",
    "runtime",
    "driver",
    "python_function",
    "gpu_user_annotation",
    "sync",
    "overhead",
    "other",
)
CATEGORY = {name: number for number, name in enumerate(CATEGORIES)}
_SPELLINGS = {
    "operator": "cpu_op",
    "memcpy": "gpu_memcpy",
    "memset": "gpu_memset",
    "cuda_runtime": "runtime",
    "xpu_runtime": "runtime",
    "mtia_runtime": "runtime",
    "privateuse1_runtime": "runtime",
    "hip_runtime": "runtime",
    "cuda_driver": "driver",
    "xpu_driver": "driver",
    "privateuse1_driver": "driver",
    "cuda_sync": "sync",
    "xpu_sync": "sync",
    "privateuse1_kernel": "kernel",
    "mtia_kernel": "kernel",
}


def category_number(cat: str) -> int:
    """Number of a category as Kineto spells it in any version; unknown ones are `other`."""
    lower = cat.lower()
    return CATEGORY.get(_SPELLINGS.get(lower, lower), CATEGORY["other"])


Key = TypeVar("Key", bound=Hashable)


class Numbering(dict[Key, int]):
    """Numbers distinct values in order of first occurrence: `numbering[value]` is its number."""

    def __missing__(self, value: Key) -> int:
        number = self[value] = len(self)
        return number


class Events(Struct, frozen=True, kw_only=True):
    """Columns of complete events, in the order of the file; -1 stands for "not given".

    All integers but those of `start` are 32 bits wide where the values of a file allow it.

    start, duration: ns since the epoch (or since the file's own zero), ns.
    name, process, thread: numbers into the trace's tables.
    category: number into CATEGORIES.
    dims: number into the trace's table of input shapes, for matrix products and collectives.
    """

    start: Ints
    duration: Ints
    name: NDArray[np.int32]
    category: NDArray[np.int8]
    process: NDArray[np.int32]
    thread: NDArray[np.int32]
    stream: Ints
    correlation: Ints
    external_id: Ints
    bytes: Ints
    sequence: Ints
    forward_thread: Ints
    in_graph: Bools
    dims: NDArray[np.int32]

    @property
    def end(self) -> Ints:
        """End of each event in ns."""
        return self.start + self.duration

    def __len__(self) -> int:
        return len(self.start)


class MemoryEvents(Struct, frozen=True, kw_only=True):
    """Columns of `[memory]` events: bytes > 0 is an allocation, < 0 a free; times in ns.

    total_allocated and total_reserved are bytes of the device after the event.
    """

    time: Ints
    thread: NDArray[np.int32]
    address: Ints
    bytes: Ints
    total_allocated: Ints
    total_reserved: Ints
    device_type: Ints
    device_id: Ints

    def __len__(self) -> int:
        return len(self.time)


class CollectiveArgs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Metadata of one collective as the profiler recorded it; None where it did not.

    row: the event's place in the columns. elements: numbers of elements in and out.
    source, destination: global ranks of a send or receive.
    """

    row: int
    kind: str
    input_elements: int | None = None
    output_elements: int | None = None
    group_size: int | None = None
    dtype: str | None = None
    group_name: str | None = None
    group_description: str | None = None
    group_ranks: str | None = None
    sequence: int | None = None
    source: int | None = None
    destination: int | None = None


def select(events: Events, rows: Ints | Bools) -> Events:
    """The given rows of every column."""
    return Events(**{name: getattr(events, name)[rows] for name in Events.__struct_fields__})


def mask_of(events: Events, *categories: str) -> Bools:
    """Which events belong to one of the categories."""
    belongs = np.zeros(len(CATEGORIES), dtype=np.bool_)
    belongs[[CATEGORY[name] for name in categories]] = True
    return belongs[events.category]
