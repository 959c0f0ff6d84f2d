"""The load of experts: what the ranks' routing counts say together."""

from collections.abc import Sequence
from typing import Any


def combine_routing(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the routing of a step over all ranks, from each rank's counts by layer.

    ``max_load`` and ``mean_load`` are tokens per expert, the largest and the mean over experts and
    layers; ``max_over_mean`` is that of the least even layer. ``ranks_per_token`` is on how many
    of the ``expert_ranks`` the experts of a token live, on average. ``dropped_tokens`` counts the
    choices of an expert that no expert worked on.
    """
    layers: dict[str, dict[str, Any]] = {}
    for part in parts:
        for name, counts in part["layers"].items():
            layers[name] = _add(layers[name], counts) if name in layers else counts
    loads = [layer["tokens_per_expert"] for layer in layers.values()]
    choices = sum(sum(load) for load in loads)
    return {
        "expert_ranks": parts[0]["expert_ranks"],
        "max_load": max(max(load) for load in loads),
        "mean_load": choices / sum(len(load) for load in loads),
        "max_over_mean": max(max(load) * len(load) / sum(load) for load in loads),
        "ranks_per_token": _total(layers, "rank_visits") / _total(layers, "tokens"),
        "dropped_tokens": choices - _total(layers, "rows"),
    }


def _add(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    loads = zip(a["tokens_per_expert"], b["tokens_per_expert"], strict=True)
    sums = {name: a[name] + b[name] for name in ("tokens", "rank_visits", "rows")}
    return {"tokens_per_expert": [x + y for x, y in loads], **sums}


def _total(layers: dict[str, dict[str, Any]], name: str) -> int:
    return sum(layer[name] for layer in layers.values())
