"""Schedules: spelled, read back, proven to end, and refused where they would not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from plait.capture import capture
from plait.cluster import Cluster
from plait.errors import ScheduleError
from plait.mesh import Mesh
from plait.passes import schedule
from plait.passes.microbatch import MOST
from plait.passes.schedule import Action, Schedule
from plait.plan.joint import Ask, search
from plait.plan.planner import Options
from plait.runtime import channel
from plait.runtime.channel import Channel


@pytest.mark.parametrize("name", schedule.SCHEDULES)
@pytest.mark.parametrize(("places", "pieces"), [(2, 1), (2, 4), (3, 7), (4, 8)])
def test_parses_back(name: str, places: int, pieces: int) -> None:
    made = schedule.make(name, places, pieces)
    assert schedule.parse(str(made), made.stages) == made


@pytest.mark.parametrize(("places", "pieces"), [(2, 4), (3, 6), (4, 8)])
def test_bubble_is_the_textbook_one(places: int, pieces: int) -> None:
    """(S - 1) / (M + S - 1) for equal stages."""
    made = schedule.make("gpipe", places, pieces)
    want = (places - 1) / (pieces + places - 1)
    assert schedule.bubble(made, [1.0] * places) == pytest.approx(want)


@pytest.mark.parametrize(("places", "pieces"), [(2, 4), (3, 6), (4, 8), (8, 64)])
def test_interleaved_halves_the_bubble(places: int, pieces: int) -> None:
    """Two stages a place, each of half the work: (S - 1) / 2 micro-batches are waited for."""
    made = schedule.make("interleaved", places, pieces)
    seconds = schedule.seconds(made, [0.5] * made.stages)
    assert seconds == pytest.approx(3 * pieces + 3 * (places - 1) / 2)


@pytest.mark.parametrize(("places", "pieces"), [(2, 4), (3, 6), (4, 8)])
def test_a_users_loop_over_interleaved_stages_waits_half_as_long(places: int, pieces: int) -> None:
    made = schedule.loop(places, 2 * places, pieces)
    schedule.check(made)
    seconds = schedule.seconds(made, [0.5] * made.stages)
    assert seconds == pytest.approx(3 * pieces + 3 * (places - 1) / 2)


@pytest.mark.parametrize(("places", "pieces"), [(2, 4), (3, 7), (4, 8), (8, 64)])
def test_zero_bubble_waits_for_a_third(places: int, pieces: int) -> None:
    """ZB-H1: (S - 1)(F + I - W), where 1f1b waits for (S - 1)(F + I + W)."""
    made = schedule.make("zero-bubble", places, pieces)
    timed = schedule.check(made)
    assert timed.seconds == pytest.approx(3 * pieces + places - 1)
    assert max(timed.open) == places


def test_one_forward_one_backward_bounds_what_is_open() -> None:
    assert schedule.check(schedule.make("gpipe", 4, 8)).open == (8, 8, 8, 8)
    assert schedule.check(schedule.make("1f1b", 4, 8)).open == (4, 3, 2, 1)
    assert schedule.check(schedule.make("1f1b", 4, 64)).open == (4, 3, 2, 1)


def test_halves_of_a_backward_are_in_order() -> None:
    with pytest.raises(ScheduleError, match="place 1 waits at 1W0 for 1I0"):
        schedule.parse("0F0 0I0 0W0\n1F0 1W0 1I0", 2)
    with pytest.raises(ScheduleError, match="1W0 is missing"):
        schedule.parse("0F0 0I0 0W0\n1F0 1I0", 2)


def test_a_schedule_that_stops_names_who_waits() -> None:
    with pytest.raises(ScheduleError, match="place 0 waits at 0B0 for 1B0"):
        schedule.parse("0F0 0B0\n1B0 1F0", 2)


def test_a_missing_action_is_named() -> None:
    with pytest.raises(ScheduleError, match="1B0 is missing"):
        schedule.parse("0F0 0B0\n1F0", 2)


def test_no_more_micro_batches_than_messages_are_numbered_by() -> None:
    """They are lowered and said, and the last message of all still has a number."""
    x = torch.zeros(MOST + 3, 2)
    program = capture(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), (x,))
    machine = Cluster.of("dgx-h100").subset(range(2))
    ask = Ask((Mesh(1, 2),), machine, Options(1, machine), micro_batches=MOST + 3)
    found = search(program, ask).choice
    assert found.winner.micro_batches == MOST
    assert found.notes == (f"micro_batches: {MOST} instead of {MOST + 3}: no more than {MOST} are run",)
    assert 0 < Channel.tag(channel.WHOLE, channel._WHICH - 1, MOST - 1) < 2**31


@settings(max_examples=200)
@example("zero-bubble", 2, 2, True, [1.0] * 10, False)
@given(
    st.sampled_from(sorted(schedule.SCHEDULES)), st.integers(1, 5), st.integers(1, 9), st.booleans(),
    st.lists(st.floats(0, 1, allow_subnormal=False), min_size=10, max_size=10), st.booleans(),
)  # fmt: skip
def test_no_stages_are_faster_than_the_bound(
    name: str, places: int, pieces: int, training: bool, each: list[float], again: bool
) -> None:
    made = schedule.make(name, places, pieces, training)
    each = each[: made.stages]
    forward = schedule.forward(made, each, again)
    least = schedule.least(name, places, pieces, sum(each), training)
    assert schedule.seconds(made, forward, again) >= least * (1 - 1e-9)


@pytest.mark.parametrize(
    ("text", "stages", "said"),
    [
        ("0F0 0I0 0W0 0B0", 1, "0B0 is no action of it"),  # a gradient, computed twice
        ("0F0 2F0\n1F0", 2, "2F0 is no action of it"),
        ("0F0 0F5", 1, "micro-batch 5 is one of 6, and there are 2 actions"),
        ("0F999999999", 1, "there are 1 actions"),
        ("0F" + "9" * 5000, 1, "is no action"),
    ],
)
def test_an_action_too_many_is_named(text: str, stages: int, said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        schedule.parse(text, stages)


@pytest.mark.parametrize(
    ("text", "pieces", "training", "said"),
    [
        ("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1", 3, True, "0B2 is missing; 0F2 is missing; 1B2 is missing; 1F2 is missing"),
        ("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1", 1, True, "0B1 is no action of it; 0F1 is no action of it"),
        ("0F0 0F1\n1F0 1F1", 2, True, "0B0 is missing; 0B1 is missing; 1B0 is missing; 1B1 is missing"),
        ("0F0 0B0\n1F0 1B0", 1, False, "0B0 is no action of it; 1B0 is no action of it"),
        ("0F0 0I0 0W0", 1, False, "0I0 is no action of it; 0W0 is no action of it"),
        ("", 1, True, "0B0 is missing; 0F0 is missing"),
    ],
)
def test_what_a_text_leaves_out_of_the_program_is_named(text: str, pieces: int, training: bool, said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        schedule.parse(text, 1 + text.count("\n"), pieces=pieces, training=training)


def test_a_place_without_a_line_is_missed() -> None:
    with pytest.raises(ScheduleError, match="there are 1 lines for 2 places"):
        schedule.parse("0F0 1F0\n", 2, places=2)


# -- every single fault of small schedules ---------------------------------------------------------------

Lines = list[list[Action]]


def mutants(right: Schedule) -> Iterator[tuple[str, Lines]]:
    """An action left out, again or moved to anywhere, or another in its place; two swapped; a stage, a micro-batch,
    a kind or a place left out."""
    spots = [(p, i) for p, line in enumerate(right.places) for i in range(len(line))]
    every = [Action(s, kind, k) for s in range(right.stages + 1) for kind in "FBIW" for k in range(right.pieces + 1)]

    def lines() -> Lines:
        return [list(line) for line in right.places]

    for at, (p, i) in enumerate(spots):
        action = right.places[p][i]
        out = lines()
        del out[p][i]
        yield f"{action} left out", out
        for q in range(len(out)):
            for j in range(len(out[q]) + 1):
                moved, again = [list(line) for line in out], lines()
                moved[q].insert(j, action)
                again[q].insert(j, action)
                yield f"{action} moved", moved
                yield f"{action} again", again
        for q, j in spots[at + 1 :]:
            swapped = lines()
            swapped[p][i], swapped[q][j] = swapped[q][j], swapped[p][i]
            yield f"{action} swapped", swapped
        for other in every:
            if other != action:
                instead = lines()
                instead[p][i] = other
                yield f"{other} for {action}", instead
    for field in ("stage", "piece", "kind"):
        for value in {getattr(a, field) for line in right.places for a in line}:
            yield f"{field} {value} left out", [[a for a in x if getattr(a, field) != value] for x in right.places]
    for p in range(len(right.places)):
        yield f"place {p} left out", lines()[:p] + lines()[p + 1 :]


def runs(lines: Lines, right: Schedule, random: Random) -> bool:
    """Whether places that do what they can, in an order that nobody chose, do all of `right` where it does it."""
    if [Counter(x) for x in lines] != [Counter(x) for x in right.places]:
        return False
    done: set[str] = set()
    last, left = right.stages - 1, [list(line) for line in lines]
    back = "I" if "I" in right.kinds else "B"
    while any(left):
        ready = []
        for line in filter(None, left):
            a = line[0]
            needs = {f"{a.stage - 1}F{a.piece}"} if a.kind == "F" and a.stage else set()
            if a.kind in "BI":
                needs = {f"{a.stage}F{a.piece}"} | ({f"{a.stage + 1}{back}{a.piece}"} if a.stage < last else set())
            if a.kind == "W":
                needs = {f"{a.stage}I{a.piece}"}
            if needs <= done:
                ready.append(line)
        if not ready:
            return False
        done.add(str(random.choice(ready).pop(0)))
    return True


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", schedule.SCHEDULES)
def test_a_single_fault_is_refused_or_is_none(name: str, training: bool) -> None:
    random, refused, harmless = Random(0), 0, 0
    for places, pieces in [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2)]:
        right = schedule.make(name, places, pieces, training)
        for what, lines in mutants(right):
            fine = runs(lines, right, random)
            text = "\n".join(" ".join(map(str, x)) for x in lines)
            try:
                schedule.parse(text, right.stages, places=places, pieces=pieces, training=training)
            except ScheduleError:
                assert not fine, f"{what} is refused, and runs:\n{right}"
                refused += 1
                continue
            assert fine, f"{what} passes:\n{right}"
            harmless += 1
    assert refused > 10 * right.stages and harmless, (refused, harmless)
