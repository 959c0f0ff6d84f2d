"""Fields of many decoded events as arrays, at the speed of numpy's own iterators."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import astuple
from numpy.typing import NDArray

from reports.traces.columns import NONE, CollectiveArgs, Ints
from reports.traces.problems import Problems
from reports.traces.wire import (
    Args,
    Complete,
    FullArgs,
    Identifier,
    LeanComplete,
)

DTYPES: dict[str, type[np.signedinteger[Any]]] = {
    "device": np.int16,
    "stream": np.int32,
    "correlation": np.int64,
    "external_id": np.int64,
    "bytes": np.int64,
    "sequence": np.int32,
    "forward_thread": np.int32,
}


def integer_table(rows: Sequence[msgspec.Struct], width: int) -> Ints | None:
    """All fields of structs of `width` integers as (rows, width); None if one is no int64."""
    flat: Iterable[Any] = chain.from_iterable(map(astuple, rows))
    try:
        return np.fromiter(flat, np.int64, count=len(rows) * width).reshape(-1, width)
    except (TypeError, ValueError, OverflowError):
        return None


def argument_columns(args: Sequence[Args], problems: Problems, *, lean: bool) -> dict[str, Any]:
    """Columns of the arguments of events; what is no number becomes -1."""
    table = integer_table(args, len(DTYPES)) if lean else None
    if table is not None:
        return {name: table[:, k].astype(dtype) for k, (name, dtype) in enumerate(DTYPES.items())}
    columns: dict[str, Any] = {}
    for name, dtype in DTYPES.items():
        columns[name] = integers([getattr(one, name) for one in args], problems).astype(dtype)
    return columns


def integers(values: Sequence[Identifier], problems: Problems) -> Ints:
    """Identifiers as int64; None and text that is no number become -1."""
    try:
        return np.array(values, dtype=np.int64)
    except (ValueError, TypeError, OverflowError):
        return np.array([_integer(value, problems) for value in values], dtype=np.int64)


def _integer(value: Identifier, problems: Problems) -> int:
    if value is None:
        return NONE
    try:
        number = int(value, 0) if isinstance(value, str) else int(value)
    except (ValueError, OverflowError):
        return NONE
    if not -(2**63) <= number < 2**63:
        problems.add("too_large")
        return NONE
    return number


def numbered(values: Iterable[Any], numbering: dict[Any, int], count: int) -> NDArray[np.int32]:
    """The number of each value in a numbering that makes new ones on demand."""
    number: Callable[[Any], int] = numbering.__getitem__
    return np.fromiter(map(number, values), np.int32, count=count)


def widened(event: Complete | LeanComplete) -> Complete:
    """A finished event with all arguments."""
    if isinstance(event, Complete):
        return event
    fields = {name: getattr(event, name) for name in LeanComplete.__struct_fields__}
    fields["args"] = FullArgs(
        **{name: getattr(event.args, name) for name in Args.__struct_fields__}
    )
    return Complete(**fields)


def collective_args(row: int, args: FullArgs) -> CollectiveArgs | None:
    """Metadata of a collective; None when the event is none."""
    kind = text_of(args.collective)
    if not kind:
        return None
    return CollectiveArgs(
        row=row,
        kind=kind,
        input_elements=_count(args.input_elements),
        output_elements=_count(args.output_elements),
        group_size=_count(args.group_size),
        dtype=text_of(args.dtype),
        group_name=text_of(args.group_name),
        group_description=text_of(args.group_description),
        group_ranks=text_of(args.group_ranks),
        sequence=_count(args.collective_sequence),
    )


def text_of(raw: msgspec.Raw) -> str | None:
    """A raw value as text: a string without its quotes, a list as Python writes it."""
    if not raw:
        return None
    value = msgspec.json.decode(raw)
    return None if value is None else str(value)


def _count(raw: msgspec.Raw) -> int | None:
    text = text_of(raw)
    try:
        return None if text is None else int(text)
    except ValueError:
        return None
