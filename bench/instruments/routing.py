"""The routing counter: how evenly experts are loaded, how far tokens travel, what is dropped."""

from collections.abc import Iterable
from typing import Any, NamedTuple, Self

import torch
import torch_remat
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from models.layers.moe import GroupedExperts
from models.layers.router import Routes
from models.protocol import NamedMoE


class Unwatch(NamedTuple):
    """Gives experts their own products back."""

    experts: GroupedExperts

    def remove(self) -> None:
        """As the handle of a hook does."""
        del self.experts.multiply


class RoutingCounter:
    """Counts what this rank's tokens choose and what its experts get, layer by layer.

    A context manager around the observed step. It looks on from hooks, outside of what the
    other counters see.
    """

    def __init__(self, moe_layers: Iterable[NamedMoE], expert_ranks: int) -> None:
        self._moe_layers = list(moe_layers)
        self._expert_ranks = expert_ranks
        self._handles: list[RemovableHandle | Unwatch] = []
        self._layers: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> Self:
        for name, moe in self._moe_layers:
            layer = {
                "tokens_per_expert": [0] * moe.router.config.num_experts,
                "tokens": 0,
                "rank_visits": 0,
                "rows": 0,
            }
            self._layers[name] = layer
            self._handles += [
                self._watch_router(moe.router, layer),
                _watch_rows(moe.experts, layer),
            ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def report(self) -> dict[str, Any]:
        """Return the counts by layer; nothing without experts, or if compiled code hid them."""
        if not any(layer["tokens"] for layer in self._layers.values()):
            return {}
        return {"expert_ranks": self._expert_ranks, "layers": self._layers}

    def _watch_router(self, router: nn.Module, layer: dict[str, Any]) -> RemovableHandle:
        def look(_: nn.Module, args: Any, routes: Routes) -> None:
            if torch_remat.is_recomputing():
                return
            with _disable_current_modes():
                experts_TK = routes.experts_TK.cpu()
                E = len(layer["tokens_per_expert"])
                counts = torch.bincount(experts_TK.flatten(), minlength=E).tolist()
                old = layer["tokens_per_expert"]
                layer["tokens_per_expert"] = [a + b for a, b in zip(old, counts, strict=True)]
                layer["tokens"] += len(experts_TK)
                layer["rank_visits"] += count_visits(experts_TK * self._expert_ranks // E)

        return router.register_forward_hook(look)


def _watch_rows(experts: GroupedExperts, layer: dict[str, Any]) -> Unwatch:
    multiply = experts.multiply

    def look(rows_RD: Tensor, offsets_E: Tensor) -> Tensor:
        if not torch_remat.is_recomputing():
            with _disable_current_modes():
                layer["rows"] += int(offsets_E[-1])
        return multiply(rows_RD, offsets_E)

    experts.multiply = look  # type: ignore[method-assign]
    return Unwatch(experts)


def count_visits(ranks_TK: Tensor) -> int:
    """Return how many different ranks each token's experts live on, summed over the tokens."""
    sorted_TK = ranks_TK.sort(dim=1).values
    return len(ranks_TK) + int((sorted_TK.diff(dim=1) != 0).sum())
