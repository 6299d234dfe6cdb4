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
from plait.passes.overlap.places import prove
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
    views_of,
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
    if views_of(other):
        return False
    return any(slot(w) in slot(v).split("+") and written[w] > written[v] for v in used for w in other.writes)


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


# -- every single fault of a small program ---------------------------------------------------------------


def mutants(s: Schedule) -> Iterator[tuple[str, Schedule]]:
    """Each line left out, doubled, behind the next one, on the other stream; each wait for each other event."""
    events = [x.event for x in s.items if isinstance(x, Record)]
    for i, item in enumerate(s.items):
        rest = s.items[i + 1 :]
        changed: dict[str, tuple[Item, ...]] = {
            "left out": (),
            "doubled": (item, item),
            "moved": (replace(item, stream=COMM if item.stream == COMPUTE else COMPUTE),),
        }
        if rest:
            changed["late"], rest_late = (rest[0], item), rest[1:]
        if isinstance(item, Wait):
            changed |= {f"for {event}": (replace(item, event=event),) for event in events if event != item.event}
        if isinstance(item, Launch) and item.collective:
            changed["alone"] = (replace(item, ranks=(0,)),)
            changed["of another kind"] = (replace(item, collective="broadcast"),)
        for what, line in changed.items():
            yield f"{what}: {item}", replace(s, items=(*s.items[:i], *line, *(rest_late if what == "late" else rest)))


@pytest.mark.parametrize("rank", (0, 1))
def test_no_single_fault_of_a_small_program_passes(rank: int) -> None:
    right = woven("b01_bias_after_the_sum", 2)
    refused = harmless = 0
    for what, wrong in mutants(right[rank]):
        both = [wrong, right[1]] if rank == 0 else [right[0], wrong]
        if caught(both):
            refused += 1
            continue
        why = adversary(both)
        assert not why, f"{what}: {why}"
        harmless += 1
    assert refused > 60 and harmless < refused / 3, (refused, harmless)


SOUND = """given: x
compute: f(x) -> a
compute: record e0
comm: wait e0
comm: m = all_reduce[0,1](a) -> s0:m
comm: record e1
compute: wait e1
compute: view(s0:m) -> s0:view
compute: g(s0:view) -> b
compute: record e2
comm: wait e2
comm: k = all_reduce[0,1](b) -> s0:k
comm: record e3
compute: wait e3
compute: h(s0:k) -> c"""


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("comm: record e1", "comm: record e1\ncompute: record e1", "several records of e1"),
        ("compute: record e0\ncomm: wait e0", "comm: wait e0\ncompute: record e0", "begun before anything recorded e0"),
        ("h(s0:k) -> c", "h(s0:k) -> c\ncompute: h(c) -> d", "several launches of h"),
        ("h(s0:k) -> c", "h(s0:k) -> b", "several writers of b"),
        ("h(s0:k) -> c", "h(s0:k) -> x", "x is given, and written too"),
        ("h(s0:k) -> c", "h = send[](s0:k) ->", "has 0 ranks at its other end"),
        ("h(s0:k) -> c", "h = receive[0,1]() -> c", "has 2 ranks at its other end"),
        ("m = all_reduce[0,1]", "m = all_reduce[1]", "is a collective of other ranks"),
        ("m = all_reduce[0,1]", "m = all_reduce[0,1,2]", "deadlock"),
        ("h(s0:k) -> c", "h(s0:k) -> c\ncompute: i(s0:view) -> d", "while i may still use s0:m in it"),
        ("h(s0:k) -> c", "j(s0:view) -> s0:j\ncompute: i(s0:j) -> d", "while i may still use s0:m in it"),
    ],
)
def test_what_a_checker_of_orders_alone_would_pass(old: str, new: str, why: str) -> None:
    sound = Schedule.parse(SOUND)
    check([sound, sound])
    assert old in SOUND
    with pytest.raises(ScheduleError, match=why):
        check([Schedule.parse(SOUND.replace(old, new)), sound])


@pytest.mark.parametrize("name", PROGRAMS)
def test_all_ranks_launch_the_same(name: str) -> None:
    """So two of them stand for any number where a program is proven before it runs."""
    planned = forced(pretend.trace(CASES[name].setup(), True), 3, 3)
    assert len({str(schedule(planned.local(rank), 3)) for rank in range(3)}) == 1
    local = planned.local(0)
    prove(local, True)
    (first, *_) = [n for n in local.graph.nodes if str(n.target).endswith(".wait")]
    first.replace_all_uses_with(first.all_input_nodes[0])
    local.graph.erase_node(first)
    with pytest.raises(ScheduleError, match="may read|is left open"):
        prove(local, True)
