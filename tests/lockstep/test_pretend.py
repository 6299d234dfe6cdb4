"""Every case cut into pretend ranks in this process: outputs and gradients on each of them.

In float64, where a fault of any size shows. `FREE` splits whatever can be split; the dice choose
among all legal layouts, so that every move and its dual meet every operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from plait.errors import PlaitError
from plait.rules.moves import Cut, Step
from tests import pretend
from tests.cases import CASES, Case
from tests.compare import demand, discrepancies, reference

TENSOR_PARALLEL = [c for c in CASES.values() if c.exact]
SIZES = (2, 3, 5)
SEEDS = 3  # dice a case in the full matrix


def sizes(case: Case) -> list[int]:
    """Two rank counts a case in every run: one it names, and one that seldom divides."""
    named = [m.tp for m in case.meshes if not m.pipeline and m.tp <= 8]
    return sorted({named[-1] if named else 2, 3})


GRID = [
    pytest.param(c, n, id=f"{c.id}-{n}", marks=() if n in sizes(c) else pytest.mark.full)
    for c in TENSOR_PARALLEL
    for n in sorted({*SIZES, *sizes(c)})
]


def prove(case: Case, prices: pretend.Prices, n: int) -> pretend.Divided:
    dtype = case.dtypes[-1]
    setup = case.setup(dtype)
    try:
        program = pretend.trace(setup, case.training)
    except PlaitError as error:
        if case.right == "R2":
            pytest.skip(f"refused: {error}")
        raise
    divided = pretend.divide(program, n, prices)
    want, close = reference(case, setup, dtype)
    for rank, got in enumerate(pretend.run(divided, setup, case.training)):
        lines = discrepancies(got, want, close)
        demand(lines, about=f"{case.id}, rank {rank} of {n}, {dtype}\n{divided.plan()}\n")
    return divided


@pytest.mark.parametrize(("case", "n"), GRID)
def test_split_as_far_as_it_goes(case: Case, n: int) -> None:
    divided = prove(case, pretend.Free(n), n)
    assert divided.split or not case.splits, f"nothing is split\n{divided.plan()}"


@pytest.mark.parametrize(
    ("case", "n", "seed"),
    [
        pytest.param(
            c, n, s, id=f"{c.id}-{n}-{s}", marks=() if (n, s) == (2, i % 3) else pytest.mark.full
        )
        for i, c in enumerate(TENSOR_PARALLEL)
        for n in (2, 3)
        for s in range(SEEDS)
    ],
)
def test_layouts_by_dice(case: Case, n: int, seed: int) -> None:
    prove(case, pretend.Dice(n, seed), n)


@pytest.mark.parametrize("action", ["all_reduce", "reduce_scatter", "gather", "slice_own"])
def test_a_wrong_move_would_be_seen(monkeypatch: pytest.MonkeyPatch, action: str) -> None:
    """The harness can fail: one kind of move, forward or backward, gives twice its value."""
    from plait.passes import pretend as runner

    right, met = runner.together, list[str]()

    def wrong(step: Step, xs: Sequence[torch.Tensor], cut: Cut | None) -> list[torch.Tensor]:
        met.append(step.action)
        return [x * (2 if step.action == action else 1) for x in right(step, xs, cut)]

    monkeypatch.setattr(runner, "together", wrong)
    with pytest.raises(AssertionError, match="values differ"):  # noqa: PT012
        for seed in range(SEEDS):
            prove(CASES["b17_gradient_needs_a_sum"], pretend.Dice(2, seed), 2)
    assert action in met


@pytest.mark.parametrize(("which", "wrong"), [(0, 10), (0, -1), (1, 10), (1, -3)])
def test_an_index_of_no_row_is_refused_as_by_one_process(which: int, wrong: int) -> None:
    """Not taken for a row of another rank, whose term would be zero."""
    setup = CASES["b16_cross_entropy_ignores_labels"].setup(torch.float64)
    divided = pretend.divide(pretend.trace(setup, True), 2, pretend.Free(2))
    assert {"emb.weight", "head.weight"} <= divided.split
    args = [x.clone() for x in setup.args]
    args[which][0, 0] = wrong
    with pytest.raises((IndexError, RuntimeError), match="out of (range|bounds)"):
        pretend.run(divided, replace(setup, args=tuple(args)), train=True)
