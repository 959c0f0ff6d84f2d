"""Fixtures that several folders of tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rank_pool import RankPool

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def one_rank() -> Iterator[RankPool]:
    """One gloo rank."""
    pool = RankPool(1)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    """Two gloo ranks."""
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    """Four gloo ranks."""
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def eight_ranks() -> Iterator[RankPool]:
    """Eight gloo ranks."""
    pool = RankPool(8)
    yield pool
    pool.close()
