"""The waterfall: from the device's peak to what was achieved, in ms per step and rank.

Every bar but the last has a stated source; the last but one, ``rest``, is what is left to the
step time, so that the bars add up exactly. Without a record there is no peak: then the step of
the trace itself is broken down, and the waterfall says why there is no MFU in it.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from msgspec import Struct

from bench.record import RunRecord
from reports.account import (
    BUBBLE,
    CALLS,
    COMPUTE,
    COPIES,
    HOST,
    IDLE,
    LATE,
    RECOMPUTE,
    TRANSFER,
    Account,
    account,
)
from reports.bars import Bar, Kind, class_bar, counted_bars
from reports.executed import executed
from reports.load import Step
from reports.tables import mfu_name
from reports.traces.summary import TraceSummary

CONVENTION = "full"
# Classes that do the model's FLOPs, by the part of the ledger that they do.
PRODUCTS = {
    "matrix products": ("gemm", "grouped_gemm", "convolution"),
    "attention": ("attention",),
    "linear attention": ("linear_attention",),
    "head and loss": ("embedding_loss",),
}
REST = "rest"
ROUNDING = 1e-12  # of the total: what adding numbers of 53 bits leaves


class Waterfall(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bars that add up to ``total_ms``.

    ``mfu_percent``: the first bar's share of the total, with convention and denominator in
    ``basis``; None without a peak, and then ``basis`` is the reason.
    """

    bars: list[Bar]
    total_ms: float
    total_label: str
    mfu_percent: float | None
    basis: str


def trace_waterfall(traces: TraceSummary, reason: str) -> Waterfall:
    """Return the breakdown of the traced step; ``reason`` says why it has no peak in it."""
    books = account(traces)
    bars = [*_compute_bars(books), *_other_bars(books)]
    total = books.per_step_ms(books.total_ns)
    return Waterfall(
        bars=_with_rest(bars, total),
        total_ms=total,
        total_label="step in the trace",
        mfu_percent=None,
        basis=reason,
    )


def run_waterfall(record: RunRecord, traces: TraceSummary, steps: Sequence[Step] = ()) -> Waterfall:
    """Return the waterfall of a run down to its measured step time.

    Falls back to the breakdown of the traced step where FLOPs, peak or step time are missing.
    """
    ideal = ideal_ms(record)
    if isinstance(ideal, str):
        return trace_waterfall(traces, ideal)
    flops_ms, peak, step_ms = ideal
    books = account(traces)
    padding = padding_share(steps)
    counted = executed(record, flops_ms)
    if counted is None:
        total = _executed_ms(record, sum(flops_ms.values()))
        computing = _below_peak(books, flops_ms, padding, total)
    else:
        times, again = _compute_ms(books), _recompute_bar(books)
        computing = counted_bars(times, counted, again, padding)
    bars = [
        Bar(label="model FLOPs at the peak", ms=sum(flops_ms.values()), kind="useful", source=peak),
        *computing,
        *_other_bars(books),
    ]
    traced = books.per_step_ms(books.total_ns)
    bars = _with_rest(bars, traced)
    bars.append(
        Bar(
            label="less the profiler's slowdown" if traced > step_ms else "beyond the traced step",
            ms=step_ms - traced,
            kind="correction",
            source="measured step time less the profiled step",
        )
    )
    return Waterfall(
        bars=bars,
        total_ms=step_ms,
        total_label="measured step",
        mfu_percent=100 * bars[0].ms / step_ms,
        basis=f"{CONVENTION} convention, {peak}",
    )


def ideal_ms(record: RunRecord) -> tuple[dict[str, float], str, float] | str:
    """Return ms per step of the model's FLOPs at the peak by part, the peak, the step in ms.

    Or the reason why that cannot be said.
    """
    speed = record.metrics.get("tokens_per_second_per_device")
    step = record.metrics.get("step_time")
    mfu = record.metrics.get(mfu_name(record, CONVENTION))
    if speed is None or speed.value is None or step is None or step.value is None:
        return "the record has no step time"
    if mfu is None or mfu.value is None:
        return (mfu.invalid if mfu else None) or "the record has no MFU"
    tokens = speed.value * step.value
    peak = float(mfu.details.get("peak_tflops") or 0)
    if not peak:
        return "the record does not say which peak its MFU is of"
    shares = flops_by_part(record.flops.terms) or {"matrix products": 1.0}
    total = record.flops.per_token[CONVENTION] * tokens / peak / 1e9
    name = f"{peak:.4g} TFLOPS {mfu.details.get('peak_dtype', '')} peak of one device"
    return {part: share * total for part, share in shares.items()}, name, 1e3 * step.value


def _executed_ms(record: RunRecord, model_ms: float) -> float | None:
    """Return what the counted FLOPs of one rank's step would take at the peak."""
    executed, tokens = record.counters.get("executed_flops"), record.workload.tokens_per_step
    if not executed or not tokens:
        return None
    model = record.flops.per_token[CONVENTION] * tokens / record.hardware.num_devices
    return model_ms * float(executed) / model


