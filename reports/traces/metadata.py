"""What a trace file says about its job: rank, world size, devices, base of its clock."""

import re
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from reports.traces.issued import KEY, Issued, issued_of
from reports.traces.problems import Problems

_RANK_IN_NAME = re.compile(r"(?:^|[^a-z])(?:rank|worker)[-_.]?(\d+)", re.IGNORECASE)
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


class Metadata(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts about the job. None: the file does not say.

    base_ns: added to every time of the file. devices: names of the accelerators of the host.
    groups: process groups by name, with description and member ranks where known.
    issued: collectives with their groups, as our own collector wrote them for gloo.
    """

    rank: int | None = None
    world_size: int | None = None
    backend: str | None = None
    base_ns: int = 0
    devices: tuple[str, ...] = ()
    num_sms: int | None = None
    groups: dict[str, tuple[str, tuple[int, ...]]] = {}
    versions: dict[str, str] = {}
    issued: tuple[Issued, ...] = ()


def parse_metadata(header: bytes, tail: bytes, problems: Problems) -> Metadata:
    """Metadata from the text before and after the events; broken text is read field by field."""
    values = _decoded(header, tail)
    if values is None:
        problems.add("metadata")
        values = _scavenged(header + b"\n" + tail)
    return _metadata(values)


def _decoded(header: bytes, tail: bytes) -> dict[str, Any] | None:
    if not header.strip():
        return {}
    end = tail.strip() or b"}"
    text = header + b'"traceEvents": []' + (end if end[:1] in (b",", b"}") else b"," + end)
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None
    return value if isinstance(value, dict) else None


def _scavenged(text: bytes) -> dict[str, Any]:
    """The few values that matter, each looked for by its key."""
    found: dict[str, Any] = {}
    for key in ("distributedInfo", "deviceProperties", "baseTimeNanoseconds"):
        match = re.search(rb'"' + key.encode() + rb'"\s*:\s*', text)
        value = match and _value_at(text, match.end())
        if value is not None:
            found[key] = value
    return found


def _value_at(text: bytes, start: int) -> Any:
    number = re.compile(rb"-?\d+").match(text, start)
    if number:
        return int(number.group())
    depth = 0
    for match in _TOKEN.finditer(text, start):
        depth += {b"{": 1, b"[": 1, b"}": -1, b"]": -1}.get(match.group(), 0)
        if depth == 0:
            try:
                return msgspec.json.decode(text[start : match.end()])
            except msgspec.DecodeError:
                return None
    return None


def _metadata(values: dict[str, Any]) -> Metadata:
    info = values.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    devices = [item for item in values.get("deviceProperties") or () if isinstance(item, dict)]
    versions = {key: str(value) for key, value in values.items() if key.endswith("_version")}
    if "nccl_version" in info:
        versions["nccl_version"] = str(info["nccl_version"])
    backend = info.get("backend")
    return Metadata(
        rank=_integer(info.get("rank")),
        world_size=_integer(info.get("world_size")),
        backend=None if backend is None else str(backend),
        base_ns=_integer(values.get("baseTimeNanoseconds")) or 0,
        devices=tuple(str(item.get("name", "")) for item in devices),
        num_sms=_integer(devices[0].get("numSms")) if devices else None,
        groups=_groups(info.get("pg_config")),
        versions=versions,
        issued=issued_of(values.get(KEY)),
    )


def _groups(config: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Process groups of `pg_config`; member ranks are a list, or text in on-demand traces."""
    if isinstance(config, str):
        try:
            config = msgspec.json.decode(config)
        except msgspec.DecodeError:
            return {}
    groups = {}
    for item in config if isinstance(config, list) else ():
        if isinstance(item, dict) and "pg_name" in item:
            description = str(item.get("pg_desc") or "")
            groups[str(item["pg_name"])] = (description, parse_ranks(item.get("ranks")))
    return groups


def parse_ranks(value: Any) -> tuple[int, ...]:
    """Member ranks from a list or its text; empty when Kineto shortened it ("[0, 1, ..., 63]")."""
    if isinstance(value, str):
        if "..." in value:
            return ()
        value = re.findall(r"\d+", value)
    if not isinstance(value, list):
        return ()
    ranks = [_integer(item) for item in value]
    return tuple(rank for rank in ranks if rank is not None)


def _integer(value: Any) -> int | None:
    try:
        return None if value is None else int(value)
    except (TypeError, ValueError):
        return None


def rank_of_name(path: Path) -> int | None:
    """Rank that a file's name gives, as in `rank3.json.gz` or `worker3_step_12.pt.trace.json`."""
    matches = _RANK_IN_NAME.findall(path.name)
    return int(matches[-1]) if matches else None
