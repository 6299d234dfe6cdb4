"""Figures: the arithmetic of a sitting, from medians.

    floor F      the blocking program, its transfers left out
    exposed      T - F
    hidden       (T_blocking - T) / (T_blocking - F), of the fastest blocking row
    speed-up     one device's time for all the shares, over T; a floor's is what could be reached
    efficiency   speed-up over ranks: 1 is linear scaling

A row in chunks has a floor of its own beside: the same chunks, their transfers left out. What lies
between the two floors is what cutting costs, and is part of `exposed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from statistics import median, quantiles
from typing import Any, Literal

Kind = Literal["alone", "blocking", "textbook", "overlapped", "forced", "floor", "peer"]
OURS = ("blocking", "textbook", "overlapped", "forced")  # programs of the one floor


@dataclass(frozen=True)
class Timed:
    """A row and its samples, in seconds; `predicted` is the plan's, where it has one."""

    name: str
    kind: Kind
    samples: tuple[float, ...]
    predicted: float | None = None
    error: float | None = None  # of its output, against one device's
    note: str = ""

    @property
    def seconds(self) -> float:
        return median(self.samples)

    @property
    def spread(self) -> tuple[float, float]:
        """First and ninth decile, within what was seen: of few samples they would lie beyond."""
        if len(self.samples) < 2:
            return self.samples[0], self.samples[0]
        tenths = quantiles(self.samples, n=10)
        return max(tenths[0], min(self.samples)), min(tenths[-1], max(self.samples))


@dataclass(frozen=True)
class Figure:
    row: Timed
    exposed: float | None
    hidden: float | None
    speedup: float | None
    efficiency: float | None

    def to_dict(self) -> dict[str, Any]:
        low, high = self.row.spread
        mine = {"seconds": self.row.seconds, "p10": low, "p90": high}
        figures = {k: v for k, v in asdict(self).items() if k != "row"}
        return asdict(self.row) | mine | figures


@dataclass(frozen=True)
class Figures:
    """All rows of one run; `floor` and `blocking` are None where no such row was timed."""

    rows: tuple[Figure, ...]
    floor: float | None
    blocking: float | None

    def named(self, name: str) -> Figure:
        return next(f for f in self.rows if f.row.name == name)

    def fastest(self, kind: Kind) -> Figure | None:
        found = [f for f in self.rows if f.row.kind == kind]
        return min(found, key=lambda f: f.row.seconds) if found else None


def figures(rows: Sequence[Timed], ranks: int) -> Figures:
    """The first floor is the blocking program's; peers are other programs: their floor is not ours."""
    floor = next((r.seconds for r in rows if r.kind == "floor"), None)
    blocking = min((r.seconds for r in rows if r.kind == "blocking"), default=None)
    alone = next((r.seconds for r in rows if r.kind == "alone"), None)

    def one(row: Timed) -> Figure:
        ours = row.kind in OURS
        speedup = alone / row.seconds if alone and row.kind != "alone" else None
        return Figure(
            row,
            exposed=row.seconds - floor if ours and floor is not None else None,
            hidden=hidden(row.seconds, blocking, floor) if ours else None,
            speedup=speedup,
            efficiency=speedup / ranks if speedup is not None else None,
        )

    return Figures(tuple(map(one, rows)), floor, blocking)


def hidden(seconds: float, blocking: float | None, floor: float | None) -> float | None:
    """None where blocking is no slower than its floor: then there is nothing to hide."""
    if blocking is None or floor is None or blocking <= floor:
        return None
    return (blocking - seconds) / (blocking - floor)


def order(rows: Sequence[Timed]) -> tuple[int, int]:
    """Of the pairs whose samples lie apart, how many are predicted in their order; and how many.

    Apart: the ninth decile of one below the first of the other. Only orchestrations of one program
    are compared, those with a prediction.
    """
    told = [r for r in rows if r.kind in OURS and r.predicted is not None]
    apart = [(a, b) for a, b in combinations(told, 2) if _apart(a, b)]
    right = [(a, b) for a, b in apart if (a.predicted < b.predicted) == (a.seconds < b.seconds)]  # type: ignore[operator]
    return len(right), len(apart)


def _apart(a: Timed, b: Timed) -> bool:
    return a.spread[1] < b.spread[0] or b.spread[1] < a.spread[0]