def flops_by_part(terms: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the share of each of PRODUCTS in the model's FLOPs, from the ledger's terms.

    A term that is not attention itself contains as much of it as causality halves.
    """
    parts: dict[str, float] = defaultdict(float)
    for name, term in terms.items():
        if name.startswith("linear_attention"):
            parts["linear attention"] += term["full"]
            continue
        whole, causal = term["full"], term["causal"]
        attention = whole if name.startswith("attention") else min(2 * (whole - causal), whole)
        parts["attention"] += attention
        parts["head and loss" if name == "head" else "matrix products"] += whole - attention
    total = sum(parts.values())
    return {part: parts[part] / total for part in PRODUCTS if parts[part]} if total else {}


def padding_share(steps: Sequence[Step]) -> float | None:
    """Return the padding's share of all positions in the measured steps; None if not recorded."""
    known = [step for step in steps if step.phase == "measured" and step.padding is not None]
    positions = sum((step.tokens or 0) + (step.padding or 0) for step in known)
    return sum(step.padding or 0 for step in known) / positions if positions else None


def _below_peak(
    books: Account, flops_ms: Mapping[str, float], padding: float | None, executed_ms: float | None
) -> list[Bar]:
    """Return computation beyond the ideal: by class, recomputed, on padding, on other FLOPs."""
    times = _compute_ms(books)
    lost: dict[str, float] = {}
    for part, classes in PRODUCTS.items():
        time = sum(times.pop(name, 0.0) for name in classes)
        lost[part] = max(time - flops_ms.get(part, 0.0), 0.0)
    extra = [*_padding_bar(lost, padding), *_non_model_bar(books, flops_ms, lost, executed_ms)]
    products = [
        Bar(
            label=f"{part} below peak",
            ms=ms,
            kind="compute",
            source=f"{', '.join(PRODUCTS[part])}: time in the trace less model FLOPs at the peak",
        )
        for part, ms in lost.items()
    ]
    bars = [*products, *(class_bar(name, ms) for name, ms in times.items())]
    return [*sorted(bars, key=lambda bar: -bar.ms), _recompute_bar(books), *extra]


def _padding_bar(lost: dict[str, float], padding: float | None) -> list[Bar]:
    """Take padding's share out of what the products lost."""
    if padding is None:
        return []
    padded = {part: padding * ms for part, ms in lost.items()}
    for part, ms in padded.items():
        lost[part] -= ms
    source = f"{100 * padding:.3g} % of all positions are padding: that share of the products"
    return [Bar(label="padding", ms=sum(padded.values()), kind="compute", source=source)]


def _non_model_bar(
    books: Account, flops_ms: Mapping[str, float], lost: dict[str, float], executed_ms: float | None
) -> list[Bar]:
    """Take executed FLOPs that are neither the model's nor recomputed out of what was lost."""
    if executed_ms is None:
        return []
    products = {name for classes in PRODUCTS.values() for name in classes}
    again = [line.ns for line in books.lines if line.cause == RECOMPUTE and line.item in products]
    more = executed_ms - sum(flops_ms.values()) - books.per_step_ms(sum(again))
    most = max(lost, key=lambda part: lost[part])
    ms = min(max(more, 0.0), lost[most])
    lost[most] -= ms
    source = (
        f"counted FLOPs are {executed_ms / sum(flops_ms.values()):.3g} times the model's; those "
        "beyond the model and what recomputation can have done, at the peak: a lower bound"
    )
    return [Bar(label="non-model FLOPs", ms=ms, kind="compute", source=source)]


def _compute_bars(books: Account) -> list[Bar]:
    bars = [class_bar(name, ms) for name, ms in _compute_ms(books).items()]
    return [*sorted(bars, key=lambda bar: -bar.ms), _recompute_bar(books)]


def _compute_ms(books: Account) -> dict[str, float]:
    lines = [line for line in books.lines if line.cause == COMPUTE]
    return {line.item: books.per_step_ms(line.ns) for line in lines}


def _recompute_bar(books: Account) -> Bar:
    ns = sum(line.ns for line in books.lines if line.cause == RECOMPUTE)
    source = "operators of the forward pass inside the backward pass"
    return Bar(label="recomputation", ms=books.per_step_ms(ns), kind="compute", source=source)


def _other_bars(books: Account) -> list[Bar]:
    """Return communication by axis, late ranks, copies and idle times."""
    sums: dict[tuple[str, Kind, str], int] = defaultdict(int)
    for line in books.lines:
        known = _bar_of(line.cause, line.item)
        if known is not None:
            sums[known] += line.ns
    for key in (_bar_of(BUBBLE, ""), _bar_of(HOST, "")):
        assert key is not None
        sums[key] += 0
    bars = [
        Bar(label=label, ms=books.per_step_ms(ns), kind=kind, source=source)
        for (label, kind, source), ns in sums.items()
    ]
    order = {"communication": 0, "idle": 1}
    return sorted(bars, key=lambda bar: (order[bar.kind], -bar.ms))


def _bar_of(cause: str, item: str) -> tuple[str, Kind, str] | None:
    if cause == TRANSFER:
        axis = item.partition(" over ")[2]
        label = f"communication, {axis}" if axis else "communication"
        return label, "communication", "exposed transfers, no computation beside them"
    if cause == LATE:
        return "late ranks", "communication", "waiting in collectives, and what it waits for"
    if cause == COPIES:
        return "copies", "communication", "memory copies with nothing beside them"
    if cause in (HOST, CALLS, BUBBLE, IDLE):
        return cause, "idle", _IDLE_SOURCES[cause]
    return None


_IDLE_SOURCES = {
    HOST: "nothing runs and nothing is queued",
    CALLS: "the host is inside a collective call, no transfer runs",
    BUBBLE: "the host waits for a pipeline neighbour",
    IDLE: "work is queued, or its launch is not in the trace",
}


def _with_rest(bars: Sequence[Bar], total_ms: float) -> list[Bar]:
    """Return the bars with what is missing to the total."""
    rest = total_ms - sum(bar.ms for bar in bars)
    if abs(rest) < ROUNDING * total_ms:
        rest = 0.0
    source = "what is left to the step in the trace"
    return [*bars, Bar(label=REST, ms=rest, kind="correction", source=source)]
