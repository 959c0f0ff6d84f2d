"""The workload: everything that defines what is computed, in one frozen struct."""

from typing import Any, Literal

import msgspec

from parallel.plan import ParallelPlan

Routing = Literal["learned", "balanced", "balanced_strided", "random"]
Dtype = Literal["float32", "bfloat16"]
Quantizable = Literal["attention", "feed_forward", "experts", "head"]
DEFAULT_QUANTIZE: tuple[Quantizable, ...] = ("attention", "feed_forward", "experts")
MXFP8_BLOCK_SIZE = 32
LARGEST_BF16_BETA2 = 1 - 2**-8
"""Above it a second moment of 8 significant bits is rounded back to what it was: it never falls."""


class Precision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Dtypes of the stored parameters, the products, the gradient reduction and AdamW's moments.

    ``quantize`` names the parts whose products run in ``quantization``: see
    ``parallel.quantization``. The parameters that AdamW updates are float32 throughout.
    """

    params: Literal["float32"] = "float32"
    compute: Dtype = "bfloat16"
    reduce: Dtype = "float32"
    quantization: Literal["none", "mxfp8"] = "none"
    quantize: tuple[Quantizable, ...] = DEFAULT_QUANTIZE
    optimizer_states: Dtype = "float32"

    def __post_init__(self) -> None:
        if self.quantization == "none" and self.quantize != DEFAULT_QUANTIZE:
            raise ValueError(
                f"precision.quantize={', '.join(self.quantize)} needs precision.quantization=mxfp8"
            )
        if not self.quantize:
            raise ValueError("precision.quantize names nothing: give precision.quantization=none")


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
        self._check_moments()
        if "head" in self.precision.quantize:
            self._check_head()

    def _check_moments(self) -> None:
        beta2 = self.training.beta2
        if self.precision.optimizer_states == "bfloat16" and beta2 > LARGEST_BF16_BETA2:
            raise ValueError(
                f"training.beta2={beta2} with precision.optimizer_states=bfloat16: a second moment "
                f"would never fall; training.beta2={LARGEST_BF16_BETA2} would do"
            )

    def _check_head(self) -> None:
        """The head's products contract over the vocabulary and over the width."""
        for name, size, ranks in (
            ("vocab_size", self.model.vocab_size, self.plan.tp),
            ("dim", self.model.dim, 1),
        ):
            unit = ranks * MXFP8_BLOCK_SIZE
            if size % unit:
                raise ValueError(
                    f"precision.quantize=head: model.{name}={size} on plan.tp={ranks} ranks is no "
                    f"multiple of {unit}; model.{name}={size + -size % unit} would be"
                )

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all ranks."""
        return self.sequence_length * self.global_batch_size
