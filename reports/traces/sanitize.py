"""Names and metadata that the profiler can write as valid JSON.

torch 2.13 writes a quote in a name as it is, prints metadata values raw, and turns any name with a
character outside printable ASCII into "unknown", so that different names become one.
"""

import json
import math
from typing import Any

_REPLACED = {'"': "'", "\\": "/", "\n": " ", "\r": " ", "\t": " "}


def sanitize_name(name: str) -> str:
    """A name that survives the profiler: printable ASCII without quotes and backslashes.

    What ASCII lacks becomes its code point, as in `caf[e9]`, so different names stay different.
    """
    return "".join(_sanitized(character) for character in name)


def _sanitized(character: str) -> str:
    if character in _REPLACED:
        return _REPLACED[character]
    return character if " " <= character <= "~" else f"[{ord(character):x}]"


def sanitize_metadata(value: Any) -> str:
    """A value as the JSON text for `add_metadata_json`: finite, ASCII, keys as strings.

    No text in it may need a backslash: the profiler turns each into a slash, also in metadata.
    """
    return json.dumps(_plain(value), allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return sanitize_name(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {sanitize_name(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (int, float)):
        return value
    return sanitize_name(str(value))
