"""Cuts: the order of a program's operators, cut into S stages that take the same time.

    time of stage [i, j)    sum of the operators' seconds + what is sent over the cut that ends it
    live(j)                 bytes of the values made before position j and used at or after it

First the least possible time of the slowest stage, by dynamic programming over the positions; then,
among all cuts within `SLACK` of it, the one that sends the fewest bytes. A stage whose weights do
not fit `memory` is no stage. Weights and inputs are no traffic: a stage that needs one has it.

The dynamic program is best[s][j] = min over i of max(best[s - 1][i], time(i, j)): S x N^2 steps,
each a row of numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from plait.errors import PlanError

SLACK = 0.02  # a cut may be this much slower than the best one if it sends less

Row = NDArray[np.float64]


@dataclass(frozen=True)
class Item:
    """One operator: what it costs, what it makes, and where that is used last."""

    name: str
    seconds: float
    nbytes: float = 0.0  # of its value, if that can cross a cut
    last: int = -1  # position of the last operator that reads the value
    weights: tuple[str, ...] = ()  # those it reads
    joined: bool = False  # may not be parted from the operator before it


@dataclass(frozen=True)
class Line:
    """A program as the cut sees it. `weights`: bytes of each."""

    items: tuple[Item, ...]
    weights: dict[str, float] = field(default_factory=dict)

    def live(self) -> Row:
        """Bytes that cross a cut at each position 0..N."""
        steps = np.zeros(len(self.items) + 2)
        for i, item in enumerate(self.items):
            if item.last > i:
                steps[i + 1] += item.nbytes
                steps[item.last + 1] -= item.nbytes
        return np.asarray(np.cumsum(steps)[: len(self.items) + 1])

    def held(self) -> NDArray[np.float64]:
        """held[i, j]: bytes of the weights that the operators i..j-1 read, each counted once."""
        n = len(self.items)
        corner = np.zeros((n + 1, n + 2))
        before: dict[str, int] = {}
        for at, item in enumerate(self.items):
            for name in item.weights:
                corner[before.get(name, 0), at + 1] += self.weights[name]
                corner[at + 1, at + 1] -= self.weights[name]
                before[name] = at + 1
        return np.asarray(corner.cumsum(0).cumsum(1)[:, : n + 1])


@dataclass(frozen=True)
class Cuts:
    """Stage s runs the items bounds[s] .. bounds[s + 1] - 1."""

    bounds: tuple[int, ...]
    seconds: tuple[float, ...]  # of every stage, sends included
    crossing: tuple[float, ...]  # bytes over each cut
    best: float  # the least time of the slowest stage that any cut reaches

    @property
    def slowest(self) -> float:
        return max(self.seconds)

    def __str__(self) -> str:
        return " ".join(map(str, self.bounds))


def cut(
    line: Line,
    stages: int,
    *,
    byte_seconds: float = 0.0,
    send_seconds: float = 0.0,
    memory: float | None = None,
    homes: Sequence[frozenset[str]] | None = None,
) -> Cuts:
    """The best cut into `stages` parts; a transfer takes `send_seconds + bytes * byte_seconds`.

    `homes`: the weights that every stage holds already, and so the only ones it may read.
    """
    n = len(line.items)
    legal = np.array([i in (0, n) or not line.items[i].joined for i in range(n + 1)])
    if stages > int(legal.sum()) - 1:
        raise PlanError(
            f"pp={stages}: the model has {n} operators that can be cut apart at "
            f"{int(legal.sum()) - 2} places; at most pp={max(1, int(legal.sum()) - 1)}"
        )
    live = line.live()
    cost = live * byte_seconds + np.where(live > 0, send_seconds, 0.0)
    cost[n] = 0.0
    work = np.concatenate([[0.0], np.cumsum([item.seconds for item in line.items])])
    fits = line.held() <= memory if memory is not None else None
    table = _Table(work, cost, legal, fits, _strangers(line, homes))
    best = table.slowest(stages)
    if not np.isfinite(best) and homes is not None:
        raise PlanError("this form of call needs weights on other stages than they are loaded on")
    if not np.isfinite(best):
        raise PlanError(_too_large(line, stages, memory or 0.0))
    bounds = table.fewest(stages, best * (1 + SLACK) + 1e-15, live)
    pairs = list(zip(bounds, bounds[1:], strict=False))
    seconds = tuple(float(work[j] - work[i] + cost[j]) for i, j in pairs)
    return Cuts(tuple(bounds), seconds, tuple(float(live[j]) for j in bounds[1:-1]), best)


@dataclass(frozen=True)
class _Table:
    work: Row
    cost: Row
    legal: NDArray[np.bool_]
    fits: NDArray[np.bool_] | None
    strangers: NDArray[np.int64] | None  # [stage, j]: operators before j that the stage cannot run

    def time(self, j: int, stage: int) -> Row:
        """Of the stages [i, j), for every i < j; infinite where there is no such stage."""
        out = self.work[j] - self.work[:j] + self.cost[j]
        bad = ~self.legal[:j]
        if self.fits is not None:
            bad = bad | ~self.fits[:j, j]
        if self.strangers is not None:
            bad = bad | (self.strangers[stage, :j] != self.strangers[stage, j])
        return np.where(bad, np.inf, out)

    def slowest(self, stages: int) -> float:
        n = len(self.work) - 1
        best = np.full(n + 1, np.inf)
        best[0] = 0.0
        for stage in range(stages):
            new = np.full(n + 1, np.inf)
            for j in range(1, n + 1):
                if self.legal[j]:
                    new[j] = np.maximum(best[:j], self.time(j, stage)).min()
            best = new
        return float(best[n])

    def fewest(self, stages: int, limit: float, live: Row) -> list[int]:
        """The bounds that send least while no stage takes longer than `limit`."""
        n = len(self.work) - 1
        sent = np.full(n + 1, np.inf)
        sent[0] = 0.0
        came: list[NDArray[np.int64]] = []
        for stage in range(stages):
            new, source = np.full(n + 1, np.inf), np.zeros(n + 1, dtype=np.int64)
            for j in range(1, n + 1):
                if self.legal[j]:
                    total = np.where(self.time(j, stage) <= limit, sent[:j], np.inf)
                    source[j] = int(total.argmin())
                    new[j] = total[source[j]] + (live[j] if j < n else 0.0)
            sent = new
            came.append(source)
        bounds = [n]
        for source in reversed(came):
            bounds.append(int(source[bounds[-1]]))
        return bounds[::-1]


def _strangers(line: Line, homes: Sequence[frozenset[str]] | None) -> NDArray[np.int64] | None:
    if homes is None:
        return None
    foreign = [[not set(item.weights) <= home for item in line.items] for home in homes]
    counts = np.cumsum(np.array(foreign, dtype=np.int64), axis=1)
    return np.concatenate([np.zeros((len(homes), 1), np.int64), counts], axis=1)


def _too_large(line: Line, stages: int, memory: float) -> str:
    total = sum(line.weights.values())
    need = max(stages + 1, -(-int(total) // max(1, int(memory))))
    return (
        f"does not fit: weights of {total / 2**30:.2f} GiB in {stages} stages of "
        f"{memory / 2**30:.2f} GiB each; at least {need} stages are needed"
    )
