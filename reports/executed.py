"""What a step executed beside what the model needs: the parts of the waterfall from counted FLOPs.

Counted FLOPs are exact and told apart by operator and recomputation. At the peak they would take
the time that separates, in each class, what is computed too slowly from what the model does not
need. Model FLOPs, time below the peak and FLOPs beyond the model add up to the classes' time.
"""

from collections import defaultdict
from collections.abc import Mapping

from msgspec import Struct

from bench.record import RunRecord
from reports.traces.classify import (
    ATTENTION,
    EMBEDDING_LOSS,
    GEMM,
    LINEAR_ATTENTION,
    operator_class,
)

LINEAR_PART = "linear attention"
HEAD, PRODUCTS, ATTENTION_PART = "head and loss", "matrix products", "attention"


class Executed(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times in ms per step, mean over ranks, at the peak.

    by_class: executed FLOPs without recomputation; the head's product counts under the class that
    has its time, and linear attention executes the model's where nothing of it is counted.
    beyond: executed less model FLOPs by part; negative where the convention counts FLOPs that are
    not executed, as in the masked half of causal attention.
    """

    by_class: dict[str, float]
    beyond: dict[str, float]


def executed(record: RunRecord, flops_ms: Mapping[str, float]) -> Executed | None:
    """Return what was executed; None for a record that does not say it by operator."""
    ms_per_flop = _ms_per_flop(record, flops_ms)
    counted = record.counters.get("flops_by_operator")
    again = record.counters.get("recomputed_flops_by_operator")
    if ms_per_flop is None or not counted or again is None:
        return None
    by_class: dict[str, float] = defaultdict(float)
    for name, flops in counted.items():
        by_class[operator_class(name)] += (flops - again.get(name, 0)) * ms_per_flop
    head = min(flops_ms.get(HEAD, 0.0), by_class[GEMM])
    if head:
        by_class[GEMM] -= head
        by_class[EMBEDDING_LOSS] += head
    linear = flops_ms.get(LINEAR_PART, 0.0)
    if linear and not by_class.get(LINEAR_ATTENTION):  # its operators may count no FLOPs
        by_class[LINEAR_ATTENTION] = linear
    attention = by_class.get(ATTENTION, 0.0) - flops_ms.get(ATTENTION_PART, 0.0)
    rest = sum(by_class.values()) - sum(flops_ms.values()) - attention
    return Executed(
        by_class={name: ms for name, ms in by_class.items() if ms},
        beyond={PRODUCTS: rest, ATTENTION_PART: attention},
    )


def _ms_per_flop(record: RunRecord, flops_ms: Mapping[str, float]) -> float | None:
    """Return the ms of one rank's time at the peak for one FLOP that all ranks together execute."""
    tokens, model_ms = record.workload.tokens_per_step, sum(flops_ms.values())
    if not tokens or not model_ms:
        return None
    return model_ms / (record.flops.per_token["full"] * tokens)
