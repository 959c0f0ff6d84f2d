"""Paired timing: several contenders take turns in one process, so that drift hits them alike."""

import statistics
import time
from collections.abc import Callable, Mapping


def interleave(
    contenders: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int = 2
) -> dict[str, list[float]]:
    """Call every contender once per round, in turn, and return each one's times in s."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for round_number in range(warmup + rounds):
        for name, call in contenders.items():
            begin = time.perf_counter()
            call()
            if round_number >= warmup:
                times[name].append(time.perf_counter() - begin)
    return times


def ratio(times: dict[str, list[float]], a: str, b: str) -> float:
    """Return the median over rounds of time ``a`` / time ``b``, pair by pair."""
    return statistics.median(x / y for x, y in zip(times[a], times[b], strict=True))


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
