"""Bad input to a collective: an error on every rank that names it, no wrong numbers, no hang.

Where all ranks can see that a call makes no sense, the group lives on. Where some cannot, because
they trust an earlier comparison or wait for a rank that will not come, the group ends; those tests
take a fresh pool for the next one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from plait import collectives
from plait.collectives import build
from plait.collectives.run import TaggedWires
from plait.errors import CollectiveError, PlaitError, ScheduleError
from tests.gloo.harness import Failure, Pool


def lives(group: Any) -> None:
    """The group still works."""
    x = collectives.all_reduce(torch.ones(3), group, "ring")
    assert x.tolist() == [dist.get_world_size(group)] * 3


# --- what every rank sees ------------------------------------------------------------------------


def refused(group: Any) -> None:
    n, x = dist.get_world_size(group), torch.ones(4, 2)
    calls: list[tuple[Any, str]] = [
        (lambda: collectives.all_reduce(x, group, "sing"), "no algorithm 'sing'; there are auto"),
        (lambda: collectives.all_to_all(x, None, group, "tree"), "no algorithm 'tree'"),
        (lambda: collectives.all_reduce(x, group, "ring[5]"), "for 5 ranks, and the group has 3"),
        (lambda: collectives.all_reduce(x, group, build("all_gather ring[3]")), "not of all_red"),
        (lambda: collectives.all_reduce(x, group, "hierarchical"), "say its levels"),
        (lambda: collectives.all_reduce(x, group, "ring", op="mean"), "none of sum, max, min"),
        (lambda: collectives.all_reduce([1.0], group), "takes a tensor, not list"),
        (lambda: collectives.all_reduce(x.to_sparse(), group), "this one is sparse_coo"),
        (lambda: collectives.all_reduce(x.to("meta"), group), "this one is meta"),
        (lambda: collectives.all_reduce(x.to(torch.float8_e4m3fn), group), "in bfloat16 or fl"),
        (lambda: collectives.all_reduce(x.to(torch.int16), group, "native"), "'ring' does"),
        (lambda: collectives.all_reduce(x + 1j, group, op="max"), "complex numbers have no max"),
        (lambda: collectives.broadcast(x, 3, group), "root 3 is none of the ranks 0..2"),
        (lambda: collectives.broadcast(x, 1.0, group), "root 1.0 is none"),  # type: ignore[arg-type]
        (lambda: collectives.all_reduce(x, group, 7), "a Schedule, not int"),  # type: ignore[arg-type]
        (lambda: collectives.all_gather(x, 4, group), "sizes are a list"),  # type: ignore[arg-type]
        (lambda: collectives.broadcast(x, 1, group, "tree[3]@2"), "root at rank 2, not 1"),
        (lambda: collectives.all_gather(x, [4, 4], group), "takes 3 sizes, one a rank"),
        (lambda: collectives.all_gather(x, [3] * n, group), "4 rows, and by sizes"),
        (lambda: collectives.reduce_scatter(x, [3, 3, -2], group), "none below 0"),
        (lambda: collectives.reduce_scatter(x, [3, 3, 3], group), "it should have 9"),
        (lambda: collectives.all_to_all(x, [[1, 2, 1]], group), "takes 3 x 3 sizes"),
        (lambda: collectives.all_gather(x.sum(), None, group), "a scalar tensor has not"),
        (lambda: collectives.all_reduce(x, "world"), "takes a process group, not str"),
        (lambda: collectives.all_reduce(x, group, "ring/²"), "no algorithm 'ring/²'"),
        (lambda: collectives.all_gather(x, [4, True, 4], group), "takes 3 sizes, one a rank"),
        (lambda: collectives.all_gather(x, [4.0] * n, group), "takes 3 sizes, one a rank"),  # type: ignore[list-item]
        (lambda: collectives.all_to_all(x, [[2.0, 1, 1]] * n, group), "takes 3 x 3 sizes"),  # type: ignore[list-item]
        (lambda: collectives.all_to_all(x.clone().requires_grad_(), [[4]], group), "takes 3 x 3"),
        (lambda: collectives.all_reduce(x, group, chooser="ring"), "a chooser is a function"),  # type: ignore[arg-type]
        *(
            (lambda t=t: collectives.all_reduce(x, group, timeout=t), "a timeout is a number of sec")
            for t in (0, -1.0, float("nan"), "1", True)
        ),
    ]
    for call, words in calls:
        with pytest.raises(CollectiveError) as error:
            call()
        assert words in str(error.value), (words, str(error.value))
    for spelling in ("ring[0]", "ring[3", "ring[3]/999999999", "ring[4000]", "ring[" + "9" * 5000):
        with pytest.raises(ScheduleError):
            collectives.all_reduce(x, group, spelling)
    lives(group)


def test_calls_that_make_no_sense(pool: Pool) -> None:
    pool.run(refused, 3)


def test_no_process_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(CollectiveError, match="there is no process group"):
        collectives.all_reduce(torch.ones(2))


def test_a_wrong_schedule_is_not_run(pool: Pool) -> None:
    failures = pool.errors(wrong, 3)
    assert {f.kind for f in failures} == {"ScheduleError"}
    assert all("at the end lacks rank" in f.message for f in failures)
    pool.run(lives, 3)


def wrong(group: Any) -> None:
    ring = build("ring[3]")
    steps = (ring.steps[0][1:], *ring.steps[1:])
    collectives.all_reduce(torch.ones(6), group, collectives.Schedule("all_reduce", 3, 3, steps))


# --- what ranks must compare ---------------------------------------------------------------------


def differing(group: Any, what: str, name: str) -> None:
    rank = dist.get_rank(group)
    odd = rank == 1
    if what == "shape":
        collectives.all_reduce(torch.ones(5 if odd else 6), group, name)
    elif what == "dtype":
        dtype = torch.int32 if odd else torch.float32  # the same number of bytes
        collectives.all_reduce(torch.ones(6, dtype=dtype), group, name)
    elif what == "algorithm":
        collectives.all_reduce(torch.ones(6), group, "two_shot" if odd else name)
    elif what == "collective":
        collect = collectives.reduce_scatter if odd else collectives.all_gather
        collect(torch.ones(6), None, group, name)
    elif what == "root":
        collectives.broadcast(torch.ones(6), int(odd), group, name)
    else:
        collectives.all_gather(torch.ones(rank), [0, 1, 2] if odd else [rank] * 3, group, name)


KINDS = ["shape", "dtype", "algorithm", "collective", "root", "sizes"]


@pytest.mark.parametrize("name", ["ring", "native"])
@pytest.mark.parametrize("what", KINDS)
def test_ranks_that_ask_for_different_things(pool: Pool, what: str, name: str) -> None:
    failures = pool.errors(differing, 3, what, name)
    assert {f.kind for f in failures} == {"CollectiveError"}
    assert len({f.message for f in failures}) == 1
    message = failures[0].message
    assert "the ranks ask for different collectives" in message
    assert all(f"rank {rank}: " in message for rank in range(3))
    pool.run(lives, 3)


def differing_slowly(group: Any) -> None:
    """A rank that is held up in the comparison for longer than the sentry's patience."""
    wires, rank = TaggedWires.send, dist.get_rank(group)

    def late(self: TaggedWires, *sent: Any) -> Any:
        TaggedWires.send = wires  # type: ignore[method-assign]
        time.sleep(4)
        return wires(self, *sent)

    if rank == 1:
        TaggedWires.send = late  # type: ignore[method-assign]
    collectives.all_reduce(torch.ones(6 + rank), group, "ring")


