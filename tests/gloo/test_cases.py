"""The cases on gloo: outputs, gradients, optimizer steps and modes, on every rank.

Each case runs on every mesh it names in the full matrix, its dtypes in turn; `make test` takes one mesh
a case, chosen so that every mesh size meets both dtypes, and one pipeline where a case names any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from plait.errors import PlaitError
from tests.cases import CASES, Case, Mesh
from tests.gloo import prove
from tests.gloo.harness import Failure, Pool, RanksFailed

LARGEST = 16  # ranks of a pool
DTYPES = (torch.float32, torch.float64)


def grid() -> Iterator[Any]:
    """(case, mesh, dtype); what stands outside the covering subset is marked `full`."""
    for i, case in enumerate(c for c in CASES.values() if c.exact):
        meshes = [m for m in case.meshes if m.size <= LARGEST]
        small = [m for m in meshes if m.size <= 8]
        chosen = [kind[i % len(kind)] for kind in _kinds(small) if kind]
        for mesh in meshes:
            # chosen ones take the same turn, whichever mesh it is
            turn = i // 2 if mesh in chosen else i // 2 + 1 + meshes.index(mesh)
            dtype = case.dtypes[turn % len(case.dtypes)]
            name = str(dtype).removeprefix("torch.")
            marks = [] if mesh in chosen else [pytest.mark.full]
            yield pytest.param(case, mesh, dtype, id=f"{case.id}-{mesh}-{name}", marks=marks)


def _kinds(meshes: Sequence[Mesh]) -> tuple[list[Mesh], list[Mesh]]:
    return [m for m in meshes if not m.pipeline], [m for m in meshes if m.pipeline]


def ask(pool: Pool, body: Any, case: Case, mesh: Mesh, *args: Any) -> list[Any]:
    """`body` on every rank; a refusal is right where the case allows one, made by all alike."""
    answers = pool.ask(body, mesh.size, case.id, str(mesh), *args)
    failures = [a for a in answers if isinstance(a, Failure)]
    if case.right == "R2" and failures and all(isinstance(f.error, PlaitError) for f in failures):
        assert len(failures) == mesh.size, f"only {len(failures)} of {mesh.size} ranks refused"
        assert len({f.message for f in failures}) == 1, [f.message for f in failures]
        pytest.skip(f"refused: {failures[0].message}")
    if failures:
        raise RanksFailed(failures, mesh.size)
    return answers


@pytest.mark.parametrize(("case", "mesh", "dtype"), grid())
@pytest.mark.sample(4)
def test_right(pool: Pool, case: Case, mesh: Mesh, dtype: torch.dtype) -> None:
    prove.alike(ask(pool, prove.right, case, mesh, dtype, {}))
