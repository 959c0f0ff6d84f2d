"""Checks of a plan against a whole model on the meta device, before any rank starts."""

import math
from collections.abc import Iterator

from models.layers.attention import AttentionCore
from models.protocol import Model
from parallel.context import attention_cores
from parallel.plan import ParallelPlan
from parallel.tensor import PlannedLayer, planned_layers


def check_layout(model: Model, plan: ParallelPlan) -> None:
    """Raise ``ValueError`` unless tensor and context ranks divide what they have to divide.

    The message has the numbers and the nearest smaller size of the axis that would fit. Nor may a
    pipeline part an embedding from the head that it also is.
    """
    if plan.pp > 1 and model.ties_embedding:
        raise ValueError(
            f"plan.pp={plan.pp}: the embedding is also the head, and one stage must hold both; "
            "plan.pp=1 works"
        )
    if plan.tp > 1:
        _check_divides("tp", plan.tp, list(_tensor_sizes(model)))
    if plan.cp > 1:
        cores = attention_cores(model, plan.cp)
        if plan.context == "ulysses":
            _check_exchange(model, cores, plan)


def _check_divides(axis: str, ranks: int, sizes: list[tuple[int, str]]) -> None:
    for size, what in sizes:
        if size % ranks:
            fits = math.gcd(ranks, *(size for size, _ in sizes))
            raise ValueError(
                f"plan.{axis}={ranks} does not divide the {size} {what}; plan.{axis}={fits} would"
            )


def _tensor_sizes(model: Model) -> Iterator[tuple[int, str]]:
    """Yield every number that tensor ranks divide, and what it counts."""
    yield model.config.vocab_size, "ids of the vocabulary"
    for layer in planned_layers(model):
        yield from _heads(layer)
        for name in layer.plan.columns:
            yield layer.linear(name).out_features, f"outputs of {layer.name}.{name}"
        for name in layer.plan.rows:
            yield layer.linear(name).in_features, f"inputs of {layer.name}.{name}"


def _heads(layer: PlannedLayer) -> Iterator[tuple[int, str]]:
    for num_heads in layer.plan.heads:
        yield num_heads, f"heads of {layer.name}"


def _check_exchange(model: Model, cores: list[AttentionCore], plan: ParallelPlan) -> None:
    """Heads that tensor ranks leave are exchanged for tokens: each context rank gets as many."""
    if any(next(core.parameters(recurse=False), None) is not None for core in cores):
        raise ValueError(
            "plan.context=ulysses: the attention has parameters per head, which stay on every "
            "rank; plan.context=gather works"
        )
    sizes = [size for layer in planned_layers(model) for size in _heads(layer)]
    shares = [(heads // plan.tp, f"(of tp={plan.tp}) {what}") for heads, what in sizes]
    try:
        _check_divides("cp", plan.cp, shares)
    except ValueError as error:
        raise ValueError(f"{error}, or plan.context=gather") from error
