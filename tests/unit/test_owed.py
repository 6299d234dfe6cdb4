"""Which gradients of weights a move takes: each once, in order, soon, and no more than it hides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.plan.owed import Debt, Move, assigned

times = st.integers(1, 9).map(float)
events = st.lists(st.tuples(st.booleans(), times), max_size=14).map(
    lambda drawn: [Debt(f"d{i}", s) if debt else Move(f"m{i}", s) for i, (debt, s) in enumerate(drawn)]
)


@given(events, st.sampled_from([0.0, 0.25, 0.5]))
def test_every_move_takes_what_it_hides(drawn: list[Debt | Move], loses: float) -> None:
    at = {event: i for i, event in enumerate(drawn)}
    taken = list(assigned(drawn, loses))
    order = [debt for _, paid in taken for debt in paid]
    debts = [e for e in drawn if isinstance(e, Debt)]
    assert order == debts[: len(order)], "each once, the oldest first"
    for move, paid in taken:
        before = [at[e] for e in drawn if isinstance(e, Move) and at[e] < at[move]][-2:]
        since = before[0] if len(before) == 2 else -1
        assert all(since < at[debt] < at[move] for debt in paid), "no later than at the next move but one"
        enough, last = move.seconds * (1 - loses), before[-1] if before else -1
        new = [debt for debt in paid if at[debt] > last]
        assert not new or sum(d.seconds for d in paid[:-1]) < enough, "no more than is hidden"
        left = [d for d in debts if last < at[d] < at[move] and d not in paid]
        assert not left or sum(d.seconds for d in paid) >= enough, "as much as there is"


def test_what_is_left_waits_for_one_move_only() -> None:
    drawn = [Debt("a", 3.0), Debt("b", 3.0), Move("m", 2.0), Debt("c", 1.0), Move("n", 2.0), Debt("d", 1.0)]
    taken = [(move.name, [debt.matmul for debt in paid]) for move, paid in assigned(drawn, 0.0)]
    assert taken == [("m", ["a"]), ("n", ["b"])]


@pytest.mark.parametrize("first", [Move("m", 1.0), Debt("a", 1.0)])
def test_a_move_before_any_matmul_takes_nothing(first: Debt | Move) -> None:
    assert list(assigned([first], 0.0)) == []
