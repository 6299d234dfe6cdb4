"""The mesh: what fits the ranks, and keywords whose part is still to come."""

from __future__ import annotations

import pytest

from plait.errors import MeshError, NotYetError
from plait.mesh import Mesh, refuse_what_is_coming


def test_auto_takes_every_rank() -> None:
    assert Mesh.of("auto", "auto", 1, 6) == Mesh(6, 1, 1)
    assert Mesh.of(6, "auto", 1, 6) == Mesh(6, 1, 1)


@pytest.mark.parametrize(
    ("tp", "words"),
    [(4, "the group has 6; with 6 ranks these fit: tp=1 pp=6, tp=2 pp=3"), (0, "tp=0: it takes")],
)
def test_what_does_not_fit_is_told_what_does(tp: int, words: str) -> None:
    with pytest.raises(MeshError, match=words):
        Mesh.of(tp, 1, 1, 6)


def test_all_that_is_still_to_come_is_named_at_once() -> None:
    refuse_what_is_coming(pp=1, dp=1, micro_batches=1)
    with pytest.raises(NotYetError, match="schedule='1f1b': .* is still to come") as caught:
        refuse_what_is_coming(schedule="1f1b", micro_batches=8)
    assert "micro_batches=8" in str(caught.value)
