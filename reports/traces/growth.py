"""A column that grows: an array filled piece by piece, as narrow as its values allow."""

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from reports.traces.columns import Ints

_FIRST_ROWS = 1 << 12


class Column:
    """An array with room at its end; its integers widen when the first that needs it arrives.

    Room that is not used yet is never touched, so it takes no memory.
    """

    def __init__(self, dtype: DTypeLike) -> None:
        self._values: NDArray[Any] = np.empty(_FIRST_ROWS, dtype=dtype)
        self._num_rows = 0

    def append(self, values: NDArray[Any]) -> None:
        """Add values, of the column's type or of a wider one."""
        stop = self._num_rows + len(values)
        dtype = self._values.dtype if _fit(values, self._values.dtype) else values.dtype
        if stop > len(self._values) or dtype != self._values.dtype:
            self._move(max(stop, 3 * self._num_rows // 2), dtype)
        self._values[self._num_rows : stop] = values
        self._num_rows = stop

    def _move(self, room: int, dtype: DTypeLike) -> None:
        wider = np.empty(max(room, len(self._values)), dtype=dtype)
        wider[: self._num_rows] = self.array()
        self._values = wider

    def array(self) -> NDArray[Any]:
        """All values so far; not a copy."""
        return self._values[: self._num_rows]


def narrowed(values: Ints) -> Ints:
    """The values in 32 bits if all of them fit."""
    narrow = values.astype(np.int32)
    return narrow if (narrow == values).all() else values


def _fit(values: NDArray[Any], dtype: np.dtype[Any]) -> bool:
    if values.dtype.itemsize <= dtype.itemsize or not len(values):
        return True
    limits = np.iinfo(dtype)
    return bool(limits.min <= values.min() and values.max() <= limits.max)
