"""Fixtures that every test may use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gloo.harness import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes on gloo, started at the first use and shared by the whole session."""
    pool = Pool()
    yield pool
    pool.close()
