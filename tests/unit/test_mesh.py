"""The mesh: what fits the ranks, and keywords whose part is still to come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import MeshError
from plait.mesh import ORDERS, Mesh, Seats


def test_auto_is_any_number_that_fits() -> None:
    assert Mesh.fitting("auto", "auto", 1, 6) == (Mesh(6), Mesh(3, 2), Mesh(2, 3), Mesh(1, 6))
    assert Mesh.fitting(6, "auto", 1, 6) == (Mesh(6),)
    assert Mesh.fitting("auto", 1, "auto", 4) == (Mesh(4), Mesh(2, 1, 2), Mesh(1, 1, 4))


@given(st.integers(1, 96))
def test_every_mesh_of_all_ranks_is_there_once(ranks: int) -> None:
    found = Mesh.fitting("auto", "auto", "auto", ranks)
    every = {
        (t, p, ranks // (t * p))
        for t in range(1, ranks + 1)
        for p in range(1, ranks + 1)
        if ranks % (t * p) == 0
    }
    assert {(m.tp, m.pp, m.dp) for m in found} == every
    assert len(found) == len(every)


@pytest.mark.parametrize(
    ("tp", "pp", "words"),
    [
        (4, 1, "is 4 ranks, the group has 6; with 6 ranks these fit: tp=1 pp=6, tp=2 pp=3"),
        ("auto", 4, "tp=auto x pp=4 x dp=1, the group has 6"),
        (0, 1, "tp=0: it takes"),
    ],
)
def test_what_does_not_fit_is_told_what_does(tp: int | str, pp: int, words: str) -> None:
    with pytest.raises(MeshError, match=words):
        Mesh.fitting(tp, pp, 1, 6)


@pytest.mark.parametrize("order", ORDERS)
def test_every_rank_has_one_seat(order: str) -> None:
    seats = Seats(Mesh(2, 3, 4), order)
    for rank in range(24):
        place, replica, index = seats.of(rank)
        assert seats.grid[place, replica, index] == rank
    assert sorted(rank for ranks in seats.replicas() for rank in ranks) == list(range(24))
    assert all(seats.of(r[0])[0] == seats.of(r[0])[2] == 0 for r in seats.replicas())
