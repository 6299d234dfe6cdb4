"""Which of two front-runners is kept, by their samples; and how it is spelled."""

from __future__ import annotations

from random import Random

import pytest

from plait.plan.measured import Measured

PREDICTED = 0.011, 0.014


def samples(middle: float, spread: float, seed: int, count: int = 9) -> list[float]:
    dice = Random(seed)
    return [middle * (1 + spread * dice.gauss(0, 1)) for _ in range(count)]


def blocking(gain: float, spread: float, seed: int, count: int = 9) -> bool:
    """Of two programs whose samples are apart by `gain`, each with a noise of `spread`."""
    overlapped = samples(0.010, spread, seed, count)
    return Measured.of(PREDICTED, [overlapped, samples(0.010 * (1 + gain), spread, seed + 1000, count)]).blocking


def test_a_gain_above_the_noise_is_kept() -> None:
    assert not any(blocking(0.1, 0.01, seed) for seed in range(50))
    assert all(blocking(-0.1, 0.01, seed) for seed in range(50))


def test_blocking_wins_where_there_is_no_gain() -> None:
    """Two programs that take the same: chance alone keeps overlap, seldom; more samples see smaller gains."""
    by_chance = sum(not blocking(0.0, 0.05, seed) for seed in range(400))
    assert by_chance <= 0.06 * 400
    few, many = (sum(not blocking(0.05, 0.05, seed, n) for seed in range(100)) for n in (5, 15))
    assert few < many


def test_a_disturbance_that_meets_both_is_no_noise() -> None:
    """Samples are taken in turn: what is slow for a while is so for both."""
    drift = [1, 1, 3, 3, 3, 1, 2, 2, 1]
    overlapped, whole = [0.010 * d for d in drift], [0.010 * d + 0.0005 for d in drift]
    assert not Measured.of(PREDICTED, [overlapped, whole]).blocking


def test_the_second_choice_is_taken_where_it_gains_above_the_noise() -> None:
    """On the first, as on blocking; of equals the first stands."""
    for seed in range(50):
        times = [samples(t, 0.01, 1000 * i + seed) for i, t in enumerate((0.012, 0.010, 0.014))]
        assert Measured.of((0.011, 0.012, 0.014), times).kept == 1
        assert Measured.of((0.011, 0.012, 0.014), [times[1], times[0], times[2]]).kept == 0
        assert Measured.of((0.011, 0.012, 0.014), [times[2], times[0], times[1]]).kept == 2
    by_chance = 0
    for seed in range(400):
        times = [samples(0.010, 0.05, 1000 * i + seed) for i in range(2)]
        by_chance += Measured.of((0.011, 0.012, 0.014), [*times, samples(0.014, 0.01, seed)]).kept == 1
    assert by_chance <= 0.06 * 400


def test_equal_times_block() -> None:
    assert Measured.of(PREDICTED, [[0.01] * 5, [0.01] * 5]).blocking


@pytest.mark.parametrize(
    ("measured", "text"),
    [
        (
            Measured((1.1912, 1.38), (0.0121, 0.014), 0.0002, 9),
            "measured 12.1 ms against 14 ms blocking, noise 0.2 ms of 9 samples; predicted 1190 ms against 1380 ms",
        ),
        (
            Measured((0.011, 0.0138), (0.0141, 0.014), 0.0002, 9),
            "blocking is kept: measured 14.1 ms against 14 ms blocking, noise 0.2 ms of 9 samples; "
            "predicted 11 ms against 13.8 ms",
        ),
        (Measured((0.011, 0.0138), reason="no time"), "overlap is not measured: no time"),
        (
            Measured((0.011, 0.0115, 0.0138), (0.0124, 0.0121, 0.014), 0.0002, 9, best=1),
            "the second choice is kept: measured 12.1 ms against 14 ms blocking, noise 0.2 ms of 9 samples; "
            "predicted 11.5 ms against 13.8 ms; the first measured 12.4 ms, predicted 11 ms",
        ),
        (
            Measured((0.011, 0.0115, 0.0138), (0.0121, 0.0124, 0.012), 0.0002, 9),
            "blocking is kept: measured 12.1 ms against 12 ms blocking, noise 0.2 ms of 9 samples; "
            "predicted 11 ms against 13.8 ms; the second measured 12.4 ms, predicted 11.5 ms",
        ),
    ],
)
def test_it_is_said_and_read_back(measured: Measured, text: str) -> None:
    assert str(measured) == text and Measured.from_json(measured.to_json()) == measured
