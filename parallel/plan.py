"""The parallel plan: how many ranks along each dimension, and the checks before a rank starts."""

import math
from typing import Literal, Self

import msgspec

Remat = Literal["none", "full", "selective"]
Compile = Literal["none", "block"]
NOT_LAID_OUT_YET = ("pp", "cp", "tp")
SIZES = ("pp", "dp_replicate", "cp", "tp", "ep", "microbatches")


class ParallelPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of the device mesh and the policies that go with them.

    ``dp_shard = -1`` takes the ranks that the other dimensions leave. Expert parallelism borrows
    its ranks from tp, cp and dp_shard, in this order: experts are spread over ``ep`` ranks and
    sharded over the remaining ``efsdp``. ``microbatches`` is how often gradients are accumulated
    in a step, or how many microbatches flow through the pipeline.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    microbatches: int = 1
    reshard_after_forward: bool = True
    remat: Remat = "none"
    compile: Compile = "none"

    def __post_init__(self) -> None:
        for name in SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"plan.{name}={getattr(self, name)}: must be at least 1")
        if self.dp_shard < 1 and self.dp_shard != -1:
            raise ValueError(f"plan.dp_shard={self.dp_shard}: at least 1, or -1 for the rest")
        for name in NOT_LAID_OUT_YET:
            if getattr(self, name) > 1:
                raise ValueError(f"plan.{name}={getattr(self, name)}: this version has no {name}")

    @property
    def num_data_ranks(self) -> int:
        """Ranks that see different sequences."""
        return self.dp_replicate * self._shard

    @property
    def world_size(self) -> int:
        """Ranks of the whole plan; needs a resolved ``dp_shard``."""
        return self.pp * self.dp_replicate * self._shard * self.cp * self.tp

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
                f"the run has {world_size}"
            )
        lenders = shard * self.cp * self.tp
        if lenders % self.ep:
            raise ValueError(
                f"plan.ep={self.ep} must divide dp_shard={shard} x cp={self.cp} x tp={self.tp}; "
                f"plan.ep={math.gcd(lenders, self.ep)} would"
            )
        return msgspec.structs.replace(self, dp_shard=shard)

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

    def check_experts(self, num_experts: int) -> None:
        """Raise ``ValueError`` unless the experts spread evenly over the expert ranks."""
        if self.ep > 1 and (num_experts == 0 or num_experts % self.ep):
            raise ValueError(
                f"plan.ep={self.ep} does not divide the model's {num_experts} experts; "
                f"plan.ep={math.gcd(num_experts, self.ep)} would"
            )
