"""Pipelines on gloo: the cases whose meshes name pp, on every rank against one process."""

from __future__ import annotations

import pytest
import torch

from tests.cases import CASES, Case, Mesh
from tests.gloo import prove
from tests.gloo.harness import Pool

GRID = [
    pytest.param(c, m, id=f"{c.id}-{m}")
    for c in CASES.values()
    if c.exact and torch.float64 in c.dtypes and c.right == "R1"
    for m in c.meshes
    if m.pipeline
]


@pytest.mark.parametrize(("case", "mesh"), GRID)
def test_right(pool: Pool, case: Case, mesh: Mesh) -> None:
    prove.alike(pool.run(prove.right, mesh.size, case.id, str(mesh), torch.float64, {}))
