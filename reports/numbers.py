"""Numbers for people: sensible digits, a unit that fits the size, a dash for what is not there."""

import math
from collections.abc import Sequence

ABSENT = "\u2013"
SMALLER_UNITS = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "\u00b5s")),
    "GiB": ((1.0, "GiB"), (1 / 1024, "MiB"), (1 / 1024**2, "KiB")),
    "TFLOPS": ((1.0, "TFLOPS"), (1e-3, "GFLOPS"), (1e-6, "MFLOPS")),
}
POWERS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
BYTE_UNITS = ((1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB"))


def number(value: float, digits: int = 4) -> str:
    """Return ``value`` with ``digits`` significant digits, never in exponent form.

    Digits before the decimal point are never rounded away.
    """
    if value == 0:
        return "0"
    decimals = max(digits - 1 - math.floor(math.log10(abs(value))), 0)
    return f"{value:,.{decimals}f}"


def short(value: float, digits: int = 4) -> str:
    """Return ``value`` for a table of many: at most three decimals, and what is less is said so."""
    if value and abs(value) < 0.0005:
        return "<0.001" if value > 0 else ">-0.001"
    text = number(value, digits)
    return f"{value:,.3f}" if len(text.partition(".")[2]) > 3 else text


def whole(count: float) -> str:
    """Return a count per step: without decimals if it has none."""
    return f"{count:,.0f}" if count == int(count) else number(count, 3)


def as_published(value: float) -> str:
    """Return a figure that others published: as it stands, at most three decimals."""
    return f"{value:,.3f}".rstrip("0").removesuffix(".")


def fitting_unit(values: Sequence[float], unit: str) -> tuple[float, str]:
    """Return a unit in which the largest value reads well: its size in ``unit``, and its name.

    For example ``(0.001, "ms")`` for times of a few hundredths of a second.
    """
    largest = max((abs(value) for value in values), default=0.0)
    scales = SMALLER_UNITS.get(unit, ((1.0, unit),))
    if largest == 0:
        return scales[0]
    return next((scale for scale in scales if largest >= scale[0]), scales[-1])


def quantity(value: float, unit: str) -> str:
    """Return a value with the unit that fits: 12.34 ms."""
    size, name = fitting_unit([value], unit)
    return f"{number(value / size)} {name}"


def moment(created: str) -> str:
    """Return an ISO time for people."""
    return created.replace("T", " ").replace("+00:00", " UTC").replace("Z", " UTC")


def short_flop(flop: float) -> str:
    """Return a number of operations in short: 291.9 GFLOP."""
    return f"{short_count(flop).replace('B', 'G')}FLOP"


def short_count(count: float) -> str:
    """Return a large count in short: 671.0 B, 33.04 M."""
    for power, letter in POWERS:
        if abs(count) >= power:
            return f"{number(count / power)} {letter}"
    return number(count)


def short_bytes(num_bytes: float) -> str:
    """Return a size in the unit that fits."""
    for size, unit in BYTE_UNITS:
        if num_bytes >= size:
            return f"{number(num_bytes / size)} {unit}"
    return f"{num_bytes:,.0f} bytes"


def scalar(value: object) -> str:
    """Return a setting as text: numbers in full, yes and no, a dash for None."""
    if value is None:
        return ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)
