"""Checks of a plan against a whole model on the meta device, before any rank starts."""

import math
from collections.abc import Iterator

from torch import nn

from models.layers.attention import AttentionCore
from models.protocol import Model
from parallel.context import sequence_mixers
from parallel.plan import ParallelPlan
from parallel.schedules import RULES
from parallel.tensor import PlannedLayer, planned_layers


def check_layout(model: Model, plan: ParallelPlan) -> None:
    """Raise ``ValueError`` unless tensor and context ranks divide what they have to divide.

    The message has the numbers and the nearest smaller size of the axis that would fit. A shared
    expert that is to be computed while tokens travel must be there. Nor may a backward in two parts
    meet a weight at both ends of a stage: torch would go through the stage for that weight and find
    it gone for the others.
    """
    if plan.pp > 1 and RULES[plan.schedule].splits_backward and model.ties_embedding and model.mtp:
        raise ValueError(
            f"plan.schedule={plan.schedule}: the MTP modules take the embedding that is also the "
            "head, which a backward in two parts does not allow; plan.schedule=Interleaved1F1B does"
        )
    if plan.expert_overlap and all(moe.shared is None for _, moe in model.moe_layers()):
        raise ValueError(
            "plan.expert_overlap=True: the model has no shared expert to compute while tokens "
            "travel; plan.expert_chunks needs none"
        )
    if plan.tp > 1:
        _check_plans(model, plan.tp)
        _check_divides("tp", plan.tp, list(_tensor_sizes(model)))
    if plan.cp > 1:
        mixers = sequence_mixers(model, plan.cp)
        if plan.context != "gather" and any(map(_has_sinks, mixers)):
            raise ValueError(
                f"plan.context={plan.context}: the attention has parameters per head, which take "
                "part in each softmax as a whole; plan.context=gather works"
            )
        if plan.context == "ulysses":
            _check_divides("cp", plan.cp, list(_exchanged_sizes(model, plan)))


def _check_plans(model: Model, tp: int) -> None:
    """A block without heads to divide would see its part of the sequence as if it were whole."""
    with_heads = {layer.name for layer in planned_layers(model) if layer.plan.heads}
    for name, _ in model.sequence_blocks():
        if not any(layer.startswith(f"{name}.") for layer in with_heads):
            raise ValueError(
                f"plan.tp={tp}: {name} does not say which heads of it tensor parallelism divides; "
                "plan.tp=1 works"
            )


def _has_sinks(mixer: nn.Module) -> bool:
    return isinstance(mixer, AttentionCore) and any(True for _ in mixer.parameters(recurse=False))


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


def _exchanged_sizes(model: Model, plan: ParallelPlan) -> Iterator[tuple[int, str]]:
    """Yield the numbers of heads that context ranks divide: those that tensor ranks leave."""
    for layer in planned_layers(model):
        for num_heads, what in _heads(layer):
            yield num_heads // plan.tp, f"(of tp={plan.tp}) {what}"
