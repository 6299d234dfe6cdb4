"""`compiled.step` on gloo: every schedule, on every rank against one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from plait.passes.schedule import SCHEDULES
from tests.cases import CASES, Case, Mesh
from tests.gloo import prove
from tests.gloo.harness import Failure, Pool, RanksFailed


def grid() -> Iterator[Any]:
    """(case, mesh, schedule); each case meets one schedule in `make test`, each mesh several."""
    cases = [c for c in CASES.values() if c.exact and c.training and c.right == "R1"]
    for i, case in enumerate(c for c in cases if any(m.pipeline for m in c.meshes)):
        meshes = [m for m in case.meshes if m.pipeline]
        for j, mesh in enumerate(meshes):
            for k, name in enumerate(SCHEDULES):
                chosen = j == i % len(meshes) and k == i % len(SCHEDULES)
                marks = [] if chosen else [pytest.mark.full]
                yield pytest.param(case, mesh, name, id=f"{case.id}-{mesh}-{name}", marks=marks)


@pytest.mark.parametrize(("case", "mesh", "schedule"), grid())
def test_step(pool: Pool, case: Case, mesh: Mesh, schedule: str) -> None:
    answers = pool.ask(prove.stepped, mesh.size, case.id, str(mesh), schedule)
    failures = [a for a in answers if isinstance(a, Failure)]
    if failures and all(" can be cut apart at " in f.message for f in failures):
        pytest.skip(f"too few operators for {schedule}: {failures[0].message}")
    if failures:
        raise RanksFailed(failures, mesh.size)
    prove.alike(answers)
