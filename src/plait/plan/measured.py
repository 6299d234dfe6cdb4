"""Measured: overlap as it was predicted to gain, against blocking, on the ranks themselves.

    measured 12.1 ms against 14.0 ms blocking, noise 0.2 ms of 9 samples; predicted 11.0 ms against 13.8 ms
    blocking is kept: measured 14.1 ms against 14.0 ms blocking, ...
    not measured: x is on the meta device, and without values

What is compared is decided here, from numbers alone, so that every rank comes to rank 0's end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median, quantiles
from typing import Any

# A median of n samples errs by 1.25 s / sqrt(n), s of a normal's 1.35 from quartile to quartile: 0.93 of
# what lies between these, over sqrt(n). By twice that, programs that take the same are held to be faster in one
# of thirty trials (of 5 to 15 samples, quartiles as of a sample of something larger).
SURE = 2 * 0.93


@dataclass(frozen=True)
class Measured:
    """Seconds of a call, with overlap first and blocking second; `seconds` are () where nothing was
    measured, for the `reason`. `noise`: of the difference."""

    predicted: tuple[float, float]
    seconds: tuple[float, ...] = ()
    noise: float = 0.0
    samples: int = 0
    reason: str = ""

    @classmethod
    def of(cls, predicted: tuple[float, float], times: Sequence[Sequence[float]]) -> Measured:
        """`times`: samples of both, taken in turn."""
        overlapped, blocking = times
        apart = [b - o for o, b in zip(overlapped, blocking, strict=True)]
        lower, _, upper = quantiles(apart, n=4)
        noise = SURE * (upper - lower) / sqrt(len(apart))
        return cls(predicted, (median(overlapped), median(blocking)), noise, len(apart))

    @property
    def blocking(self) -> bool:
        """Whether blocking is kept: it is unless the gain is above the noise."""
        return bool(self.seconds) and self.seconds[1] - self.seconds[0] <= self.noise

    @property
    def brief(self) -> str:
        return f"measured {_against(self.seconds)} blocking"

    def __str__(self) -> str:
        if not self.seconds:
            return f"overlap is not measured: {self.reason}"
        kept = "blocking is kept: " if self.blocking else ""
        noise = f"noise {_ms(self.noise)} of {self.samples} samples"
        return f"{kept}{self.brief}, {noise}; predicted {_against(self.predicted)}"

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Measured:
        """From JSON."""
        pairs = {k: tuple(data[k]) for k in ("predicted", "seconds")}
        return cls(**{**data, **pairs})


def _against(pair: Sequence[float]) -> str:
    return " against ".join(map(_ms, pair))


def _ms(seconds: float) -> str:
    """To three digits."""
    return f"{float(f'{seconds * 1e3:.3g}'):g} ms"
