"""The bars of a waterfall, and those of what a step computes."""

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from reports.executed import ATTENTION_PART, PRODUCTS, Executed
from reports.traces.classify import ATTENTION, EMBEDDING_LOSS, OTHER

Kind = Literal["useful", "compute", "communication", "idle", "correction"]

_COUNTED = "FLOPs counted by operator, without recomputation"
_BELOW_TITLES = {EMBEDDING_LOSS: "head and loss"}


class Bar(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time in ms per step, mean over ranks; ``source`` says where the figure comes from."""

    label: str
    ms: float
    kind: Kind
    source: str


def class_bar(name: str, ms: float) -> Bar:
    """Return the bar of a class of operators."""
    label = "operators of no class" if name == OTHER else name.replace("_", " ")
    return Bar(label=label, ms=ms, kind="compute", source=f"class {name} in the trace")


def counted_bars(
    times: Mapping[str, float], counted: Executed, recompute: Bar, padding: float | None
) -> list[Bar]:
    """Return computation beyond the model's FLOPs where the executed ones are counted by operator.

    ``times``: ms of each class without recomputation. With the model's FLOPs at the peak and the
    recomputation the bars add up to all computation.
    """
    share = padding or 0.0
    bars = []
    for name in dict.fromkeys((*times, *counted.by_class)):
        ms, flops_ms = times.get(name, 0.0), counted.by_class.get(name)
        if flops_ms is None:
            bars.append(class_bar(name, ms))
        else:
            bars.append(_below_bar(name, (1 - share) * (ms - flops_ms)))
    bars.sort(key=lambda bar: -bar.ms)
    products_ms = sum(times.get(name, 0.0) for name in counted.by_class)
    return [
        *bars,
        recompute,
        *_padding_bars(share * products_ms, padding),
        *_beyond_bars(counted, share),
    ]


def _below_bar(name: str, ms: float) -> Bar:
    title = _BELOW_TITLES.get(name, name.replace("_", " "))
    if ms < 0:
        label = f"{title} above peak"
        source = f"class {name}: {_COUNTED}, would take longer at the stated peak than they took"
        return Bar(label=label, ms=ms, kind="correction", source=source)
    source = f"class {name}: time in the trace less its {_COUNTED}, at the peak"
    return Bar(label=f"{title} below peak", ms=ms, kind="compute", source=source)


def _padding_bars(ms: float, padding: float | None) -> list[Bar]:
    if padding is None:
        return []
    source = f"{100 * padding:.3g} % of all positions are padding: that share of the products"
    return [Bar(label="padding", ms=ms, kind="compute", source=source)]


def _beyond_bars(counted: Executed, share: float) -> list[Bar]:
    """Return executed less model FLOPs at the peak, without those on padding."""
    attention_ms = counted.by_class.get(ATTENTION, 0.0)
    products_ms = sum(counted.by_class.values()) - attention_ms
    attention = counted.beyond[ATTENTION_PART] - share * attention_ms
    masked = attention < 0
    source = f"{_COUNTED}, less the model's, at the peak"
    return [
        Bar(
            label="non-model FLOPs",
            ms=counted.beyond[PRODUCTS] - share * products_ms,
            kind="compute",
            source=f"matrix products: {source}",
        ),
        Bar(
            label="attention not executed" if masked else "non-model FLOPs of attention",
            ms=attention,
            kind="correction" if masked else "compute",
            source=f"attention: {source}" + (", which count what is masked" if masked else ""),
        ),
    ]
