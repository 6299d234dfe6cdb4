"""The table that the full matrix leaves: a row a file, of files that were run to their end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.summary import Summary


def report(name: str, outcome: str, when: str = "call") -> Any:
    return SimpleNamespace(nodeid=name, outcome=outcome, when=when, duration=30.0)


def run(path: Path, collected: list[str], *reports: Any) -> list[list[str]]:
    summary = Summary(path)
    summary.pytest_collection_finish(SimpleNamespace(items=[SimpleNamespace(nodeid=n) for n in collected]))  # type: ignore[arg-type]
    for each in reports:
        summary.pytest_runtest_logreport(each)
    summary.pytest_sessionfinish()
    rows = [line.strip("|").split("|")[:5] for line in path.read_text().splitlines() if "::" in line or ".py" in line]
    return [[cell.strip() for cell in row] for row in rows]


def test_rows_are_replaced_and_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.py", "b.py"):
        Path(name).touch()
    path = tmp_path / "full.md"
    good = [report("a.py::x", "passed", "setup"), report("a.py::x", "passed"), report("a.py::y", "skipped", "setup")]
    rows = run(path, ["a.py::x", "a.py::y", "b.py::x", "b.py::y"], *good, report("b.py::x", "passed"))
    assert rows == [["a.py", "1", "0", "1", "1.5"]], "b.py was not run to its end"
    assert run(path, ["b.py::x"], report("b.py::x", "passed"), report("b.py::x", "failed", "teardown")) == [
        ["a.py", "1", "0", "1", "1.5"],
        ["b.py", "0", "1", "0", "1.0"],
    ]
    assert run(path, ["a.py::x"], report("a.py::x", "failed"), report("a.py::x", "passed", "teardown"))[0] == [
        "a.py", "0", "1", "0", "1.0",
    ]  # fmt: skip
    Path("b.py").unlink()
    assert len(run(path, [])) == 1, "of files that there are no more, nothing is told"