@pytest.mark.full
def test_a_comparison_takes_its_time(pool: Pool) -> None:
    """It ends with the same message on all ranks, and the group lives on."""
    failures = pool.errors(differing_slowly, 3)
    assert {f.kind for f in failures} == {"CollectiveError"}
    pool.run(lives, 3)


# --- where the group ends ------------------------------------------------------------------------


@pytest.fixture
def doomed(pool: Pool) -> Iterator[Pool]:
    """Workers whose groups will be unusable afterwards."""
    yield pool
    pool.close()


def known_both(group: Any, name: str) -> None:
    """Both requests were compared before, so no header is exchanged."""
    one, two = torch.ones(6), torch.ones(6, dtype=torch.int32)
    for _ in range(2):
        collectives.all_reduce(one.clone(), group, name)
        collectives.all_reduce(two.clone(), group, name)
    collectives.all_reduce(two if dist.get_rank(group) == 1 else one, group, name)


def known_one(group: Any, name: str) -> None:
    """One rank asks for something new, the others for what was compared before."""
    collectives.all_reduce(torch.ones(6), group, name)
    collectives.all_reduce(torch.ones(7 if dist.get_rank(group) == 1 else 6), group, name)


def opposite(group: Any, name: str) -> None:
    """Two calls in opposite order."""
    one, two = torch.ones(6), torch.ones(8)
    for x in (one, two):
        collectives.all_reduce(x, group, name)
    for x in (two, one) if dist.get_rank(group) == 1 else (one, two):
        collectives.all_reduce(x, group, name)


