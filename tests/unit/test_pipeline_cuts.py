"""Cuts against the best of all cuts, by brute force: time, bytes sent, memory by open micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import PlanError
from plait.plan.placement import Link
from plait.plan.recompute import recomputed, segments
from plait.plan.stages import EXACT, SLACK, Item, Line, cut
from plait.plan.ways import divided

PER_BYTE = 0.01
IMBALANCE = 0.05  # what a cut may lose to the best possible one


@st.composite
def lines(draw: st.DrawFn) -> Line:
    """Up to nine operators; weights that one, two or all of them read."""
    n = draw(st.integers(2, 9))
    names = draw(st.lists(st.sampled_from("abcd"), unique=True))
    items = tuple(
        Item(
            f"n{i}",
            draw(st.floats(0, 1)),
            float(draw(st.integers(0, 9))),
            draw(st.integers(-1, n - 1)),
            tuple(draw(st.lists(st.sampled_from(names), unique=True))) if names else (),
            joined=i > 0 and draw(st.integers(0, 4)) == 0,
            kept=float(draw(st.integers(0, 3))),
        )
        for i in range(n)
    )
    sizes = {w: float(draw(st.integers(0, 9))) for w in names}
    line = Line(items, sizes, float(draw(st.integers(0, 2))))
    return draw(st.sampled_from([line, recomputed(line), recomputed(line, 2.0)]))


def every(line: Line, stages: int) -> Iterator[tuple[int, ...]]:
    n = len(line.items)
    for inner in combinations([i for i in range(1, n) if not line.items[i].joined], stages - 1):
        yield (0, *inner, n)


def crossing(line: Line, at: int) -> float:
    """Counted value by value, not by sums."""
    before = line.items[:at]
    return sum(x.nbytes for i, x in enumerate(before) if x.last >= at and x.last > i)


def slowest(line: Line, bounds: Sequence[int]) -> float:
    n = len(line.items)
    return max(
        sum(x.seconds for x in line.items[i:j]) + (crossing(line, j) * PER_BYTE if j < n else 0.0)
        for i, j in pairwise(bounds)
    )


def memory(line: Line, i: int, j: int, opened: float) -> float:
    mine = line.items[i:j]
    held = sum(line.weights[w] for w in {w for x in mine for w in x.weights})
    kept = sum(x.kept for x in mine)
    if line.again is not None:
        inside = sum(crossing(line, s) for s in line.again.starts if i <= s < j)
        segment = min(opened, line.again.at_once) * min(kept, line.again.most)
        return line.workspace + held + opened * (line.again.entering + inside) + segment
    return line.workspace + held + opened * kept


@settings(max_examples=100)
@given(lines(), st.integers(1, 4), st.integers(0, 30), st.lists(st.integers(0, 3), min_size=4))
def test_no_cut_is_better(line: Line, stages: int, limit: int, opened: list[int]) -> None:
    opened = opened[:stages]
    possible = [
        bounds
        for bounds in every(line, stages)
        if all(
            memory(line, i, j, o) <= limit for (i, j), o in zip(pairwise(bounds), opened, strict=True)
        )
    ]
    options = dict(byte_seconds=PER_BYTE, memory=float(limit), opened=opened)
    if not possible:
        with pytest.raises(PlanError, match="does not fit|into at most"):
            cut(line, stages, **options)
        return
    best = min(slowest(line, bounds) for bounds in possible)
    found = cut(line, stages, **options)
    assert found.bounds in possible
    assert found.best == pytest.approx(best, rel=2 * EXACT, abs=1e-12)
    assert found.slowest == pytest.approx(slowest(line, found.bounds))
    assert found.slowest <= best * (1 + IMBALANCE) + 1e-9
    sent = [
        sum(crossing(line, b) for b in bounds[1:-1])
        for bounds in possible
        if slowest(line, bounds) <= best * (1 + SLACK)
    ]
    assert sum(found.crossing) <= min(sent) + 1e-9
    assert found.memory == pytest.approx(
        [memory(line, i, j, o) for (i, j), o in zip(pairwise(found.bounds), opened, strict=True)]
    )


@settings(max_examples=30)
@given(lines())
def test_more_stages_are_never_slower_where_sending_is_free(line: Line) -> None:
    best = float("inf")
    for stages in range(1, 5):
        try:
            found = cut(line, stages).best
        except PlanError:
            return
        assert found <= best * (1 + 2 * EXACT) + 1e-12
        best = found


def test_more_stages_than_places_to_cut() -> None:
    line = Line(tuple(Item(f"n{i}", 1.0) for i in range(3)))
    with pytest.raises(PlanError, match="into at most 3 stages"):
        cut(line, 4)
    with pytest.raises(PlanError, match="^4 stages, 2 a place as interleaved has them, where others have one: "):
        divided(line, Link(), 1.0, 2, "interleaved", 2, True)


def test_weights_that_do_not_fit_move_the_cut() -> None:
    items = tuple(Item(f"n{i}", 1.0, 1.0, i + 1, (f"w{i}",)) for i in range(4))
    heavy = Line(items, {"w0": 3.0, "w1": 1.0, "w2": 1.0, "w3": 1.0})
    assert cut(heavy, 2).bounds == (0, 2, 4)
    assert cut(heavy, 2, memory=3.0).bounds == (0, 1, 4)
    with pytest.raises(PlanError, match="does not fit"):
        cut(heavy, 2, memory=2.0)


@pytest.mark.parametrize("again", [False, True])
def test_stages_of_one_place_run_one_after_another(again: bool) -> None:
    """What a stage has only while it runs is in the memory of its place once."""
    items = tuple(Item(f"n{i}", 1.0, 1.0, i + 1, (f"w{i}",), kept=2.0 + i) for i in range(4))
    line = Line(items, {f"w{i}": 1.0 for i in range(4)}, workspace=100.0)
    line = recomputed(line) if again else line
    found = divided(line, Link(), 140.0, 2, "interleaved", 2, True)
    assert found.bounds == (0, 1, 2, 3, 4)
    runs = [100.0 + (2.0 + i) * again for i in range(4)]
    assert found.running == tuple(runs)
    rest = [held - r for held, r in zip(found.memory, runs, strict=True)]
    assert found.fullest(2) == max(rest[0] + rest[2] + runs[2], rest[1] + rest[3] + runs[3])
    assert found.fullest(2) <= 140


def test_early_stages_have_more_open_and_so_get_fewer_operators() -> None:
    items = tuple(Item(f"n{i}", 1.0, 1.0, i + 1, kept=1.0) for i in range(8))
    assert cut(Line(items), 2).bounds == (0, 4, 8)
    assert cut(Line(items), 2, memory=6.0, opened=(2, 1)).bounds == (0, 3, 8)


# -- segments ------------------------------------------------------------------------------------------


def test_segments_begin_between_layers_and_are_about_the_root_of_their_number() -> None:
    """A layer of eight operators keeps 16 bytes and hands on 1; inside it 6 are alive."""
    items = tuple(
        Item(f"n{i}", 1.0, 1.0 if i % 8 == 7 else 6.0, min(i + 1, 511), kept=2.0) for i in range(512)
    )
    line = Line(items)
    starts = segments(line)
    assert starts
    assert all(s % 8 == 0 for s in starts)
    held = len(starts) + max(j - i for i, j in pairwise((0, *starts, 512))) * 2.0
    best = min(n + -(-64 // (n + 1)) * 16.0 for n in range(64))
    assert held <= best * 1.3
    alone = np.array([0]), np.array([512]), 1.0
    assert recomputed(line).memory(*alone)[0] < line.memory(*alone)[0] / 8


def test_what_keeps_nothing_has_one_segment() -> None:
    assert segments(Line(tuple(Item(f"n{i}", 1.0) for i in range(4)))) == ()
