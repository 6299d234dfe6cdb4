"""Random models, random masks: what nobody thought of, on pretend ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.rules.facts import pattern_of
from tests import pretend
from tests.compare import demand, discrepancies, plain, within
from tests.fuzz import recipe
from tests.lockstep.test_overlap_forced import forced, left_whole, prove

SEEDS = 200  # in the full matrix; every run takes a few of them


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_random_model_is_right_on_every_rank(seed: int) -> None:
    setup = recipe(seed)
    want = plain(setup)
    program = pretend.trace(setup, training=True)
    for n, prices in ((2, pretend.Dice(2, seed)), (3, pretend.Free(3))):
        divided = pretend.divide(program, n, prices)
        for rank, got in enumerate(pretend.run(divided, setup, train=True)):
            lines = discrepancies(got, want, within(1e-9, 1e-10))
            demand(lines, about=f"rank {rank} of {n}\n{setup.model}\n{divided.plan()}\n")


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_random_model_in_chunks(seed: int) -> None:
    setup, n, count = recipe(seed), 2 + seed % 2, 2 + seed % 3
    planned = forced(pretend.trace(setup, training=True), n, count)
    demand(list(left_whole(planned, n, count)), about=str(setup.model))
    prove(planned, setup, n, True, plain(setup), within(1e-9, 1e-10))


@given(st.integers(1, 6), st.integers(1, 6), st.randoms(use_true_random=False))
def test_any_mask_has_its_pattern_or_none(rows: int, cols: int, dice) -> None:  # type: ignore[no-untyped-def]
    edges = [dice.randrange(-2, cols + 2) for _ in range(2)]
    i, j = torch.arange(rows)[:, None], torch.arange(cols)
    for mask in (
        j - i <= edges[0],
        (j - i <= edges[0]) & (j - i >= edges[1]),
        torch.tensor([[dice.random() < 0.5 for _ in range(cols)] for _ in range(rows)]),
    ):
        found = pattern_of(mask)
        assert found is None or torch.equal(found[0].allowed(rows, cols), mask)
