"""Bytes of tensors, from the shapes and types that the profiler writes."""

import msgspec
import numpy as np

_ITEM_BYTES = {
    "double": 8, "long": 8, "longint": 8, "int64": 8, "float": 4, "int": 4, "float32": 4,
    "int32": 4, "half": 2, "bfloat16": 2, "short": 2, "float16": 2, "byte": 1, "char": 1,
    "bool": 1, "unsignedchar": 1, "signedchar": 1, "int8": 1, "uint8": 1,
}  # fmt: skip


def item_bytes(dtype: str | None) -> int | None:
    """Bytes per element of a dtype in any of the profiler's spellings; None if unknown."""
    if dtype is None:
        return None
    squeezed = dtype.lower().replace("c10::", "").replace(" ", "").replace("torch.", "")
    return 1 if squeezed.startswith("float8") else _ITEM_BYTES.get(squeezed)


def tensor_bytes(dims: str) -> int | None:
    """Bytes of the tensors in `Input Dims` and `Input type`, as the trace stores both."""
    decoder = json_pair(dims)
    if decoder is None:
        return None
    total = 0
    for shape, dtype in zip(*decoder, strict=False):
        item = item_bytes(dtype if isinstance(dtype, str) else None)
        if (
            item is None
            or not isinstance(shape, list)
            or not all(isinstance(n, int) for n in shape)
        ):
            continue
        total += item * int(np.prod(shape, dtype=np.int64))
    return total or None


def json_pair(dims: str) -> tuple[list[object], list[object]] | None:
    """The shapes and the types of a stored entry; None if either is missing or unreadable."""
    text = dims.replace("] [", "],[", 1) if dims.count("] [") == 1 else ""
    try:
        shapes, types = msgspec.json.decode(f"[{text}]".encode(), type=tuple[list, list])
    except msgspec.DecodeError:
        return None
    return shapes, types
