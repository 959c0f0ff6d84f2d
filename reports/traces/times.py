"""Microseconds as JSON numbers into exact integer nanoseconds."""

import math
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

import msgspec
import numpy as np
from numpy.typing import NDArray

from reports.traces.columns import Ints
from reports.traces.wire import Number, exact_decoder

# Below 2^43 us a double is closer than half a nanosecond to the decimal it was read from, so three
# decimals come back exactly; above, only whole microseconds do.
EXACT_LIMIT_US = float(1 << 43)


def to_ns(microseconds: NDArray[np.float64]) -> Ints:
    """Nearest nanosecond of each time in microseconds; exact for |t| < 2^43 us with 3 decimals."""
    whole = np.floor(microseconds)
    fraction = np.rint((microseconds - whole) * 1000.0)
    return whole.astype(np.int64) * 1000 + fraction.astype(np.int64)


def numbers(values: Sequence[Number]) -> NDArray[np.float64]:
    """Values as doubles; strings are parsed, and what is no number becomes NaN."""
    try:
        return np.array(values, dtype=np.float64)
    except (ValueError, TypeError):
        return np.array([_number(value) for value in values], dtype=np.float64)


def _number(value: Number | None) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (ValueError, TypeError):
        return math.nan


def is_exact(microseconds: NDArray[np.float64], values: Sequence[Number]) -> bool:
    """Whether `to_ns` gives the decimals of the text back."""
    if np.fmax.reduce(np.abs(microseconds), initial=0.0) < EXACT_LIMIT_US:
        return True
    return set(map(type, values)) == {int}


def exact_ns(piece: bytes) -> tuple[Ints, Ints] | None:
    """Start and duration of the complete events of a piece from their decimals; None if unsound."""
    try:
        events = exact_decoder.decode(b"[" + piece + b"]")
    except (msgspec.DecodeError, InvalidOperation):
        return None
    stamps = [event for event in events if hasattr(event, "ts")]
    start = np.array([_decimal_ns(event.ts) for event in stamps], dtype=np.int64)
    duration = np.array([_decimal_ns(event.dur or Decimal(0)) for event in stamps], dtype=np.int64)
    return start, duration


def _decimal_ns(value: Decimal) -> int:
    return int((value * 1000).to_integral_value())
