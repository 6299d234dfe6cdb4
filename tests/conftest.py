"""Fixtures that every test may use."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings

from tests.gloo.harness import Pool
from tests.summary import Summary

os.environ["PLAIT_PLAN_CACHE"] = ""  # of every worker, too: a test plans what it says, not what another has planned

# No example is timed: a machine may be busy with the other workers.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes on gloo, started at the first use and shared by the whole session."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def fresh() -> Iterator[Pool]:
    """A pool of its own, for tests that break the group."""
    pool = Pool()
    yield pool
    pool.close()


THINNED = 60  # tests of one function: beyond it, a fixed part of them stands for the rest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thin", type=int, default=1, help="run one in so many of a large family")
    parser.addoption("--summary", type=Path, help="keep what became of every file in this table")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--summary")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Summary(path))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Large families of parametrised tests are thinned, by name, so that the choice never moves."""
    part = config.getoption("--thin")
    if part <= 1:
        return
    families: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        families[_family(item)].append(item)

    kept = {item for family in families.values() for item in _thinned(family, part)}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _thinned(family: list[pytest.Item], part: int) -> list[pytest.Item]:
    if sample := family[0].get_closest_marker("sample"):
        plain = [item for item in family if not item.get_closest_marker("full")]
        return sorted(plain, key=_place)[: sample.args[0]]
    if len(family) < THINNED:
        return family
    return [item for item in family if item.get_closest_marker("unthinned") or _place(item) % part == 0]


def _family(item: pytest.Item) -> str:
    return item.nodeid.split("[")[0]


def _place(item: pytest.Item) -> int:
    return crc32(item.nodeid.encode())
