"""Schedules as data: spellings that parse back, chunks, the shapes that the algorithms promise."""

from __future__ import annotations

from math import ceil, floor, log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.collectives import (
    ALGORITHMS,
    COLLECTIVES,
    Schedule,
    Spec,
    Transfer,
    build,
    closed_form,
    draw,
    explain,
    least,
    ledger,
    names,
    prove,
    supports,
)
from plait.collectives.schedule import balanced, offsets
from plait.collectives.trees import binary_tree, binomial_tree, in_order_tree, twin_trees
from plait.errors import ScheduleError

SPECS = st.builds(
    Spec,
    algorithm=st.sampled_from(sorted(ALGORITHMS)),
    levels=st.tuples(st.integers(1, 64)),
    collective=st.sampled_from(COLLECTIVES),
    pieces=st.integers(1, 9),
    root=st.integers(0, 63),
)
HIERARCHIES = st.lists(
    st.tuples(st.integers(1, 8), st.sampled_from(sorted(ALGORITHMS))), min_size=1, max_size=3
).map(
    lambda levels: Spec(
        "hierarchical",
        tuple(size for size, _ in levels),
        inner=tuple(name for _, name in levels),
    )
)


@given(st.one_of(SPECS, HIERARCHIES))
def test_a_spelling_parses_back(spec: Spec) -> None:
    assert Spec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("spelling", "chunks", "steps"),
    [
        ("ring[8]/4", 32, 56),
        ("tree[6]", 1, 4),
        ("broadcast tree[6]/16@2", 16, 17),
        ("hierarchical[2x8: ring, tree]", 2, 8),
        ("hierarchical[2x8: ring, ring]", 16, 16),
        ("all_gather ring[8]", 8, 7),
        ("ring[1]", 1, 0),
    ],
)
def test_spellings(spelling: str, chunks: int, steps: int) -> None:
    schedule = build(spelling)
    assert (str(schedule), schedule.chunks, len(schedule.steps)) == (spelling, chunks, steps)
    assert build(str(schedule)) is schedule
    assert hash(schedule) == hash(build(schedule.spec))


@pytest.mark.parametrize(
    ("spelling", "words"),
    [
        ("ring", "one reads"),
        ("ring[8", "one reads"),
        ("everything ring[8]", "one reads"),
        ("ring[0]", "at least one rank"),
        ("ring[4]/0", "one piece"),
        ("broadcast ring[4]@4", "a root among the ranks"),
        ("sing[8]", "no schedule is called 'sing'; there are parameter_server"),
        ("native[8]", "no schedule is called 'native'"),
        ("ring[2x4]", "nearest: ring[8]"),
        ("ring[5000]", "nearest: 1024 ranks ("),
        ("ring[8]/9999999", "nearest: 16384 pieces ("),
        ("ring[5000]/9999999", "nearest: ring[8] ("),
        ("hierarchical[2x4: ring]", "2 levels need as many algorithms"),
        ("hierarchical[2x4: ring, sing]", "no level can run sing"),
        ("all_to_all tree[4]", "tree cannot do all_to_all; these can: sharded_server, ring"),
        ("all_to_all hierarchical[2x2: ring, tree]", "tree cannot do all_to_all"),
    ],
)
def test_what_cannot_be_spelled_is_refused_in_words(spelling: str, words: str) -> None:
    with pytest.raises(ScheduleError) as error:
        build(spelling)
    assert words in str(error.value)


def test_a_ring_of_four_is_the_picture_in_the_docs() -> None:
    ring = build("ring[4]")
    assert ring.steps[0] == tuple(Transfer(r, (r + 1) % 4, (r - 1) % 4, "add") for r in range(4))
    assert ring.steps[3] == tuple(Transfer(r, (r + 1) % 4, r, "copy") for r in range(4))
    assert draw("ring[2]").splitlines() == [
        "ring[2]    (source: chunk taken, +chunk added)",
        "step   rank 0   rank 1",
        "0      1: +0    0: +1",
        "1      1: 1     0: 0",
    ]


