"""Random models, random masks: what nobody thought of, on pretend ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.capture import capture
from plait.errors import CaptureError
from plait.program import Program
from plait.rules.facts import pattern_of
from tests import pretend
from tests.cases import Setup
from tests.compare import Close, Run, as_good_as, demand, discrepancies, plain, within
from tests.fuzz import recipe
from tests.lockstep.test_overlap_forced import forced, left_whole, prove

SEEDS, FEWER = 200, 64  # in the full matrix; every run takes a few of them
CLOSE = within(1e-9, 1e-10)
FOUND_DYNAMIC = [pytest.param(s, marks=pytest.mark.unthinned) for s in (2023, 2144)]  # wrong once
JUMPS = {"looked_up", "best", "sequenced", "where", "maximum", "amax"}


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


@pytest.mark.parametrize("seed", range(FEWER))
def test_a_random_model_without_gradients(seed: int) -> None:
    setup = recipe(1000 + seed)
    setup = replace(setup, args=tuple(x.detach() for x in setup.args))
    right(setup, pretend.trace(setup, training=False), seed, CLOSE, train=False)


@pytest.mark.parametrize("seed", [*FOUND_DYNAMIC, *range(2000, 2000 + FEWER)])
def test_a_random_model_with_any_number_of_rows(seed: int) -> None:
    """One program for every batch, or a refusal that names the size."""
    setup = recipe(seed, batch=4)
    try:
        program = capture(setup.model, setup.args, {}, dynamic={"args": [{0: "rows"}] * 2}, training=True)
    except CaptureError as error:
        if "'rows' " not in str(error):
            raise
        pytest.skip("its rows are of one number")
    (size,) = program.sizes
    for rows in (4, 7, 2):
        if size.low <= rows and (size.high is None or rows <= size.high):
            args = [torch.randn(rows, *x.shape[1:], dtype=x.dtype) for x in setup.args]
            call = replace(setup, args=tuple(x.requires_grad_() for x in args))
            try:
                want = plain(call)
            except IndexError:  # a row that is asked for by its number
                continue
            right(call, program, seed, CLOSE, want=want)


@pytest.mark.parametrize("seed", range(FEWER))
def test_a_random_model_of_a_short_dtype(seed: int) -> None:
    """As near to float64 as one process comes, where no operator jumps by what is rounded."""
    setup = recipe(3000 + seed)
    if JUMPS & {name for name, *_ in setup.model.steps}:  # type: ignore[union-attr]
        pytest.skip("its values jump")
    setup = setup.to(torch.bfloat16)
    exact = plain(setup.to(torch.float64))
    want = plain(setup)
    right(setup, pretend.trace(setup, True), seed, as_good_as(vars(want), vars(exact), 8.0), want=want)


def right(
    setup: Setup, program: Program, seed: int, close: Close, train: bool = True, want: Run | None = None
) -> None:
    """On two ranks by dice, and on three split as far as it goes."""
    want = want or plain(setup, train)
    for n, prices in ((2, pretend.Dice(2, seed)), (3, pretend.Free(3))):
        divided = pretend.divide(program, n, prices)
        for rank, got in enumerate(pretend.run(divided, setup, train)):
            lines = discrepancies(got, want, close)
            demand(lines, about=f"rank {rank} of {n}\n{setup.model}\n{divided.plan()}\n")


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
