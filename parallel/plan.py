"""The parallel plan: how many ranks along each dimension, and the checks before a rank starts."""

from typing import Literal, Self

import msgspec

Remat = Literal["none", "full", "selective"]
Compile = Literal["none", "block"]


class ParallelPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of the device mesh and the policies that go with them.

    ``dp_shard = -1`` takes the ranks that the other dimensions leave. Expert parallelism borrows
    its ranks from ``dp_shard``: experts are spread over ``ep`` ranks and sharded over the
    remaining ``dp_shard / ep``. ``microbatches`` is how often gradients are accumulated a step.
    """

    dp_replicate: int = 1
    dp_shard: int = -1
    ep: int = 1
    microbatches: int = 1
    reshard_after_forward: bool = True
    remat: Remat = "none"
    compile: Compile = "none"

    def __post_init__(self) -> None:
        for name in ("dp_replicate", "ep", "microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"plan.{name}={getattr(self, name)}: must be at least 1")
        if self.dp_shard < 1 and self.dp_shard != -1:
            raise ValueError(
                f"plan.dp_shard={self.dp_shard}: must be at least 1, or -1 for the rest"
            )

    @property
    def num_data_ranks(self) -> int:
        """Ranks that see different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        """Ranks of the whole plan; needs a resolved ``dp_shard``."""
        assert self.dp_shard > 0, "resolve() the plan first"
        return self.num_data_ranks

    def resolve(self, world_size: int) -> Self:
        """Return the plan with ``dp_shard`` filled in for ``world_size`` ranks.

        Raises:
            ValueError: if the sizes do not multiply to ``world_size``, or ``ep`` does not divide.
        """
        fixed = self.dp_replicate
        shard = world_size // fixed if self.dp_shard == -1 else self.dp_shard
        if shard < 1 or fixed * shard != world_size:
            raise ValueError(
                f"plan.dp_replicate={fixed} x plan.dp_shard={max(shard, 1)} needs "
                f"{fixed * max(shard, 1)} ranks, the run has {world_size}"
            )
        if shard % self.ep:
            raise ValueError(f"plan.ep={self.ep} must divide plan.dp_shard={shard}")
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
            fitting = [n for n in range(1, self.ep + 1) if num_experts and num_experts % n == 0]
            raise ValueError(
                f"plan.ep={self.ep} does not divide the model's {num_experts} experts; "
                f"plan.ep={fitting[-1] if fitting else 1} would"
            )