def test_explain_says_how_sums_are_rounded() -> None:
    assert "in fp32 on one rank, and rounded once" in explain("two_shot[4]")
    assert "rounded to the dtype on the wire (3 roundings at most)" in explain("ring[4]")
    assert "depend on the size" in explain("ring[4]")
    assert "do not depend on the size" in explain("tree[4]")


@given(st.integers(0, 10**6), st.integers(1, 100))
def test_balanced_parts(total: int, parts: int) -> None:
    sizes = balanced(total, parts)
    assert sum(sizes) == total
    assert max(sizes) - min(sizes) <= 1
    assert offsets(sizes)[-1] == total


def test_chunk_sizes_of_uneven_parts() -> None:
    assert build("all_gather ring[3]/2").chunk_sizes(7, (4, 0, 3)) == (2, 2, 0, 0, 2, 1)
    assert build("all_to_all ring[2]").chunk_sizes(0, (1, 2, 3, 4)) == (1, 2, 3, 4)
    assert build("ring[4]").chunk_sizes(3) == (1, 1, 1, 0)
    with pytest.raises(ScheduleError, match="needs 3 sizes"):
        build("all_gather ring[3]").chunk_sizes(7, (4, 3))


@pytest.mark.parametrize("n", range(1, 65))
def test_trees_are_trees_of_the_promised_height(n: int) -> None:
    heights = {
        binary_tree: floor(log2(n)),
        in_order_tree: floor(log2(n)),
        binomial_tree: ceil(log2(n)),
    }
    for tree, height in heights.items():
        edges = tree(n)
        children = [child for _, child, _ in edges]
        assert len(children) == len(set(children)) == n - 1
        assert max((time + 1 for _, _, time in edges), default=0) == height
        reached = {child: time for _, child, time in edges}
        assert all(reached.get(parent, -1) < time for parent, _, time in edges)


@pytest.mark.parametrize("n", range(1, 65))
def test_every_rank_is_interior_in_at_most_one_twin(n: int) -> None:
    first, second = ({parent for parent, _, _ in edges} for edges in twin_trees(n))
    assert not first & second


@pytest.mark.parametrize("n", [*range(2, 18), 31, 32, 33, 64])
def test_steps_are_those_of_the_formulas(n: int) -> None:
    steps = {name: len(build(f"{name}[{n}]").steps) for name in names("all_reduce")}
    folded = 2 * (n > 1 << n.bit_length() - 1)
    assert steps == {
        "parameter_server": 2,
        "sharded_server": 2,
        "ring": 2 * (n - 1),
        "tree": 2 * floor(log2(n)),
        "binomial": 2 * ceil(log2(n)),
        "double_tree": 2 * floor(log2(n)),
        "halving_doubling": 2 * floor(log2(n)) + folded,
        "recursive_doubling": floor(log2(n)) + folded,
        "one_shot": 1,
        "two_shot": 2,
    }
    assert len(build(f"all_gather recursive_doubling[{n}]").steps) == ceil(log2(n))
    assert len(build(f"all_to_all recursive_doubling[{n}]").steps) == ceil(log2(n))