@pytest.mark.parametrize("name", ["ring", "tree", "native"])
@pytest.mark.parametrize("body", [known_both, known_one, opposite])
@pytest.mark.sample(4)
def test_a_difference_that_was_not_expected(doomed: Pool, body: Any, name: str) -> None:
    start = time.monotonic()
    failures = doomed.errors(body, 3, name)
    assert time.monotonic() - start < 20
    assert {f.kind for f in failures} == {"CollectiveError"}
    for failure in failures:
        assert "the ranks ask for different collectives" in failure.message
        assert "rank 1: all_reduce sum of" in failure.message


def refuses(group: Any) -> None:
    """One rank cannot take part, the others could."""
    x = torch.ones(1).expand(6) if dist.get_rank(group) == 1 else torch.ones(6)
    collectives.all_reduce(x, group, "ring")


def test_a_rank_that_cannot_take_part(doomed: Pool) -> None:
    failures = doomed.errors(refuses, 3)
    assert {f.kind for f in failures} == {"CollectiveError"}
    assert all("share memory" in f.message for f in failures)
    assert all("rank 1: " in failures[rank].message for rank in (0, 2))


def absent(group: Any, name: str, known: bool) -> float:
    if known:
        collectives.all_reduce(torch.ones(6), group, name)
    start = time.monotonic()
    if dist.get_rank(group) != 1:
        with pytest.raises(PlaitError) as error:
            collectives.all_reduce(torch.ones(6), group, name, timeout=3.0)
        assert type(error.value).__name__ == "RankError"
        assert isinstance(error.value, RuntimeError)
        assert "rank 1 did not come within 3 s" in str(error.value), str(error.value)
    return time.monotonic() - start


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("ring", True),
        ("native", False),
        *(
            pytest.param(*one, marks=pytest.mark.full)
            for one in (("ring", False), ("one_shot", True), ("one_shot", False), ("native", True))
        ),
    ],
)
@pytest.mark.sample(1)
def test_a_rank_that_does_not_come(doomed: Pool, name: str, known: bool) -> None:
    waited = doomed.run(absent, 4, name, known)
    assert all(3 <= waited[rank] < 15 for rank in (0, 2, 3))


def dies(group: Any, name: str) -> None:
    collectives.all_reduce(torch.ones(6), group, name)
    if dist.get_rank(group) == 1:
        os._exit(7)
    collectives.all_reduce(torch.ones(6), group, name, timeout=10.0)


@pytest.mark.parametrize("name", ["ring", "tree", "native"])
@pytest.mark.sample(2)
def test_a_rank_that_dies(doomed: Pool, name: str) -> None:
    answers = doomed.ask(dies, 4, name)
    assert all(isinstance(a, Failure) for a in answers)
    assert {answers[rank].kind for rank in (0, 2, 3)} == {"RankError"}


def late(group: Any) -> None:
    """A rank that comes after the others gave up hears why."""
    if dist.get_rank(group) == 1:
        time.sleep(6)
    collectives.all_reduce(torch.ones(6), group, "ring", timeout=2.0)


@pytest.mark.full
def test_a_rank_that_comes_too_late(doomed: Pool) -> None:
    failures = doomed.errors(late, 3)
    assert {f.kind for f in failures} == {"RankError"}
    assert all("rank 1 did not come within 2 s" in f.message for f in failures)


def slow(group: Any) -> None:
    """Waiting for longer than the sentry's patience is no failure."""
    if dist.get_rank(group) == 1:
        time.sleep(3)
    collectives.all_reduce(torch.ones(6), group, "ring")
    lives(group)


def test_a_rank_that_is_only_slow(pool: Pool) -> None:
    pool.run(slow, 3)
