"""The exact permutation test over run medians, and what a comparison of few runs can say."""

import math
from collections.abc import Sequence
from itertools import combinations

MAX_ARRANGEMENTS = 200_000
ALPHA = 0.05


def permutation_p(before: Sequence[float], after: Sequence[float]) -> float | None:
    """Return the one-sided p-value that ``after`` is as far from ``before`` as it is by chance.

    The statistic is the difference of mean logarithms, in the direction that was observed; every
    division of the values into groups of these sizes counts once, so the p-value is exact. None
    if a side is empty or there are more than MAX_ARRANGEMENTS divisions.

    Raises:
        ValueError: if a value is not positive.
    """
    if not before or not after:
        return None
    num_arrangements = math.comb(len(before) + len(after), len(after))
    if num_arrangements > MAX_ARRANGEMENTS:
        return None
    if min(*before, *after) <= 0:
        raise ValueError(f"times must be positive: {list(before)}, {list(after)}")
    logs = [math.log(value) for value in (*before, *after)]
    total = sum(logs)
    observed = sum(logs[len(before) :])
    # Sums in another order differ in the last bits: those are ties, neither more nor less.
    tolerance = 1e-12 * (1 + sum(map(abs, logs)))
    more = observed / len(after) - (total - observed) / len(before)
    sign = 1.0 if more >= -tolerance else -1.0
    limit = sign * observed - tolerance
    as_far = sum(sign * sum(chosen) >= limit for chosen in combinations(logs, len(after)))
    return as_far / num_arrangements


def attainable_p(num_before: int, num_after: int) -> float:
    """Return the smallest p-value that so many runs can give."""
    return 1 / math.comb(num_before + num_after, num_after)


def statement(before: Sequence[float], after: Sequence[float]) -> str:
    """Return in a sentence how much the runs' medians (s per step) prove."""
    counts = f"{len(before)} against {len(after)} runs"
    if len(before) == len(after) == 1:
        return (
            "One run each: steps of one run are not independent, so this difference is shown "
            "but not tested; repeat each run (five and three are enough) to test it."
        )
    p_value = permutation_p(before, after)
    if p_value is None:
        return f"{counts}: too many for the exact permutation test."
    smallest = attainable_p(len(before), len(after))
    test = f"exact one-sided permutation test over run medians, {counts}: p = {p_value:.3g}"
    if smallest > ALPHA:
        return f"{test}; so few runs cannot give less than {smallest:.3g}, so nothing is proven."
    proven = "a difference beyond chance" if p_value <= ALPHA else "not distinguishable from chance"
    return f"{test}, {proven} at {ALPHA}."
