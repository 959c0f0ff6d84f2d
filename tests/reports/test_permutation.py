"""The exact permutation test: known smallest p-values, brute force, honest sentences."""

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reports.permutation import attainable_p, permutation_p, statement


@pytest.mark.parametrize(
    ("num_before", "num_after", "smallest"), [(3, 3, 1 / 20), (5, 3, 1 / 56), (10, 3, 1 / 286)]
)
def test_separate_groups_have_the_smallest_p_value_there_is(num_before, num_after, smallest):
    before = [1.0 + 0.01 * k for k in range(num_before)]
    after = [2.0 + 0.01 * k for k in range(num_after)]

    assert permutation_p(before, after) == pytest.approx(smallest)
    assert attainable_p(num_before, num_after) == pytest.approx(smallest)


def test_equal_values_prove_nothing():
    assert permutation_p([1.0, 1.0, 1.0], [1.0, 1.0]) == 1.0


@settings(deadline=None)
@given(st.lists(st.sampled_from([1.0, 1.5, 2.0, 4.0, 8.0]), min_size=2, max_size=6), st.data())
def test_equals_brute_force_over_all_orders(values, data):
    """Powers of two have exact logarithms in base two, so that ties are ties."""
    split = data.draw(st.integers(1, len(values) - 1))
    before, after = values[:split], values[split:]

    def difference(order):
        product_after = product_before = 1.0
        for value in order[split:]:
            product_after *= value
        for value in order[:split]:
            product_before *= value
        return product_after ** (1 / len(after)) / product_before ** (1 / len(before))

    observed = difference(values)
    sign = 1 if observed >= 1 - 1e-12 else -1
    orders = list(permutations(values))
    as_far = sum(difference(o) ** sign >= observed**sign * (1 - 1e-9) for o in orders)

    assert permutation_p(before, after) == pytest.approx(as_far / len(orders))


def test_one_run_each_is_called_untested():
    assert "not tested" in statement([1.0], [2.0])


def test_runs_too_few_to_prove_anything_are_called_so():
    assert "cannot give less than 0.333" in statement([1.0, 1.1], [2.0])


def test_enough_runs_prove_a_difference_or_do_not():
    assert "beyond chance at" in statement([1.0, 1.1, 1.2], [2.0, 2.1, 2.2])
    assert "not distinguishable" in statement([1.0, 2.0, 3.0], [1.1, 2.1, 3.1])


def test_times_must_be_positive():
    with pytest.raises(ValueError, match="positive"):
        permutation_p([0.0, 1.0], [1.0])