@settings(max_examples=40)
@given(st.sampled_from(COLLECTIVES), st.integers(2, 33), st.integers(1, 4), st.data())
def test_neighbours_of_a_hierarchy_stay_within_their_group(
    collective: str, n: int, pieces: int, data: st.DataObject
) -> None:
    """At the inner level no transfer leaves its group of consecutive ranks."""
    outer = data.draw(st.integers(2, 4))
    schedule = build(f"{collective} hierarchical[{outer}x{n}: one_shot, ring]/{pieces}")
    crossing = [t for _, t in schedule.transfers() if t.source // n != t.target // n]
    assert crossing
    assert all(t.source % n == t.target % n for t in crossing)


# --- what is no schedule ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spelling",
    [
        *("", "ring", "ring[]", "ring[-1]", "ring[4]]", "RING[4]", "ring[4 ]", "ring[4]//2", "ring[٤]"),
        *("ring[4.0]", "sum ring[4]", "ring[4]@4", "ring[4]/0", "ring[2x2]", "ring[4: ring]"),
        *("hierarchical[4]", "hierarchical[2x0: ring, ring]", "hierarchical[2x2: ring,, ring]"),
        *("hierarchical[2x2: ring, native]", "all_to_all tree[4]", "native[4]", "ring[4];ring[4]"),
        *("ring[100000]", "ring[4]/999999999", "ring[" + "9" * 5000 + "]", None, 4, b"ring[4]", ["x"]),
        "hierarchical[" + "x".join(["2"] * 40) + ": " + ", ".join(["ring"] * 40) + "]",
    ],
    ids=lambda s: str(s)[:24],
)
def test_what_spells_no_schedule_is_refused_at_once(spelling):
    for reader in (build, prove, draw, explain):
        with pytest.raises(ScheduleError):
            reader(spelling)


@pytest.mark.parametrize(
    ("levels", "more"),
    [
        *(((), {}), ((-2, -2), {}), ((4,), {"pieces": 1.5}), ((4,), {"root": True})),
        *(((4,), {"collective": "sum"}), ((2.5,), {})),
    ],
)
def test_a_spec_of_other_things_than_numbers_is_refused(levels, more):
    build(Spec("ring", (4,), root=1))  # remembered, and equal to one of them
    with pytest.raises(ScheduleError):
        build(Spec("ring", levels, **more))


GIVEN = ((Transfer(0, 1, 0, "add"),), (Transfer(1, 0, 0, "copy"),))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"n": 0}, "0 is no number of ranks"),
        ({"n": True}, "True is no number of ranks"),
        ({"collective": "sum"}, "'sum' is no collective"),
        ({"chunks": 0}, "has 0 chunks"),
        ({"root": 2}, "root at 2"),
        ({"collective": "all_gather", "chunks": 3}, "multiple of 2"),
        ({"steps": list(GIVEN)}, "no tuple but list"),
        ({"steps": (((0, 1, 0, "add"),),)}, "in step 0"),
        ({"steps": (*GIVEN, (Transfer(0, 1, 0.5, "add"),))}, "in step 2"),
        ({"steps": (*GIVEN, (Transfer(0, True, 0, "add"),))}, "in step 2"),
        ({"steps": (*GIVEN, (Transfer(0, 1, 0, "mul"),))}, "in step 2"),
    ],
)
def test_a_schedule_by_hand_is_formed_rightly(changed, words):
    fine = {"collective": "all_reduce", "n": 2, "chunks": 1, "steps": GIVEN}
    assert prove(Schedule(**fine)).roundings == 1
    with pytest.raises(ScheduleError, match=words.replace("(", r"\(")):
        Schedule(**fine | changed)


@pytest.mark.parametrize(
    "count",
    [
        lambda: ledger("ring[4]", -1),
        lambda: ledger("ring[4]", 1.5),
        lambda: ledger("ring[4]", "1MiB"),
        lambda: ledger("ring[4]", 8, 0),
        lambda: ledger("ring[4]", 8, 1, [2] * 4),  # an all_reduce has no parts
        lambda: ledger("all_gather ring[4]", 8, 1, [2, 2, 2, "2"]),
        lambda: ledger("all_gather ring[4]", 8, 1, 8),
        lambda: closed_form("ring", "sum", 4),
        lambda: closed_form("ring", "all_reduce", 0),
        lambda: least("sum", 4),
        lambda: least("all_reduce", 0),
        lambda: names("sum"),
        lambda: supports("ring", "sum"),
    ],
)
def test_what_cannot_be_counted_is_refused(count):
    with pytest.raises(ScheduleError):
        count()
