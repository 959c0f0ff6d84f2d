"""Specifications: what to run and how to measure it, from YAML and the command line."""

import difflib
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from bench.errors import UsageError

Device = Literal["auto", "cpu", "cuda"]


class RunSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run: a workload with overrides in the record's own keys, and how to measure it.

    ``steps`` are measured after ``warmup_steps``; then come one step under the exact counters
    and, if ``profile``, one under the profiler. ``timeout`` is in s for the whole run;
    ``threads`` per rank, 0 for the cores divided by the ranks.
    """

    workload: str
    set: list[str] = []
    ranks: int = 1
    device: Device = "auto"
    steps: int = 10
    warmup_steps: int = 3
    instruments: bool = True
    profile: bool = True
    timeout: float = 1800.0
    threads: int = 0

    def __post_init__(self) -> None:
        for name, least in (("ranks", 1), ("steps", 1), ("warmup_steps", 0), ("threads", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least {least}")
        if not self.timeout > 0:
            raise ValueError(f"timeout={self.timeout}: must be more than 0 s")


class SuiteSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A suite: several runs and the name of their report."""

    name: str
    description: str = ""
    runs: list[RunSpec]


def read_suite(path: Path) -> SuiteSpec:
    """Read a suite; ``defaults`` in the file are taken by every run that does not say otherwise.

    Raises:
        UsageError: if the file is missing, is no YAML, or has an unknown or ill-typed key.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"cannot read suite {path}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not isinstance(content.get("runs"), list):
        raise UsageError(
            f"suite {path} has no list of runs", hint="see workloads/suites/quick.yaml"
        )
    defaults = content.pop("defaults", {})
    content["runs"] = [
        {**defaults, **run} if isinstance(run, dict) else run for run in content["runs"]
    ]
    try:
        return msgspec.convert(content, SuiteSpec)
    except (msgspec.ValidationError, ValueError) as error:
        raise UsageError(f"suite {path}: {error}") from error


def parse_override(text: str) -> tuple[list[str], Any]:
    """Split ``a.b=c`` into its path and its YAML value."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UsageError(f"--set {text}: expected KEY=VALUE", hint="for example --set plan.ep=2")
    return key.strip().split("."), yaml.safe_load(value) if value else ""


def override(struct: msgspec.Struct, path: list[str], value: Any, *, key: str) -> Any:
    """Return ``struct`` with the field at ``path`` replaced.

    Raises:
        UsageError: on an unknown field (the nearest known one is named) or a value that does
            not fit; ``key`` is how the user wrote it.
    """
    name, *rest = path
    fields = struct.__struct_fields__
    if name not in fields:
        raise UsageError(f"unknown key {key}", hint=nearest(name, fields, what="keys here"))
    current = getattr(struct, name)
    if rest and not isinstance(current, msgspec.Struct):
        raise UsageError(f"unknown key {key}", hint=f"{name} has no parts")
    if not rest and isinstance(current, msgspec.Struct):
        raise UsageError(
            f"{key} is a group", hint=f"set one of {', '.join(current.__struct_fields__)} in it"
        )
    new = override(current, rest, value, key=key) if rest else _convert(struct, name, value, key)
    try:
        return msgspec.structs.replace(struct, **{name: new})
    except ValueError as error:
        raise UsageError(f"--set {key}={value}: {error}") from error


def _convert(struct: msgspec.Struct, name: str, value: Any, key: str) -> Any:
    hint = next(f.type for f in msgspec.structs.fields(struct) if f.name == name)
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        raise UsageError(f"--set {key}={value}: {error}") from error


def nearest(name: str, known: tuple[str, ...] | list[str], *, what: str) -> str:
    """Return a hint that names the known word nearest to ``name``, or all of them."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"{what}: {', '.join(known)}"
