"""The released networks' numbers, kept beside the repository; tests that need them skip without."""

import json
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[3] / "shared" / "data" / "models.json"
LENGTHS = (4096, 8192, 32768, 131072, 196608)
"""Sequence lengths for which there are FLOPs per token."""


def facts_of(name: str) -> dict[str, Any]:
    """What is known of a network."""
    if not PATH.exists():
        pytest.skip(f"no {PATH}")
    return json.loads(PATH.read_text())[name]
