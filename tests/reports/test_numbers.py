"""Numbers as text: as many digits as make sense, in a unit that fits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports.numbers import as_published, moment, number, quantity, scalar, short_count, short_flop


@given(st.floats(1e-9, 1e15) | st.floats(-1e15, -1e-9))
def test_number_keeps_four_significant_digits(value):
    assert float(number(value).replace(",", "")) == pytest.approx(value, rel=5.1e-4)
    assert "e" not in number(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1.0, "1.000"), (866.34, "866.3"), (5262.68, "5,263"), (0.012345, "0.01235")],
)
def test_number(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(5262.68, "5,262.68"), (1635, "1,635"), (542.108, "542.108"), (10, "10")]
)
def test_published_figures_stand_as_they_were_published(value, text):
    assert as_published(value) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.01234, "s", "12.34 ms"),
        (1.5, "s", "1.500 s"),
        (0.25, "GiB", "256.0 MiB"),
        (0.03595, "TFLOPS", "35.95 GFLOPS"),
        (1535.93, "TFLOPS", "1,536 TFLOPS"),
        (0.0, "s", "0 s"),
        (0.5, "%", "0.5000 %"),
    ],
)
def test_quantity_has_the_unit_that_fits(value, unit, text):
    assert quantity(value, unit) == text


def test_counts_in_short():
    assert short_count(671_026_404_352) == "671.0 B"
    assert short_count(32_996_608) == "33.00 M"
    assert short_flop(291_853_541_376) == "291.9 GFLOP"


def test_settings_as_text():
    assert [scalar(v) for v in (None, True, 1024, 15360, 2.2e-4, "a")] == [
        "\u2013",
        "yes",
        "1024",
        "15,360",
        "0.00022",
        "a",
    ]


def test_times_are_readable():
    assert moment("2026-12-01T11:45:00+00:00") == "2026-12-01 11:45:00 UTC"
