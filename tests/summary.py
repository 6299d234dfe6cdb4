"""`--summary FILE`: what became of every test file, as a row of a table that is kept.

Files that were run to their end have their row replaced, the rows of others stay: the whole matrix
may be run at once or file by file.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

HEAD = """# The full matrix

One row a file, written by `make test-all`; a file that is run again has its row replaced.

"""
COLUMNS = ("file", "passed", "failed", "skipped", "minutes", "on", "at", "with")


class Summary:
    """A plugin of the process that gathers the reports."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.collected: Counter[str] = Counter()
        self.outcomes: defaultdict[str, dict[str, str]] = defaultdict(dict)
        self.seconds: Counter[str] = Counter()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collect(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self.collected.clear()  # every worker collects all
        self._collect(ids)

    def _collect(self, ids: Iterable[str]) -> None:
        self.collected.update(map(_file, ids))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = _file(report.nodeid)
        self.seconds[file] += report.duration
        if report.when == "call" or report.outcome != "passed":
            known = self.outcomes[file].get(report.nodeid)
            self.outcomes[file][report.nodeid] = "failed" if known == "failed" else report.outcome

    def pytest_sessionfinish(self) -> None:
        rows = _rows(self.path)
        for file, outcomes in self.outcomes.items():
            if len(outcomes) == self.collected[file]:
                rows[file] = self._row(file, Counter(outcomes.values()))
        table = [COLUMNS, ("---",) * len(COLUMNS), *(rows[file] for file in sorted(rows))]
        self.path.write_text(HEAD + "".join(f"| {' | '.join(row)} |\n" for row in table))

    def _row(self, file: str, counts: Counter[str]) -> tuple[str, ...]:
        told = (str(counts[outcome]) for outcome in ("passed", "failed", "skipped"))
        on, minutes = f"{datetime.now(UTC):%Y-%m-%d}", f"{self.seconds[file] / 60:.1f}"
        return (file, *told, minutes, on, _commit(), _versions())


def _file(nodeid: str) -> str:
    return nodeid.split("::")[0]


def _rows(path: Path) -> dict[str, tuple[str, ...]]:
    lines = path.read_text().splitlines() if path.exists() else []
    cells = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    return {row[0]: row for row in cells if len(row) == len(COLUMNS) and Path(row[0]).exists()}


def _commit() -> str:
    return subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()


def _versions() -> str:
    cores = len(os.sched_getaffinity(0))
    named = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    return f"python {platform.python_version()}, {named}, {cores} cores"
