"""The record's exact counters, from those of the ranks."""

from collections import Counter
from typing import Any

from bench.expert_load import combine_routing
from bench.rank_report import RankReport


def counters(reports: list[RankReport]) -> dict[str, Any]:
    """Return the exact counters of the counted step: the largest over the ranks, routing of all.

    FLOPs by operator are sums over all ranks, so that they can be held against the model's.
    """
    parts = [report.instruments for report in reports if "operators" in report.instruments]
    if not parts:
        return {}
    operators = [part["operators"] for part in parts]
    routing = [part["routing"] for part in parts if part.get("routing")]
    return {
        "collectives": largest([part["collectives"] for part in parts]),
        "operators": max(part["count"] for part in operators),
        "executed_flops": max(part["executed_flops"] for part in operators),
        "by_operator": largest([part["by_operator"] for part in operators]),
        **_flops_of_all(operators, "flops_by_operator"),
        **_flops_of_all(operators, "recomputed_flops_by_operator"),
        **_peak_memory([part["memory"] for part in parts]),
        **({"routing": combine_routing(routing)} if routing else {}),
    }


def _flops_of_all(operators: list[dict[str, Any]], name: str) -> dict[str, dict[str, int]]:
    """Return the sums over ranks under their name; nothing where a rank did not count them."""
    if not all(name in one for one in operators):
        return {}
    total: Counter[str] = Counter()
    for one in operators:
        total.update(one[name])
    return {name: dict(sorted(total.items()))}


def _peak_memory(memory: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the highest peak of live tensors, and what it is made of on that rank."""
    highest = max(memory, key=lambda one: one["peak_tensor_bytes"])
    by_kind = highest.get("peak_tensor_by_kind")
    return {
        "peak_tensor_bytes": highest["peak_tensor_bytes"],
        **({"peak_tensor_by_kind": by_kind} if by_kind else {}),
    }


def largest(values: list[Any]) -> Any:
    """Return the largest of numbers, or of nested dictionaries of numbers key by key."""
    if not isinstance(values[0], dict):
        return max(values)
    keys = sorted({key for value in values for key in value})
    return {key: largest([value[key] for value in values if key in value]) for key in keys}
