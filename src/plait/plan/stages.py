"""Cuts: the order of a program's operators, cut into S stages that take the same time.

    time of stage [i, j)     sum of the operators' seconds + what is sent over the cut that ends it
    memory of stage [i, j)   its weights, each once + what its open micro-batches keep + workspace
    live(j)                  bytes of the values made before position j and used at or after it

First the least possible time of the slowest stage; then, among all cuts within `SLACK` of it, the one
that sends the fewest bytes. A stage whose memory is too large is no stage. Weights and inputs are no
traffic: a stage that needs one has it.

Time and memory of a stage that ends at j only grow as its begin moves forward, so the begins that a
limit allows are a run lo(j) <= i < j. Whether S stages keep a limit is then a walk over reachable
positions, a few rows of numpy a stage, and the least limit is found by halving; the fewest bytes are
minima over the same runs. Nothing is N^2: 64 stages of 5,000 operators take a tenth of a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

import numpy as np
from numpy.typing import NDArray

from plait.cluster.units import spell_size
from plait.errors import LaidError, PlanError

SLACK = 0.02  # a cut may be this much slower than the best one if it sends less
EXACT = 1e-4  # relative: how near the least limit is found

Row = NDArray[np.float64]
Places = NDArray[np.int64]


@dataclass(frozen=True)
class Item:
    """One operator: what it costs, what it makes, and where that is used last."""

    name: str
    seconds: float
    nbytes: float = 0.0  # of its value, if that can cross a cut
    last: int = -1  # position of the last operator that reads the value
    weights: tuple[str, ...] = ()  # those it reads
    joined: bool = False  # may not be parted from the operator before it
    kept: float = 0.0  # bytes that it keeps for the backward of an open micro-batch


@dataclass(frozen=True)
class Again:
    """Operators run again in the backward, in segments (plan/recompute.py).

    An open micro-batch keeps what enters its stage and each segment; what operators keep is there for
    one segment at a time, of `at_once` micro-batches.
    """

    starts: tuple[int, ...] = ()  # positions at which a segment begins, but the first
    entering: float = 0.0  # bytes, at most
    most: float = inf  # bytes that the operators of one segment keep
    at_once: float = 1.0


@dataclass(frozen=True)
class Line:
    """A program as the cut sees it. `weights`: bytes of each; `workspace`: bytes of every stage."""

    items: tuple[Item, ...]
    weights: dict[str, float] = field(default_factory=dict)
    workspace: float = 0.0
    again: Again | None = None

    @cached_property
    def live(self) -> Row:
        """Bytes that cross a cut at each position 0..N."""
        steps = np.zeros(len(self.items) + 2)
        for i, item in enumerate(self.items):
            if item.last > i:
                steps[i + 1] += item.nbytes
                steps[item.last + 1] -= item.nbytes
        return np.asarray(np.cumsum(steps)[: len(self.items) + 1])

    @cached_property
    def work(self) -> Row:
        """Seconds of the operators before each position."""
        return _sums([item.seconds for item in self.items])

    @cached_property
    def legal(self) -> NDArray[np.bool_]:
        """Positions at which a stage may begin or end."""
        return np.array([*(i == 0 or not x.joined for i, x in enumerate(self.items)), True])

    def memory(self, begin: Places, end: Places, opened: float) -> Row:
        """Bytes of the stages [begin, end) with so many micro-batches open, element by element."""
        again, total = self.again, self.running(begin, end, opened)
        if again is None:
            total = total + opened * (self.kept[end] - self.kept[begin])
        else:
            total = total + opened * (again.entering + self._entering[end] - self._entering[begin])
        for reads, nbytes in self._weights:
            total = total + nbytes * (reads[end] > reads[begin])
        return np.asarray(total + self._alone[end] - self._alone[begin])

    def running(self, begin: Places, end: Places, opened: float) -> Row:
        """Those of them that are there only while the stage runs."""
        kept, again = self.kept[end] - self.kept[begin], self.again
        segment = 0.0 if again is None else min(opened, again.at_once) * np.minimum(kept, again.most)
        return np.asarray(self.workspace + segment + np.zeros(len(begin)))

    def fitting(self, memory: float, opened: float) -> Places:
        """The first begin of a stage that ends at j and fits; j itself where none does."""
        if (memory, opened) not in self._fits:
            end = np.arange(len(self.items) + 1)
            low, high = np.zeros_like(end), end.copy()  # the answer is in low .. high
            while (low < high).any():
                middle = (low + high) // 2
                fits = self.memory(middle, end, opened) <= memory
                low, high = np.where(fits, low, middle + 1), np.where(fits, middle, high)
                low = np.minimum(low, high)
            self._fits[memory, opened] = high
        return self._fits[memory, opened]

    @cached_property
    def _fits(self) -> dict[tuple[float, float], Places]:
        return {}

    @cached_property
    def kept(self) -> Row:
        """Bytes that the operators before each position keep."""
        return _sums([item.kept for item in self.items])

    @cached_property
    def _entering(self) -> Row:
        """Bytes that enter the segments which begin before each position."""
        starts = list(self.again.starts) if self.again is not None else []
        inside = np.zeros(len(self.items))
        inside[starts] = self.live[starts]
        return np.concatenate([[0.0], np.cumsum(inside)])

    @cached_property
    def _alone(self) -> Row:
        """Bytes of the weights that one operator reads, before each position."""
        counts = self._counts
        return _sums(
            [sum(self.weights[w] for w in item.weights if counts[w] == 1) for item in self.items]
        )

    @cached_property
    def _weights(self) -> list[tuple[Places, float]]:
        """Of the weights that several operators read: how many read them before each position, and
        bytes; those that the same operators read are one."""
        groups: dict[tuple[int, ...], float] = {}
        reads: dict[str, list[int]] = {w: [] for w, c in self._counts.items() if c > 1}
        for at, item in enumerate(self.items):
            for w in item.weights:
                if w in reads:
                    reads[w].append(at)
        for w, places in reads.items():
            groups[tuple(places)] = groups.get(tuple(places), 0.0) + self.weights[w]
        n = len(self.items)
        return [
            (np.searchsorted(np.array(places), np.arange(n + 1), side="left"), nbytes)
            for places, nbytes in groups.items()
        ]

    @cached_property
    def _counts(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for item in self.items:
            for w in item.weights:
                counts[w] = counts.get(w, 0) + 1
        return counts


@dataclass(frozen=True)
class Cuts:
    """Stage s runs the items bounds[s] .. bounds[s + 1] - 1."""

    bounds: tuple[int, ...]
    seconds: tuple[float, ...]  # of every stage, sends included
    crossing: tuple[float, ...]  # bytes over each cut
    best: float  # the least time of the slowest stage that any cut reaches
    memory: tuple[float, ...] = ()  # bytes of every stage
    running: tuple[float, ...] = ()  # those of them that are there only while it runs

    def fullest(self, places: int) -> float:
        """Bytes of the fullest place: of the stages at one, a single one runs at a time."""
        stages = list(zip(self.memory, self.running, strict=True))
        of = [stages[p::places] for p in range(places)]
        return max(sum(held - runs for held, runs in s) + max(runs for _, runs in s) for s in of)

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
    opened: Sequence[float] | None = None,
    homes: Sequence[frozenset[str]] | None = None,
    about: str = "",
) -> Cuts:
    """The best cut into `stages` parts; a transfer takes `send_seconds + bytes * byte_seconds`.

    `opened`: micro-batches that every stage has open at most. `homes`: the weights that every stage
    holds already, and so the only ones it may read. Raises PlanError where no cut is possible, with
    the number of stages that would be; `about`: why there are so many.
    """
    n, legal = len(line.items), line.legal
    if stages > int(legal.sum()) - 1:
        raise PlanError(
            f"{stages} stages{about}: the model has {n} operators that can be cut apart at "
            f"{int(legal.sum()) - 2} places, into at most {max(1, int(legal.sum()) - 1)} stages"
        )
    live = line.live
    cost = live * byte_seconds + np.where(live > 0, send_seconds, 0.0)
    cost[n] = 0.0
    opens = tuple(opened) if opened is not None else (0.0,) * stages
    table = _Table(line.work, cost, legal, _begins(line, stages, memory, opens, homes))
    best = table.slowest(stages)
    if best is None and homes is not None:
        raise LaidError("this form of call needs weights on other stages than they are loaded on")
    if best is None:
        raise PlanError(_too_large(line, stages, memory or 0.0, opens))
    bounds = table.fewest(best * (1 + SLACK) + 1e-15, live)
    begin, end = np.array(bounds[:-1]), np.array(bounds[1:])
    held, runs = (
        tuple(float(count(begin[[s]], end[[s]], opens[s])[0]) for s in range(stages))
        for count in (line.memory, line.running)
    )
    return Cuts(
        tuple(bounds),
        tuple(table.seconds(begin, end).tolist()),
        tuple(live[end[:-1]].tolist()),
        best,
        held,
        runs,
    )


@dataclass(frozen=True)
class _Table:
    work: Row
    cost: Row
    legal: NDArray[np.bool_]
    least: Sequence[Places]  # [stage][j]: the first begin that a stage may have which ends at j

    def seconds(self, begin: Places, end: Places) -> Row:
        return np.asarray(self.work[end] - self.work[begin] + self.cost[end])

    def begins(self, limit: float) -> Iterator[Places]:
        """lo(j), stage after stage: one that ends at j and keeps the limit begins at lo(j) .. j - 1."""
        in_time = np.searchsorted(self.work, self.work + self.cost - limit, side="left")
        for least in self.least:
            yield np.maximum(in_time, least)

    def reaches(self, limit: float) -> bool:
        n = len(self.work) - 1
        here = np.zeros(n + 1, np.int64)
        here[0] = 1
        ends = np.arange(n + 1)
        for begins in self.begins(limit):
            before = np.concatenate([[0], np.cumsum(here)])  # of the positions below each
            here = ((before[ends] > before[np.minimum(begins, ends)]) & self.legal).astype(np.int64)
        return bool(here[n])

    def slowest(self, stages: int) -> float | None:
        """The least limit that `stages` stages keep; None where they keep none."""
        most = float(self.work[-1] + self.cost.max()) * (1 + EXACT) + 1e-15
        if not self.reaches(most):
            return None
        low = float(self.work[-1]) / stages
        high = low * (1 + EXACT)
        while high < most and not self.reaches(high):
            low, high = high, min(most, high + 2 * (high - low))
        while high - low > EXACT * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self.reaches(middle) else (middle, high)
        return high

    def fewest(self, limit: float, live: Row) -> list[int]:
        """The bounds that send least while no stage takes longer than `limit`."""
        n = len(self.work) - 1
        sent = np.full(n + 1, np.inf)
        sent[0] = 0.0
        came: list[Places] = []
        charge = np.where(self.legal, live, np.inf)
        charge[n] = 0.0
        for begins in self.begins(limit):
            least, source = _minima(sent, begins)
            sent = least + charge
            came.append(source)
        bounds = [n]
        for source in reversed(came):
            bounds.append(int(source[bounds[-1]]))
        return bounds[::-1]


def _minima(values: Row, first: Places) -> tuple[Row, Places]:
    """For every j the least of values[first[j] : j] and where it stands; infinite of none.

    By doubling: rows[k][i] is where the least of the 2^k values from i on stands.
    """
    n = len(values)
    rows = [np.arange(n)]
    while 2 ** len(rows) <= n:
        half = 2 ** (len(rows) - 1)
        left = rows[-1][: n - 2 * half + 1]
        right = rows[-1][half : half + len(left)]
        rows.append(np.where(values[right] < values[left], right, left))
    ends = np.arange(n)
    length = ends - first
    out, where = np.full(n, np.inf), np.zeros(n, np.int64)
    some = length > 0
    power = np.zeros(n, np.int64)
    power[some] = np.log2(length[some]).astype(np.int64)
    for k, row in enumerate(rows):
        mine = np.flatnonzero(some & (power == k))
        left, right = row[first[mine]], row[ends[mine] - 2**k]
        where[mine] = np.where(values[right] < values[left], right, left)
        out[mine] = values[where[mine]]
    return out, where


def _begins(
    line: Line,
    stages: int,
    memory: float | None,
    opened: Sequence[float],
    homes: Sequence[frozenset[str]] | None,
) -> list[Places]:
    """[stage][j]: the first begin that memory and the weights at home allow a stage that ends at j."""
    n = len(line.items)
    nothing = np.zeros(n + 1, np.int64)
    by_open = {} if memory is None else {o: line.fitting(memory, o) for o in set(opened)}
    out = [by_open.get(opened[s], nothing) for s in range(stages)]
    if homes is not None:
        for s, home in enumerate(homes):
            foreign = [i + 1 if not set(item.weights) <= home else 0 for i, item in enumerate(line.items)]
            after = np.maximum.accumulate(np.array([0, *foreign], np.int64))
            out[s] = np.maximum(out[s], after)
    return out


def _sums(values: Sequence[float]) -> Row:
    return np.concatenate([[0.0], np.cumsum(np.array(values, np.float64))])


def _too_large(line: Line, stages: int, memory: float, opened: Sequence[float]) -> str:
    begin, end = np.array([0]), np.array([len(line.items)])
    total, least = (float(line.memory(begin, end, count)[0]) for count in (max(opened), min(opened)))
    given = f"{stages} stages of {spell_size(memory)} each" if stages > 1 else spell_size(memory)
    words = f"does not fit: {spell_size(total)} in {given}"
    room = int(memory - line.workspace)
    if room <= 0:
        return f"{words}; values that are alive at once take {spell_size(line.workspace)} on every stage"
    need = max(stages + 1, -(-int(least - line.workspace) // room))
    return f"{words}; at least {need} stages are needed"
