"""Cuts against the best of all cuts, by brute force."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from plait.errors import PlanError
from plait.plan.stages import SLACK, Item, Line, cut


def line(seed: int, n: int) -> Line:
    dice = random.Random(seed)
    items = tuple(
        Item(f"n{i}", dice.random(), dice.randint(1, 9), dice.randint(i, n - 1)) for i in range(n)
    )
    return Line(items)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_no_cut_is_better(seed: int, stages: int) -> None:
    program, per_byte = line(seed, 9), 0.01
    found = cut(program, stages, byte_seconds=per_byte)
    live, n = program.live(), len(program.items)
    every = []
    for inner in combinations(range(1, n), stages - 1):
        bounds = (0, *inner, n)
        times = [
            sum(x.seconds for x in program.items[i:j]) + (live[j] * per_byte if j < n else 0.0)
            for i, j in zip(bounds, bounds[1:], strict=False)
        ]
        every.append((max(times), sum(live[j] for j in inner)))
    best = min(slowest for slowest, _ in every)
    assert found.best == pytest.approx(best)
    assert found.slowest <= best * (1 + SLACK) + 1e-9
    within = [sent for slowest, sent in every if slowest <= best * (1 + SLACK)]
    assert sum(found.crossing) == pytest.approx(min(within))


def test_more_stages_than_places_to_cut() -> None:
    with pytest.raises(PlanError, match="at most pp=3"):
        cut(line(0, 3), 4)


def test_weights_that_do_not_fit_move_the_cut() -> None:
    items = tuple(Item(f"n{i}", 1.0, 1.0, i + 1, (f"w{i}",)) for i in range(4))
    heavy = Line(items, {"w0": 3.0, "w1": 1.0, "w2": 1.0, "w3": 1.0})
    assert cut(heavy, 2).bounds == (0, 2, 4)
    assert cut(heavy, 2, memory=3.0).bounds == (0, 1, 4)
    with pytest.raises(PlanError, match="does not fit"):
        cut(heavy, 2, memory=2.0)
