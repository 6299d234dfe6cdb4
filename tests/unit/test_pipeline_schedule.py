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


def test_one_forward_one_backward_bounds_what_is_open() -> None:
    assert schedule.check(schedule.make("gpipe", 4, 8)).open == (8, 8, 8, 8)
    assert schedule.check(schedule.make("1f1b", 4, 8)).open == (4, 3, 2, 1)


def test_a_schedule_that_stops_names_who_waits() -> None:
    with pytest.raises(ScheduleError, match="place 0 waits at 0B0 for 1B0"):
        schedule.parse("0F0 0B0\n1B0 1F0", 2)


def test_a_missing_action_is_named() -> None:
    with pytest.raises(ScheduleError, match="1B0 is missing"):
        schedule.parse("0F0 0B0\n1F0", 2)
