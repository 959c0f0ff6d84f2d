"""The parallel plan: how many ranks along each dimension, and the checks before a rank starts."""

import math
from typing import Any, Literal, Self

import msgspec

from parallel.schedules import RULES, Schedule, check_schedule, stages_of_rank

Remat = Literal["none", "full", "selective"]
RematRegion = Literal["attention", "delta_rule", "experts", "feed_forward", "projections"]
Compile = Literal["none", "local", "block"]
Reduction = Literal["step", "microbatch"]
ContextMethod = Literal["gather", "ulysses", "ring"]
ExpertExchange = Literal["per_rank", "per_expert"]
SIZES = (
    "pp",
    "dp_replicate",
    "cp",
    "tp",
    "ep",
    "microbatches",
    "stages_per_rank",
    "expert_chunks",
)
DEFAULT_SCHEDULE: Schedule = "1F1B"
DEFAULT_EXCHANGE: ExpertExchange = "per_rank"
PIPELINE_DEFAULTS = {"schedule": DEFAULT_SCHEDULE, "stages_per_rank": 1}
EXPERT_DEFAULTS = {
    "expert_exchange": DEFAULT_EXCHANGE,
    "expert_overlap": False,
    "expert_chunks": 1,
}
DEFAULT_REMAT_SAVE: tuple[RematRegion, ...] = ("attention", "experts", "delta_rule")
SPLIT_BACKWARD_NEEDS = {
    "reshard_after_forward": (False, None),
    "remat": ("none",),
    "compile": ("none",),
}


class ParallelPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of the device mesh and the policies that go with them.

    ``dp_shard = -1`` takes the ranks that the other dimensions leave. Expert parallelism borrows
    its ranks from tp, cp and dp_shard, in this order: experts are spread over ``ep`` ranks and
    sharded over the remaining ``efsdp``. ``microbatches`` is how often gradients are accumulated
    in a step, or how many microbatches flow through the pipeline.

    ``context`` says what travels between cp ranks: what keys and values are made of, to every rank
    ("gather"; for a window only the tokens that it reaches back) or from rank to rank ("ring": no
    rank holds all of it; a window is treated as by "gather"), or heads in exchange for tokens
    ("ulysses").

    ``expert_exchange`` says what travels between ep ranks: a row for each rank that has experts of
    a token, which weights and sums their outputs, or one for each expert. ``expert_overlap``
    computes the shared expert while tokens travel; ``expert_chunks`` are as many parts of the
    tokens, of which some travel while others are worked on.

    ``reshard_after_forward`` gathers the parameters of a block anew in every forward and backward
    (True) or once per step (False); it is True by default without a pipeline, False with one.

    ``reduce_gradients`` says when the ranks that share parameters add up their gradients. Once a
    "step" moves least, and between microbatches keeps whole gradients, in the dtype of the
    reduction, of all that a rank gathers; after every "microbatch" a rank keeps those of its
    shards alone. Replicas add up theirs once a step either way.

    ``remat`` says which activations the backward pass computes anew: none, all of a block
    ("full"), or all but those of the regions in ``remat_save`` ("selective"); a region that a
    model does not have saves nothing. See ``parallel.remat``.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    microbatches: int = 1
    schedule: Schedule = DEFAULT_SCHEDULE
    stages_per_rank: int = 1
    reshard_after_forward: bool | None = None
    reduce_gradients: Reduction = "step"
    context: ContextMethod = "gather"
    expert_exchange: ExpertExchange = DEFAULT_EXCHANGE
    expert_overlap: bool = False
    expert_chunks: int = 1
    remat: Remat = "none"
    remat_save: tuple[RematRegion, ...] = DEFAULT_REMAT_SAVE
    compile: Compile = "none"

    def __post_init__(self) -> None:
        for name in SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"plan.{name}={getattr(self, name)}: must be at least 1")
        if self.dp_shard < 1 and self.dp_shard != -1:
            raise ValueError(f"plan.dp_shard={self.dp_shard}: at least 1, or -1 for the rest")
        if self.remat != "selective" and self.remat_save != DEFAULT_REMAT_SAVE:
            raise ValueError(
                f"plan.remat_save={', '.join(self.remat_save)} needs plan.remat=selective: "
                f"plan.remat={self.remat} does not choose"
            )
        if self.ep == 1:
            self._check_defaults(EXPERT_DEFAULTS, "expert ranks: give plan.ep")
        if self.pp == 1:
            self._check_defaults(PIPELINE_DEFAULTS, "a pipeline: give plan.pp")
        else:
            self._check_pipeline()

    def _check_defaults(self, defaults: dict[str, Any], needed: str) -> None:
        for name, default in defaults.items():
            if getattr(self, name) != default:
                raise ValueError(f"plan.{name}={getattr(self, name)} needs {needed} of at least 2")

    def _check_pipeline(self) -> None:
        check_schedule(
            self.schedule,
            num_ranks=self.pp,
            stages_per_rank=self.stages_per_rank,
            microbatches=self.microbatches,
        )
        if RULES[self.schedule].splits_backward:
            self._check_split_backward()

    def _check_split_backward(self) -> None:
        """A backward in two parts runs twice over one forward and its gathered parameters."""
        for name, fits in SPLIT_BACKWARD_NEEDS.items():
            if getattr(self, name) not in fits:
                raise ValueError(
                    f"plan.{name}={getattr(self, name)}: {self.schedule} runs the backward in two "
                    f"parts and needs plan.{name}={fits[0]}; Interleaved1F1B does not"
                )

    @property
    def num_data_ranks(self) -> int:
        """Ranks that see different sequences."""
        return self.dp_replicate * self._shard

    @property
    def num_sequence_parts(self) -> int:
        """Ranks that share a sequence: between layers each holds as many of its tokens."""
        return self.cp * self.tp

    @property
    def world_size(self) -> int:
        """Ranks of the whole plan; needs a resolved ``dp_shard``."""
        return self.pp * self.dp_replicate * self._shard * self.cp * self.tp

    def num_copies(self, on_every_tensor_rank: bool) -> int:
        """Ranks of a pipeline stage that hold the same shard of a parameter."""
        return self.dp_replicate * (self.tp if on_every_tensor_rank else 1)

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.pp * self.stages_per_rank

    @property
    def reduces_once(self) -> bool:
        """Whether gradients are reduced after the last microbatch alone."""
        return self.reduce_gradients == "step"

    @property
    def reshards(self) -> bool:
        """Whether blocks are gathered anew for every forward and backward."""
        asked = self.reshard_after_forward
        return self.pp == 1 if asked is None else asked

    def stages_of(self, pipeline_rank: int) -> list[int]:
        """Return the stages that a rank of a pipeline holds."""
        return stages_of_rank(
            self.schedule,
            rank=pipeline_rank,
            num_ranks=self.pp,
            stages_per_rank=self.stages_per_rank,
        )

    @property
    def efsdp(self) -> int:
        """Ranks over which each expert's parameters are sharded."""
        return self._shard * self.cp * self.tp // self.ep

    @property
    def _shard(self) -> int:
        assert self.dp_shard > 0, "resolve() the plan first"
        return self.dp_shard

    def resolve(self, world_size: int) -> Self:
        """Return the plan with ``dp_shard`` filled in for ``world_size`` ranks.

        Raises:
            ValueError: if the sizes do not multiply to ``world_size``, or ``ep`` does not divide.
        """
        fixed = self.pp * self.dp_replicate * self.cp * self.tp
        shard = max(world_size // fixed, 1) if self.dp_shard == -1 else self.dp_shard
        if fixed * shard != world_size:
            raise ValueError(
                f"plan.pp={self.pp} x dp_replicate={self.dp_replicate} x dp_shard={shard} x "
                f"cp={self.cp} x tp={self.tp} needs {fixed * shard} ranks, "
                f"the run has {world_size}; {self._fitting(world_size)} would fit"
            )
        lenders = shard * self.cp * self.tp
        if lenders % self.ep:
            raise ValueError(
                f"plan.ep={self.ep} must divide dp_shard={shard} x cp={self.cp} x tp={self.tp}; "
                f"plan.ep={math.gcd(lenders, self.ep)} would"
            )
        return msgspec.structs.replace(self, dp_shard=shard, reshard_after_forward=self.reshards)

    def _fitting(self, world_size: int) -> str:
        """Return the sizes to change for ``world_size`` ranks: down to what divides, as ``k=v``."""
        left, changes = world_size, []
        for name in ("tp", "cp", "pp", "dp_replicate"):
            asked = getattr(self, name)
            size = math.gcd(asked, left)
            left //= size
            if size != asked:
                changes.append(f"plan.{name}={size}")
        return " ".join([*changes, f"plan.dp_shard={left}"])

    def check_batch(self, global_batch_size: int) -> None:
        """Raise ``ValueError`` unless every rank gets whole sequences in every microbatch."""
        parts = self.num_data_ranks * self.microbatches
        if global_batch_size % parts:
            nearest = max(1, round(global_batch_size / parts)) * parts
            raise ValueError(
                f"workload.global_batch_size={global_batch_size} is not a multiple of "
                f"{self.num_data_ranks} data ranks x {self.microbatches} microbatches; "
                f"{nearest} would be"
            )

    def check_sequence(self, sequence_length: int) -> None:
        """Raise ``ValueError`` unless context and tensor ranks share sequences evenly."""
        chunks = 2 * self.cp if self.cp > 1 else 1
        unit = math.lcm(chunks, self.num_sequence_parts)
        if sequence_length % unit:
            nearest = max(1, round(sequence_length / unit)) * unit
            raise ValueError(
                f"workload.sequence_length={sequence_length} is not a multiple of {unit}, which "
                f"plan.cp={self.cp} (two chunks a rank) and plan.tp={self.tp} need; "
                f"{nearest} would be"
            )

    def check_experts(self, num_experts: int) -> None:
        """Raise ``ValueError`` unless the experts spread evenly over the expert ranks."""
        if self.ep > 1 and (num_experts == 0 or num_experts % self.ep):
            raise ValueError(
                f"plan.ep={self.ep} does not divide the model's {num_experts} experts; "
                f"plan.ep={math.gcd(num_experts, self.ep)} would"
            )

    def check_stages(self, num_layers: int, num_mtp_layers: int) -> None:
        """Raise ``ValueError`` unless every pipeline stage gets a part of the model."""
        parts = num_layers + num_mtp_layers + 2
        if self.num_stages > parts:
            raise ValueError(
                f"plan.pp={self.pp} x stages_per_rank={self.stages_per_rank} makes "
                f"{self.num_stages} stages, the model has {parts} parts (embedding, {num_layers} "
                f"layers, {num_mtp_layers} MTP modules, head); "
                f"plan.pp={max(1, parts // self.stages_per_rank)} would fit"
            )
