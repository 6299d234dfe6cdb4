"""The algebra: what unifies, what conflicts, and that a conflict leaves no trace."""

from __future__ import annotations

from math import prod

from hypothesis import given
from hypothesis import strategies as st

from plait.rules.equation import Algebra, Factor, atoms, flatten, product, segments, total


def sizes(f: Factor) -> list[int]:
    return [p.size for p in flatten(f)]


def test_a_packed_projection_takes_the_factors_of_its_view() -> None:
    algebra, h, d = Algebra(), Factor(6), Factor(4)
    rows = Factor(72)
    assert algebra.unify(rows, total([Factor(24), Factor(24), Factor(24)])) is None
    assert algebra.unify(rows, product((Factor(3), h, d))) is None
    assert [flatten(s) for s in segments(rows)] == [[h, d]] * 3


def test_rotate_half_makes_both_halves_one_factor() -> None:
    algebra, d, a, b = Algebra(), Factor(8), Factor(4), Factor(4)
    assert algebra.unify(d, total((a, b))) is None
    assert algebra.unify(d, total((b, a))) is None
    assert a.root() is b.root()


def test_grouped_heads_refine_and_other_groups_conflict() -> None:
    algebra, heads = Algebra(), Factor(24)
    assert algebra.unify(heads, product((Factor(6), Factor(4)))) is None
    assert algebra.unify(heads, product((Factor(3), Factor(8)))) is None
    assert sizes(heads) == [3, 2, 4]
    conflict = algebra.unify(heads, product((Factor(4), Factor(6))))
    assert conflict is not None
    assert "against" in str(conflict)
    assert sizes(heads) == [3, 2, 4]


def test_a_shift_against_itself_is_a_conflict_not_a_loop() -> None:
    algebra, s, rest = Algebra(), Factor(16), Factor(15)
    assert algebra.unify(s, total((Factor(1), rest))) is None
    assert "shifted" in str(algebra.unify(s, total((rest, Factor(1)))))
    assert [p.size for p in segments(s)] == [1, 15]


def test_segments_that_are_no_multiples_of_a_head_conflict() -> None:
    algebra, rows = Algebra(), total((Factor(64), Factor(32), Factor(32)))
    assert algebra.unify(product((Factor(8), Factor(16), Factor(1))), rows) is None
    other = total((Factor(20), Factor(28)))
    assert "no multiples" in str(algebra.unify(product((Factor(3), Factor(16))), other))


def test_sizes_must_agree() -> None:
    assert "differ" in str(Algebra().unify(Factor(4), Factor(5)))


factorings = st.lists(st.integers(2, 4), min_size=1, max_size=4)


@given(factorings, factorings)
def test_unification_is_all_or_nothing_and_symmetric(a: list[int], b: list[int]) -> None:
    def fresh() -> tuple[Factor, Factor]:
        rest = prod(b) // 1, prod(a) // 1
        left = product([Factor(n) for n in [*a, rest[0]]])
        right = product([Factor(n) for n in [*b, rest[1]]])
        return left, right

    left, right = fresh()
    before = sizes(left), sizes(right)
    forward = Algebra().unify(left, right)
    mirrored = Algebra().unify(*reversed(fresh()))
    assert (forward is None) == (mirrored is None)
    if forward is None:
        assert left.root() is right.root()
        assert prod(f.size for f in atoms(left)) == left.size
    else:
        assert (sizes(left), sizes(right)) == before


@given(st.lists(st.integers(1, 6), min_size=2, max_size=5), st.data())
def test_sums_keep_their_total(parts: list[int], data: st.DataObject) -> None:
    whole = Factor(sum(parts))
    algebra = Algebra()
    assert algebra.unify(whole, total([Factor(n) for n in parts])) is None
    cut = data.draw(st.integers(1, sum(parts) - 1))
    algebra.unify(whole, total((Factor(cut), Factor(sum(parts) - cut))))
    assert sum(p.size for p in segments(whole)) == sum(parts)
