"""Fields of many decoded events as arrays, at the speed of numpy's own iterators."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from reports.traces.columns import NONE, CollectiveArgs, Ints
from reports.traces.growth import narrowed
from reports.traces.problems import Problems
from reports.traces.wire import (
    Args,
    Complete,
    FullArgs,
    Identifier,
    LeanComplete,
)

ARGUMENTS = ("stream", "correlation", "external_id", "bytes", "sequence", "forward_thread")
_arguments_of = attrgetter(*ARGUMENTS)


def integer_table(rows: Iterable[tuple[Any, ...]], num_rows: int, width: int) -> Ints | None:
    """Tuples of `width` integers as (num_rows, width); None if one is no int64."""
    try:
        flat = np.fromiter(chain.from_iterable(rows), np.int64, count=num_rows * width)
    except (TypeError, ValueError, OverflowError):
        return None
    return flat.reshape(-1, width)


def argument_columns(args: Sequence[Args], problems: Problems) -> dict[str, Ints]:
    """Columns of the arguments of events; what is no number becomes -1."""
    table = integer_table(map(_arguments_of, args), len(args), len(ARGUMENTS))
    if table is not None:
        table = narrowed(table)
        return {name: table[:, k] for k, name in enumerate(ARGUMENTS)}
    return {name: integers([getattr(one, name) for one in args], problems) for name in ARGUMENTS}


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
        source=_count(args.source),
        destination=_count(args.destination),
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
