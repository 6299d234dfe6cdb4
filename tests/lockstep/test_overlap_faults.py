"""The schedule checker against an adversary who knows nothing of clocks.

The adversary holds one launch back for ever and lets everything else run as far as it gets. If a
launch then begins that reads what the held one was to write, or writes where the held one reads or
writes, or if the program ends while a held transfer is on its way, the schedule is wrong. The checker
must say so of exactly those schedules: faults are seeded everywhere that they can be, and both are
asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from plait.errors import ScheduleError
from plait.passes.overlap.check import check
from plait.passes.overlap.schedule import (
    COMM,
    COMPUTE,
    Item,
    Launch,
    Record,
    Schedule,
    Wait,
    schedule,
    slot,
)
from tests import pretend
from tests.cases import CASES
from tests.lockstep.test_overlap_forced import forced

MOST = 12  # faults of a program: the adversary tries every launch against each
PROGRAMS = ("b01_bias_after_the_sum", "b43_chain_of_collectives", "b62_blocks_in_three_dims")


@cache
def woven(name: str, count: int) -> tuple[Schedule, ...]:
    planned = forced(pretend.trace(CASES[name].setup(), True), 2, count)
    found = tuple(schedule(planned.local(rank), 2) for rank in range(2))
    assert sum(bool(x.collective) for x in found[0].launches) >= 2
    check(found)
    assert not adversary(found)
    return found


def caught(schedules: Sequence[Schedule]) -> bool:
    try:
        check(schedules)
    except ScheduleError:
        return True
    return False


@pytest.mark.parametrize("text", ["given:\ncompute linear(x) -> y", "given: x\nstream: wait"])
def test_a_line_that_does_not_read_is_named(text: str) -> None:
    with pytest.raises(ScheduleError, match="is no line of a schedule"):
        Schedule.parse(text)


# -- the adversary -----------------------------------------------------------------------------------


def adversary(schedules: Sequence[Schedule]) -> str:
    """A launch that begins too early when another is held back, or ''."""
    for rank, s in enumerate(schedules):
        written = {v: i for i, x in enumerate(s.launches) for v in x.writes}
        for held in s.launches:
            begun, ended = _run(schedules, rank, held)
            if ended and held.collective:
                return f"rank {rank}: the program does not wait for {held.name}"
            for other in begun:
                early = other.name != held.name and (
                    set(other.reads) & set(held.writes) or _overwrites(other, held, written)
                )
                if early:
                    return f"rank {rank}: {other.name} does not wait for {held.name}"
    return ""


def _overwrites(other: Launch, held: Launch, written: dict[str, int]) -> bool:
    """`other` writes a later value into the slot of one that `held` reads or writes."""
    used = [v for v in (*held.reads, *held.writes) if slot(v)]
    return any(slot(v) == slot(w) and written[w] > written[v] for v in used for w in other.writes)


def _run(schedules: Sequence[Schedule], rank: int, held: Launch) -> tuple[list[Launch], bool]:
    """What begins on `rank` although `held` never ends, and whether its compute comes to its end."""
    lines = {(r, n): [i for i in s.items if i.stream == n] for r, s in enumerate(schedules) for n in s.streams}
    at = dict.fromkeys(lines, 0)
    done: set[tuple[int, str]] = set()
    begun: list[Launch] = []
    moved = True
    while moved:
        moved = False
        for stream, items in lines.items():
            while at[stream] < len(items) and _passes(items[at[stream]], stream[0], done, lines, at):
                item = items[at[stream]]
                if isinstance(item, Launch) and stream[0] == rank:
                    begun.append(item)
                if isinstance(item, Launch) and (item.name == held.name and (stream[0] == rank or item.collective)):
                    break  # it has begun, and will not end
                if isinstance(item, Record):
                    done.add((stream[0], item.event))
                at[stream] += 1
                moved = True
        begun = list(dict.fromkeys(begun))
    return begun, at[rank, COMPUTE] == len(lines[rank, COMPUTE])


def _passes(item: Item, rank: int, done: set[tuple[int, str]], lines: dict[tuple[int, str], list[Item]],
            at: dict[tuple[int, str], int]) -> bool:  # fmt: skip
    if isinstance(item, Wait):
        return (rank, item.event) in done
    if isinstance(item, Launch) and item.collective:
        return all(_arrived(item, other, lines, at) for other in item.ranks if other != rank)
    return True


def _arrived(item: Launch, rank: int, lines: dict[tuple[int, str], list[Item]], at: dict[tuple[int, str], int]) -> bool:
    """Rank `rank` stands at the collective, or is past it."""
    for (r, name), items in lines.items():
        for i, x in enumerate(items):
            if r == rank and isinstance(x, Launch) and x.name == item.name:
                return at[r, name] >= i
    return False


# -- faults ------------------------------------------------------------------------------------------


def without_a_wait(s: Schedule) -> Iterator[Schedule]:
    for i, item in enumerate(s.items):
        if isinstance(item, Wait):
            yield replace(s, items=s.items[:i] + s.items[i + 1 :])


def recorded_early(s: Schedule) -> Iterator[Schedule]:
    """An event in front of the launch that it stood behind."""
    for i, (a, b) in enumerate(pairwise(s.items)):
        if isinstance(a, Launch) and isinstance(b, Record) and a.stream == b.stream:
            yield replace(s, items=(*s.items[:i], b, a, *s.items[i + 2 :]))


def slots_reused(s: Schedule) -> Iterator[Schedule]:
    """Every pair of moved values put into one slot, the second in that of the first."""
    values = [x.writes[0] for x in s.launches if x.stream == COMM]
    for i, first in enumerate(values):
        for second in values[i + 1 :]:
            if slot(first) != slot(second):
                moved = f"{slot(first)}:{second.partition(':')[2]}"
                yield Schedule.parse(str(s).replace(second, moved))


def swapped(s: Schedule) -> Iterator[Schedule]:
    """Two collectives that follow each other, in the other order."""
    places = [i for i, x in enumerate(s.items) if isinstance(x, Launch) and x.collective]
    for a, b in zip(places, places[1:], strict=False):
        items = list(s.items)
        items[a], items[b] = items[b], items[a]
        yield replace(s, items=tuple(items))


@pytest.mark.parametrize(
    ("name", "count"),
    [
        pytest.param(name, count, marks=() if i % 2 == count - 2 else pytest.mark.full)
        for i, name in enumerate(PROGRAMS)
        for count in (2, 3)
    ],
)
@pytest.mark.sample(1)
def test_dropped_waits_and_slots_used_early(name: str, count: int) -> None:
    first, second = woven(name, count)
    found, faults = 0, [*without_a_wait(first), *slots_reused(first)]
    for wrong in faults[:: 1 + len(faults) // MOST]:
        why = adversary([wrong, second])
        assert caught([wrong, second]) == bool(why), why or f"harmless\n{wrong}"
        found += bool(why)
    assert found >= 4, "no fault was one"


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.sample(1)
def test_events_before_what_they_tell_of(name: str) -> None:
    first, second = woven(name, 2)
    found, faults = 0, list(recorded_early(first))
    for wrong in faults[:: 1 + len(faults) // MOST]:
        why = adversary([wrong, second])
        assert caught([wrong, second]) == bool(why), why or f"harmless\n{wrong}"
        found += bool(why)
    assert found >= 3, "no fault was one"


@pytest.mark.parametrize("rank", (0, 1))
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.sample(3)
def test_swapped_collectives_on_one_rank(name: str, rank: int) -> None:
    right = woven(name, 3)
    wrongs = list(swapped(right[rank]))
    assert wrongs
    for wrong in wrongs:
        with pytest.raises(ScheduleError, match=r"collective \d+ is .* on rank 1 and"):
            check([wrong, right[1]] if rank == 0 else [right[0], wrong])
