"""Specifications: what to run and how to measure it, from YAML and the command line."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec
import yaml

from bench.errors import UsageError
from bench.record import require_finite, write_atomic

JOB_FILE = "job.json"

Struct = TypeVar("Struct", bound=msgspec.Struct)
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


def write_job(run_folder: Path, spec: RunSpec) -> None:
    """Write the specification into the run's folder, where every rank reads it."""
    write_atomic(run_folder / JOB_FILE, msgspec.json.encode(spec))


def read_job(run_folder: Path) -> RunSpec:
    """Return the specification that the launcher wrote."""
    return msgspec.json.decode((run_folder / JOB_FILE).read_bytes(), type=RunSpec)


def read_suite(path: Path) -> SuiteSpec:
    """Read a suite; ``defaults`` in the file are taken by every run that does not say otherwise.

    The overrides under ``set`` add up: first those of the defaults, then the run's own.

    Raises:
        UsageError: if the file is missing, is no YAML, or has an unknown or ill-typed key.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"cannot read suite {path}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not content.get("runs"):
        raise UsageError(
            f"suite {path} has no list of runs", hint="see workloads/suites/quick.yaml"
        )
    try:
        file = msgspec.convert(content, _SuiteFile)
        runs = [msgspec.convert(_joined(file.defaults, run), RunSpec) for run in file.runs]
    except (msgspec.ValidationError, TypeError) as error:
        raise UsageError(f"suite {path}: {error}") from error
    return SuiteSpec(name=file.name, description=file.description, runs=runs)


class _SuiteFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A suite as the file has it."""

    name: str
    description: str = ""
    defaults: dict[str, Any] = {}
    runs: list[dict[str, Any]]


def _joined(defaults: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    return {**defaults, **run, "set": [*defaults.get("set", []), *run.get("set", [])]}


def parse_overrides(texts: list[str]) -> dict[str, Any]:
    """Return the YAML values of ``a.b=c`` by their keys; of equal keys the last counts.

    Raises:
        UsageError: if one has no key, is no YAML, or is not finite.
    """
    return dict(_parse_override(text) for text in texts)


def _parse_override(text: str) -> tuple[str, Any]:
    key, equals, value_text = text.partition("=")
    if not equals or not key.strip():
        raise UsageError(f"--set {text}: expected KEY=VALUE", hint="for example --set plan.ep=2")
    try:
        value = yaml.safe_load(value_text) if value_text else ""
        require_finite(value, key.strip())
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"--set {text}: {' '.join(str(error).split())}") from error
    return key.strip(), value


def override(struct: Struct, changes: dict[str, Any], *, prefix: str = "") -> Struct:
    """Return ``struct`` with the fields at the dotted keys of ``changes`` replaced, all at once.

    ``prefix`` is what the user writes before these keys, for the messages.

    Raises:
        UsageError: on an unknown field (the nearest known one is named), a value that does not
            fit, or values that do not fit each other.
    """
    groups: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        name, _, rest = key.partition(".")
        groups.setdefault(name, {})[rest] = value
    new = {name: _new_value(struct, name, parts, prefix) for name, parts in groups.items()}
    try:
        return msgspec.structs.replace(struct, **new)
    except ValueError as error:
        raise UsageError(f"--set {prefix}{', '.join(groups)}: {error}") from error


def _new_value(struct: msgspec.Struct, name: str, parts: dict[str, Any], prefix: str) -> Any:
    """Return the new value of one field: ``parts`` has its own key as "", or keys inside it."""
    fields = {field.name: field.type for field in msgspec.structs.fields(struct)}
    key = prefix + name
    if name not in fields:
        known = [prefix + field for field in fields]
        raise UsageError(f"unknown key {key}", hint=nearest(key, known, what="known keys"))
    current = getattr(struct, name)
    if not isinstance(current, msgspec.Struct):
        if "" not in parts or len(parts) > 1:
            raise UsageError(f"unknown key {key}.{max(parts)}", hint=f"{key} has no parts")
        return _convert(parts[""], fields[name], key)
    if "" in parts:
        inside = ", ".join(current.__struct_fields__)
        raise UsageError(f"{key} is a group", hint=f"set one of {inside} in it")
    return override(current, parts, prefix=f"{key}.")


def _convert(value: Any, kind: Any, key: str) -> Any:
    """Return the value as the field's type.

    Text is read as a number where one is wanted, and as the words between its commas where several
    are wanted: so a record writes them.
    """
    if get_origin(kind) is tuple:
        words = value.split(",") if isinstance(value, str) else value
        if isinstance(words, list):
            member, *_ = get_args(kind)
            return tuple(_convert(_stripped(word), member, key) for word in words if word != "")
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        options = [str(option) for option in get_args(kind)] if get_origin(kind) is Literal else []
        hint = nearest(str(value), options, what="one of") if options else ""
        raise UsageError(f"--set {key}={value}: {error}", hint=hint) from error


def _stripped(word: Any) -> Any:
    return word.strip() if isinstance(word, str) else word


def nearest(name: str, known: Sequence[str], *, what: str) -> str:
    """Return a hint that names the known word nearest to ``name``, or all of them."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"{what}: {', '.join(known)}"
