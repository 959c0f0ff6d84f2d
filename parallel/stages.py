"""Pipeline stages: which parts of a model each one holds, balanced by cost.

Parts are the embedding, each layer, each MTP module and the head; an encoder goes with the
embedding, the final norm with the part after the last layer. A stage that holds an MTP module has
the embedding a second time, for it takes the embedding of later tokens; so has the stage of a head
that is the embedding. The alternative, sending the embedding's output along, would double what
travels over every boundary and keep it alive in every stage.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from torch import nn

from models.counts import FORWARD_AND_BACKWARD
from models.layers.attention import Attending
from models.layers.moe import MoE
from models.protocol import Model, ModelConfig
from parallel.bubble import Durations


class PartCost(NamedTuple):
    """FLOPs per token of one part's forward: products with weights, and attention's own.

    Backward computes the first twice, for inputs and for weights, the second twice for inputs.
    """

    linear: int
    attention: int = 0

    @property
    def total(self) -> int:
        """Forward and backward."""
        return FORWARD_AND_BACKWARD * (self.linear + self.attention)


def part_names(config: ModelConfig) -> list[str]:
    """Return the parts of a model in order of execution."""
    layers = [f"layers.{i}" for i in range(config.num_layers)]
    modules = [f"mtp.{i}" for i in range(config.num_mtp_layers)]
    return ["embedding", *layers, *modules, "head"]


def part_costs(
    model: Model, sequence_length: int, *, num_sequence_parts: int = 1
) -> dict[str, PartCost]:
    """Return the cost of each part of a whole model, before anything is laid out.

    Two FLOPs per active parameter, attention over what causality leaves (models.counts), the head
    once per prediction head; looking a token up counts as one product per value, an encoder's
    attention as products. An encoder works whole on each rank that has a part of a sequence.
    """
    assert model.head is not None, "costs are those of a whole model"
    blocks = dict(model.blocks())
    heads = 1 + len(model.mtp)
    encoding = model.encoder.flops_per_token(sequence_length) if model.encoder else 0
    encoding = num_sequence_parts * encoding // FORWARD_AND_BACKWARD
    costs = {"embedding": PartCost(2 * model.config.dim + encoding)}
    for name in part_names(model.config)[1:-1]:
        block = blocks[name]
        costs[name] = PartCost(2 * _active_parameters(block), _attention(block, sequence_length))
    costs["head"] = PartCost(2 * heads * sum(p.numel() for p in model.head.parameters()))
    assert list(costs) == part_names(model.config)
    after = after_layers(model.config)
    costs[after] = costs[after]._replace(linear=costs[after].linear + 2 * model.config.dim)
    return costs


def after_layers(config: ModelConfig) -> str:
    """Return the part after the last layer, which the final norm goes with."""
    return part_names(config)[1 + config.num_layers]


def _active_parameters(block: nn.Module) -> int:
    total = sum(p.numel() for p in block.parameters())
    for module in block.modules():
        if isinstance(module, MoE):
            experts = sum(p.numel() for p in module.experts.parameters())
            config = module.router.config
            total -= experts - experts * config.num_experts_per_token // config.num_experts
    return total


def _attention(block: nn.Module, sequence_length: int) -> int:
    cores = [module for module in block.modules() if isinstance(module, Attending)]
    return sum(2 * core.width * core.num_keys(sequence_length) for core in cores)


def split(costs: Sequence[int], num_stages: int) -> list[range]:
    """Return ``num_stages`` contiguous, non-empty ranges of parts whose largest cost is least.

    Of several such splits the one with the least sum of squares, of those the one with the
    shortest first stages: the same on every rank.

    Raises:
        ValueError: if there are fewer parts than stages.
    """
    if not 1 <= num_stages <= len(costs):
        raise ValueError(f"{len(costs)} parts do not make {num_stages} stages")
    largest = _best(costs, num_stages, limit=None)[0]
    _, ends = _best(costs, num_stages, limit=largest)
    return [range(start, end) for start, end in zip((0, *ends), ends, strict=False)]


def _best(
    costs: Sequence[int], num_stages: int, *, limit: int | None
) -> tuple[int, tuple[int, ...]]:
    """Return the least largest cost of a stage or, within ``limit``, the least sum of squares.

    And the ends of the stages that have it. By dynamic programming: the best split of the first
    parts into k stages is one of a beginning into k - 1 and a last stage.
    """
    sums = [0, *accumulate(costs)]
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for _ in range(num_stages):
        longer: dict[int, tuple[int, tuple[int, ...]]] = {}
        for start, (value, ends) in best.items():
            for end in range(start + 1, len(costs) + 1):
                cost = sums[end] - sums[start]
                if limit is not None and cost > limit:
                    break
                total = max(value, cost) if limit is None else value + cost * cost
                candidate = (total, (*ends, end))
                longer[end] = min(longer.get(end, candidate), candidate)
        best = longer
    return best[len(costs)]


class Boundary(NamedTuple):
    """What enters a stage: copies of the stream and hidden states of prediction heads."""

    streams: int
    hiddens: int


class StageModel(NamedTuple):
    """A stage: its number, its part of the model, what enters and what leaves it."""

    number: int
    model: Model
    enters: Boundary
    leaves: Boundary | None
    """None behind the last stage, which leaves losses."""


class Placement(NamedTuple):
    """Which parts each stage holds, and what each part costs."""

    stages: list[list[str]]
    costs: dict[str, PartCost]
    tied: bool
    """Whether the head's weight is the embedding."""

    @property
    def embedding_stages(self) -> list[int]:
        """The stages that hold the embedding: the first, and those that need it again."""
        stages = range(len(self.stages))
        return [index for index in stages if self.needs_embedding(index)]

    def needs_embedding(self, index: int) -> bool:
        """Whether stage ``index`` holds the embedding, to itself or as a copy."""
        parts = self.stages[index]
        with_mtp = any(part.startswith("mtp.") for part in parts)
        return "embedding" in parts or with_mtp or (self.tied and "head" in parts)


