"""Schedules: spelled, read back, proven to end, and refused where they would not."""

from __future__ import annotations

import pytest

from plait.errors import ScheduleError
from plait.passes import schedule


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
