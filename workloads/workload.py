"""The workload: everything that defines what is computed, in one frozen struct."""

from typing import Any, Literal

import msgspec

from parallel.plan import ParallelPlan

Routing = Literal["learned", "balanced", "balanced_strided", "random"]
Dtype = Literal["float32", "bfloat16"]


class Precision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Dtypes of the stored parameters, the products and the gradient reduction."""

    params: Literal["float32"] = "float32"
    compute: Dtype = "bfloat16"
    reduce: Dtype = "float32"
    quantization: Literal["none", "mxfp8"] = "none"


class Training(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW and what surrounds it; ``expert_bias_rate`` is the step of the router's bias."""

    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    expert_bias_rate: float = 1e-3
    seed: int = 0


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A benchmark's definition; two runs with equal workloads compute the same thing.

    ``model`` is a configuration struct of ``models``; ``global_batch_size`` counts sequences;
    ``data`` is ``"text"``, ``"synthetic"`` or the path of a file or folder; ``reference`` names
    the published results to show beside a run. Raise ``version`` when a change makes old numbers
    incomparable.
    """

    name: str
    version: int = 1
    model: Any
    sequence_length: int
    global_batch_size: int
    data: str = "text"
    routing: Routing = "learned"
    precision: Precision = Precision()
    plan: ParallelPlan = ParallelPlan()
    training: Training = Training()
    reference: str = ""

    def __post_init__(self) -> None:
        for name in ("sequence_length", "global_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"workload.{name}={getattr(self, name)}: must be at least 1")

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all ranks."""
        return self.sequence_length * self.global_batch_size
