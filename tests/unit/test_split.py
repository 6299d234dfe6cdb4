"""Splits: shares of any size, rows of packed and merged dims, covering ranges."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plait.rules.equation import Factor, product, total
from plait.rules.split import Split


def rows(split: Split, f: Factor, rank: int) -> list[int]:
    return [i for lo, hi in split.ranges(f, rank) for i in range(lo, hi)]


def test_rows_of_a_packed_projection() -> None:
    h, d = Factor(6), Factor(4)
    packed = total([product((h, d))] * 3)
    split = Split.even((h,), 4)
    assert split.bounds == (0, 2, 4, 5, 6)
    assert rows(split, packed, 2) == [*range(16, 20), *range(40, 44), *range(64, 68)]


def test_nine_heads_on_two_ranks_share_a_key_head() -> None:
    g, r, d = Factor(3), Factor(3), Factor(2)
    split = Split.even((g, r), 2)
    heads, keys = product((g, r, d)), product((g, d))
    assert split.sizes(heads) == (10, 8)
    assert [rows(split, keys, k) for k in (0, 1)] == [[0, 1, 2, 3], [2, 3, 4, 5]]
    assert split.disjoint(heads)
    assert not split.disjoint(keys)
    assert split.owned(keys, 1) == ((4, 6),)


def test_a_diagonal_and_half_a_run_are_not_split() -> None:
    g, r = Factor(3), Factor(3)
    assert not Split.even((g,), 3).splittable((g, g))
    assert not Split.even((g,), 3).splittable((product((g, g)),))
    assert not Split.even((g, r), 3).splittable((g, r))
    assert not Split.even((g, r), 3).splittable((r,))
    assert Split.even((g, r), 3).splittable((g,))


def test_a_dim_of_any_size_is_counted_without_a_look_at_its_rows() -> None:
    """What is outside of the split has one range each: of a symbolic size there are as good as endless."""
    batch, t, d = Factor(2**40 + 15), Factor(7), Factor(3)
    split = Split.even((t,), 2)
    assert split.sizes(product((batch, t, d))) == (12 * batch.size, 9 * batch.size)
    assert split.sizes(product((batch, total([t, d])))) == (7 * batch.size, 6 * batch.size)


@given(st.integers(1, 5), st.integers(2, 30), st.integers(1, 4), st.integers(2, 8))
def test_every_row_is_held_and_owned_once(outer: int, size: int, inner: int, n: int) -> None:
    f = Factor(size)
    dim = product((Factor(outer), f, Factor(inner)))
    split = Split.even((f,), n)
    held = [rows(split, dim, k) for k in range(n)]
    assert sorted(i for h in held for i in h) == list(range(dim.size))
    assert tuple(map(len, held)) == split.sizes(dim)
    assert max(split.bounds[k + 1] - split.bounds[k] for k in range(n)) <= -(-size // n)


@given(st.integers(2, 6), st.integers(2, 6), st.integers(2, 8))
def test_covering_ranges_hold_every_row_that_is_needed(g: int, r: int, n: int) -> None:
    kv, repeats = Factor(g), Factor(r)
    split = Split.even((kv, repeats), n)
    owned: list[int] = []
    for k in range(n):
        wanted = {i // r for i in rows(split, product((kv, repeats)), k)}
        assert wanted == set(rows(split, kv, k))
        owned += [i for lo, hi in split.owned(kv, k) for i in range(lo, hi)]
    assert sorted(owned) == list(range(g))
