"""Measured: the front-runners of what was predicted to gain, against blocking, on the ranks themselves.

    measured 12.1 ms against 14.0 ms blocking, noise 0.2 ms of 9 samples; predicted 11.0 ms against 13.8 ms
    blocking is kept: measured 14.1 ms against 14.0 ms blocking, ...
    the second choice is kept: measured 11.9 ms against ...; the first measured 12.1 ms, predicted 11.0 ms
    not measured: x is on the meta device, and without values

What is compared is decided here, from numbers alone, so that every rank comes to rank 0's end.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from statistics import median, quantiles

from plait.written import parse

# A median of n samples errs by 1.25 s / sqrt(n), s of a normal's 1.35 from quartile to quartile: 0.93 of
# what lies between these, over sqrt(n). By twice that, programs that take the same are held to be faster in one
# of thirty trials (of 5 to 15 samples, quartiles as of a sample of something larger).
SURE = 2 * 0.93


@dataclass(frozen=True)
class Measured:
    """Seconds of a call: with overlap by one choice or two, as predicted, and blocking, the last; `seconds`
    are () where nothing was measured, for the `reason`. `best`: the choice that blocking is compared with;
    `noise`: of the difference of these."""

    predicted: tuple[float, ...]
    seconds: tuple[float, ...] = ()
    noise: float = 0.0
    samples: int = 0
    reason: str = ""
    best: int = 0

    @classmethod
    def of(cls, predicted: tuple[float, ...], times: Sequence[Sequence[float]]) -> Measured:
        """`times`: samples of all, taken in turn. A choice stands unless the one behind it gains above the noise."""
        *choices, blocking = times
        best = 0
        for i, samples in enumerate(choices):
            if median(choices[best]) - median(samples) > _noise(samples, choices[best]):
                best = i
        noise = _noise(choices[best], blocking)
        return cls(predicted, tuple(map(median, times)), noise, len(blocking), best=best)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Measured:
        return parse(cls, text, "measurement")

    @property
    def blocking(self) -> bool:
        """Whether blocking is kept: it is unless the gain is above the noise."""
        return bool(self.seconds) and self.seconds[-1] - self.seconds[self.best] <= self.noise

    @property
    def kept(self) -> int:
        """Which of them runs."""
        return len(self.predicted) - 1 if self.blocking else self.best

    @property
    def brief(self) -> str:
        return f"measured {self._against(self.seconds)} blocking"

    def __str__(self) -> str:
        if not self.seconds:
            return f"overlap is not measured: {self.reason}"
        kept = "blocking is kept: " if self.blocking else "the second choice is kept: " if self.best else ""
        noise = f"noise {_ms(self.noise)} of {self.samples} samples"
        return f"{kept}{self.brief}, {noise}; predicted {self._against(self.predicted)}{self._other}"

    def _against(self, times: Sequence[float]) -> str:
        return f"{_ms(times[self.best])} against {_ms(times[-1])}"

    @property
    def _other(self) -> str:
        """The choice that was not the best one."""
        if len(self.predicted) < 3:
            return ""
        i = 1 - self.best
        return f"; the {('first', 'second')[i]} measured {_ms(self.seconds[i])}, predicted {_ms(self.predicted[i])}"


def _noise(fast: Sequence[float], slow: Sequence[float]) -> float:
    """Of the difference of their medians, by that of samples taken in turn."""
    apart = [b - a for a, b in zip(fast, slow, strict=True)]
    lower, _, upper = quantiles(apart, n=4)
    return SURE * (upper - lower) / sqrt(len(apart))


def _ms(seconds: float) -> str:
    """To three digits."""
    return f"{float(f'{seconds * 1e3:.3g}'):g} ms"
