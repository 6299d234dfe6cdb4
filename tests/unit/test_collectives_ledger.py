"""The ledger: counted bytes are the closed forms, never below the bounds."""

from __future__ import annotations

from math import lcm

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.collectives import COLLECTIVES, build, closed_form, compare, least, ledger, names


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("n", [*range(2, 18), 31, 32, 33, 63, 64])
def test_bytes_are_the_closed_forms(collective: str, n: int) -> None:
    for name in names(collective):
        form = closed_form(name, collective, n)
        if form is not None and not (collective == "all_to_all" and n > 33):
            schedule = build(f"{collective} {name}[{n}]")
            size = lcm(n * n, schedule.chunks)
            book = ledger(schedule, size)
            assert book.busiest == pytest.approx(form.busiest * size, rel=1e-12)
            assert book.total == pytest.approx(form.total * size, rel=1e-12)


def test_every_all_reduce_has_a_closed_form() -> None:
    assert all(closed_form(name, "all_reduce", 5) for name in names("all_reduce"))


@settings(max_examples=200)
@given(st.integers(2, 64), st.integers(0, 5000))
def test_a_ring_sends_two_s_less_two_of_its_chunks(n: int, size: int) -> None:
    ring = build(f"ring[{n}]")
    book, chunks = ledger(ring, size), ring.chunk_sizes(size)
    assert book.total == 2 * (n - 1) * size
    for rank, sent in enumerate(book.sent):  # it never sends the sum of one chunk, nor one partial
        assert sent == 2 * size - chunks[rank] - chunks[(rank + 1) % n]
    if size >= n:
        assert max(book.sent) < 2 * size


@settings(max_examples=60)
@given(st.sampled_from(COLLECTIVES), st.integers(2, 17), st.integers(1, 3), st.data())
def test_nothing_beats_the_bound(collective: str, n: int, pieces: int, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(names(collective)))
    schedule = build(f"{collective} {name}[{n}]/{pieces}")
    size = lcm(n * n, schedule.chunks)
    book, bound = ledger(schedule, size), least(collective, n)
    assert book.busiest >= bound.busiest * size * (1 - 1e-12)
    assert book.total >= bound.total * size * (1 - 1e-12)
    assert sum(book.sent) == sum(book.received) == book.total


@pytest.mark.parametrize("n", [2, 3, 8, 64])
def test_the_master_of_a_parameter_server_carries_everything(n: int) -> None:
    book = ledger(build(f"parameter_server[{n}]"), 1000)
    assert (book.sent[0], book.received[0]) == ((n - 1) * 1000, (n - 1) * 1000)
    assert set(book.sent[1:]) == {1000}


def test_whole_elements_travel() -> None:
    assert ledger(build("ring[4]"), 12, itemsize=4).sent == (16, 16, 20, 20)
    book = ledger(build("all_gather ring[3]"), 28, itemsize=4, sizes=(4, 0, 3))
    assert book.total == 2 * 28
    assert book.links[(0, 1)] == 4 * (4 + 3)


def test_a_hierarchy_saves_bytes_between_hosts() -> None:
    """2(k-1)/k S leave a host of g ranks, against 2(N-1)/N S of a flat ring on one link."""
    size = 16 * 64
    flat, levels = build("ring[16]"), build("hierarchical[2x8: ring, ring]")

    def leaving(schedule: object) -> int:
        links = ledger(schedule, size).links
        return sum(b for (a, c), b in links.items() if a < 8 <= c)

    assert leaving(flat) == 2 * 15 * size // 16
    assert leaving(levels) == 2 * 1 * size // 2


def test_the_comparison_is_printed() -> None:
    lines = compare(build("halving_doubling[6]"), 6 << 10).splitlines()
    assert [line.split()[-2:] for line in lines[2:]] == [
        ["15360", "61440"],
        ["15360", "61440"],
        ["10240", "61440"],
        ["1.500", "1.000"],
    ]