def place(
    model: Model, num_stages: int, sequence_length: int, *, num_sequence_parts: int = 1
) -> Placement:
    """Balance the parts of a whole meta-device model over ``num_stages`` stages.

    Args:
        num_sequence_parts: parts of a sequence on different ranks, of cp x tp.
    """
    costs = part_costs(model, sequence_length, num_sequence_parts=num_sequence_parts)
    names = list(costs)
    ranges = split([cost.total for cost in costs.values()], num_stages)
    stages = [[names[i] for i in indices] for indices in ranges]
    return Placement(stages, costs, model.ties_embedding)


def cut(model: Model, placement: Placement, index: int) -> StageModel:
    """Leave a whole meta-device model with the parts of stage ``index``, in place; names stay."""
    stages = placement.stages
    _keep_parts(model, stages[index], embedding=placement.needs_embedding(index))
    last = index == len(stages) - 1
    leaves = None if last else boundary(model, stages[index + 1][0])
    return StageModel(index, model, boundary(model, stages[index][0]), leaves)


def describe_parts(placement: Placement) -> str:
    """Return the stages as text: "embedding to layers.3 | layers.4 to head"."""
    ends = [dict.fromkeys((parts[0], parts[-1])) for parts in placement.stages]
    return " | ".join(" to ".join(stage) for stage in ends)


def stage_durations(placement: Placement) -> list[Durations]:
    """Return each stage's times for one microbatch, in FLOPs per token.

    The first stage has no input gradient to compute apart: torch runs all of its backward in the
    step of the weights.
    """
    durations = []
    for index, parts in enumerate(placement.stages):
        linear = sum(placement.costs[part].linear for part in parts)
        attention = sum(placement.costs[part].attention for part in parts)
        inputs = linear + 2 * attention
        durations.append(
            Durations(
                forward=linear + attention,
                backward_input=inputs if index else 0,
                backward_weight=linear if index else linear + inputs,
            )
        )
    return durations


def _keep_parts(model: Model, kept: Sequence[str], *, embedding: bool) -> None:
    for kind, modules in (("layers", model.layers), ("mtp", model.mtp)):
        for index in range(len(modules)):
            if f"{kind}.{index}" not in kept:
                modules.register_module(str(index), None)
    if not embedding:
        model.embedding = None
    if "embedding" not in kept:
        model.drop_encoder()
    if after_layers(model.config) not in kept:
        model.norm = None
    if "head" not in kept:
        model.head = None


def boundary(model: Model, first_part: str) -> Boundary:
    """Return what enters a stage that begins with ``first_part``; see ``models.protocol.State``."""
    index = part_names(model.config).index(first_part)
    passed = index - 1 - model.config.num_layers
    if first_part == "embedding":
        return Boundary(0, 0)
    if passed <= 0:
        return Boundary(model.num_streams(index - 1), 0)
    return Boundary(0 if first_part == "head" else 1, passed + 1)
