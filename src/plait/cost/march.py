"""The price's reader of a schedule: march through its steps once, for all sizes at a time.

Every rank issues its steps in order and a transfer starts when what it reads is there, so a step is

    out   a port serves a step's messages in the order in which they are ready, those ready at once
          together: they are out when their last byte is, bytes / rate + message for each later
    in    the target's port likewise, cut through: bytes enter while they leave
    add   an addition follows its arrival at once, or (not fused) takes `add` seconds a byte

Only maxima and sums of latencies and of multiples of the size occur, so the time is a convex
piecewise linear function of the size: the upper envelope of lines, each a critical path (latency,
seconds a byte):

    seconds |            ___---     few bytes: the path with the most steps
            |  ______----            many: the one with the most bytes
            +----------------- size

`envelope` finds the lines by marching with a grid of sizes and, at each, a size a little above.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from plait.cluster import Cluster, Protocol, Transport
from plait.collectives.schedule import Spec
from plait.cost.flow import Flow, Ints, Route, Stage, flow_of

Floats = NDArray[np.float64]
Watch = Callable[[int, Stage, Floats, Floats], None]  # step, its messages, their begins and ends

_SIZES = 2.0 ** np.arange(0, 41, 2.5)  # the grid: 1 B to 1 TiB
_ABOVE = 1 + 1 / 64


@dataclass(frozen=True)
class Envelope:
    """seconds(size) = the greatest of latency + slope * size."""

    lines: tuple[tuple[float, float], ...]

    def __call__(self, nbytes: float) -> float:
        return max((a + b * nbytes for a, b in self.lines), default=0.0)


@lru_cache(maxsize=4096)
def envelope_of(spec: Spec, cluster: Cluster, transport: Transport, protocol: Protocol) -> Envelope:
    """`envelope` of the schedule that a spec names, remembered."""
    return envelope(flow_of(spec), cluster, transport, protocol)


def envelope(what: Flow, cluster: Cluster, transport: Transport, protocol: Protocol) -> Envelope:
    """Seconds of a schedule by its size; rank r of the schedule is rank r of the cluster."""
    sizes = np.concatenate([_SIZES, _SIZES * _ABOVE])
    low, high = np.split(march(what, cluster, transport, protocol, sizes), 2)
    slopes = (high - low) / (_SIZES * (_ABOVE - 1))
    latencies = np.maximum(low - slopes * _SIZES, 0.0)
    lines = {
        (f"{a:.6e}", f"{b:.6e}"): (float(a), float(b))
        for a, b in zip(latencies, slopes, strict=True)
    }
    return Envelope(tuple(lines.values()))


def march(
    what: Flow,
    cluster: Cluster,
    transport: Transport,
    protocol: Protocol,
    sizes: Floats,
    watch: Watch | None = None,
) -> Floats:
    """Seconds until the last rank is done, for each size in bytes."""
    state = _State.of(what, cluster, transport, protocol, sizes)
    for index, stage in enumerate(what.stages()):
        begin, end = state.step(stage)
        if watch:
            watch(index, stage, begin, end)
    return np.asarray(state.ready.max(axis=0, initial=0.0))


@dataclass
class _State:
    cluster: Cluster
    chunk_bytes: Floats  # [size]
    message: float
    add: float  # seconds a byte; 0: fused
    rates: Floats  # [link]
    latency: Floats  # [level]
    ready: Floats  # [place, size]: when what lies there has arrived
    chunks: int
    held: Ints | None  # place -> rank * chunks + chunk, in order; None: all
    free: Floats  # [link, size]
    adding: Floats  # [rank, size]: until when the rank adds
    ways: dict[int, _Way]

    @staticmethod
    def of(
        what: Flow, cluster: Cluster, transport: Transport, protocol: Protocol, sizes: Floats
    ) -> _State:
        assert what.n == cluster.size, (what.name, cluster.size)
        rates = np.array([link.bandwidth * link.share for link in cluster.links]) * protocol.share
        return _State(
            cluster,
            sizes * (what.whole / what.chunks),
            protocol.message,
            0.0 if transport.fused else transport.add,
            rates,
            np.array([lv.latency for lv in cluster.levels]) * protocol.hops + protocol.step,
            np.zeros((what.n * what.chunks if what.held is None else len(what.held), len(sizes))),
            what.chunks,
            what.held,
            np.zeros((len(rates), len(sizes))),
            np.zeros((what.n, len(sizes))),
            {},
        )

    def step(self, stage: Stage) -> tuple[Floats, Floats]:
        """When the first byte of each message leaves, and when the last is there and added."""
        way = self._way(stage.route)
        source, target = stage.route.source, stage.route.target
        if stage.of is None:
            nbytes = np.broadcast_to(self.chunk_bytes, (len(source), len(self.chunk_bytes)))
            begin = self.ready[self._places(source, stage.chunk)]
            places = self._places(target, stage.chunk)
        else:
            counts = np.bincount(stage.of, minlength=len(source))
            nbytes = counts[:, None] * self.chunk_bytes
            starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
            there = self.ready[self._places(source[stage.of], stage.chunk)]
            begin = np.maximum.reduceat(there, starts)
            places = self._places(target[stage.of], stage.chunk)
        end = begin
        for group in way.links:
            begin, end = self._pass(group, begin, end, nbytes)
        end = end + way.latency
        if self.add and stage.adds.any():
            end = self._added(way.targets, stage.adds, end, nbytes * self.add)
        self._arrive(way, places, end if stage.of is None else end[stage.of])
        return begin, end

    def _places(self, ranks: Ints, chunks: Ints) -> Ints:
        places = ranks * self.chunks + chunks
        return places if self.held is None else np.searchsorted(self.held, places)

    def _pass(
        self, group: _Group, begin: Floats, end: Floats, nbytes: Floats
    ) -> tuple[Floats, Floats]:
        """Messages pass one link each; when their first and last bytes are through."""
        links = group.ids
        seconds = nbytes[group.rows] / group.rates + self.message
        ready = np.maximum(begin[group.rows], group.spread(self.free[links]))
        first, last = group.serve(ready, seconds)
        self.free[links] = group.most(last)
        if group.all:
            return first, np.maximum(end, last)
        begin, end = begin.copy(), end.copy()
        begin[group.rows] = first
        end[group.rows] = np.maximum(end[group.rows], last)
        return begin, end

    def _added(
        self, ranks: _Group, adds: NDArray[np.bool_], end: Floats, seconds: Floats
    ) -> Floats:
        """A rank adds what a step brings when all of it is there, one message after another."""
        mine = adds[:, None]
        work = ranks.sum(np.where(mine, seconds, 0.0))
        start = np.maximum(ranks.most(np.where(mine, end, 0.0)), self.adding[ranks.ids])
        done = np.where(work > 0, start + work, self.adding[ranks.ids])
        self.adding[ranks.ids] = done
        return np.where(mine, ranks.spread(done), end)

    def _arrive(self, way: _Way, places: Ints, end: Floats) -> None:
        if way.targets.order is None:  # every target once, so every place once
            self.ready[places] = np.maximum(self.ready[places], end)
        else:
            group = _Group.of(places)
            self.ready[group.ids] = np.maximum(self.ready[group.ids], group.most(end))

    def _way(self, route: Route) -> _Way:
        if id(route) not in self.ways:
            slots = self.cluster.paths(route.source, route.target).T
            level = self.cluster.level_of(route.source, route.target)
            groups = (_Group.of(slot, np.flatnonzero(slot >= 0), self.rates) for slot in slots)
            self.ways[id(route)] = _Way(
                route,
                tuple(group for group in groups if len(group.ids)),
                self.latency[level][:, None],
                _Group.of(route.target),
            )
        return self.ways[id(route)]


@dataclass(frozen=True, eq=False)
class _Way:
    """What a route means on the cluster, worked out once."""

    route: Route  # kept, so that its id stays its own
    links: tuple[_Group, ...]  # in the order in which messages pass them
    latency: Floats
    targets: _Group


@dataclass(frozen=True, eq=False)
class _Group:
    """Rows by a key (a link, a rank, a place): maxima and sums over the rows of each."""

    ids: Ints  # the keys; if `order` is None there is one row each, in the order of rows
    rows: Ints
    all: bool  # every row has a key
    rates: Floats
    order: Ints | None
    starts: Ints
    which: Ints  # the key's index of each row

    @staticmethod
    def of(keys: Ints, rows: Ints | None = None, rates: Floats | None = None) -> _Group:
        mine = keys if rows is None else keys[rows]
        rows = np.arange(len(keys)) if rows is None else rows
        speed = np.ones((0, 1)) if rates is None else rates[mine][:, None]
        order = np.argsort(mine, kind="stable")
        first = np.flatnonzero(np.diff(mine[order], prepend=-1))
        whole = len(rows) == len(keys)
        if len(first) == len(mine):
            return _Group(mine, rows, whole, speed, None, first, rows)
        which = np.empty(len(mine), np.int64)
        which[order] = np.cumsum(np.isin(np.arange(len(mine)), first)) - 1
        return _Group(mine[order][first], rows, whole, speed, order, first, which)

    def most(self, values: Floats) -> Floats:
        if self.order is None:
            return values
        return np.asarray(np.maximum.reduceat(values[self.order], self.starts))

    def sum(self, values: Floats) -> Floats:
        if self.order is None:
            return values
        return np.asarray(np.add.reduceat(values[self.order], self.starts))

    def serve(self, ready: Floats, seconds: Floats) -> tuple[Floats, Floats]:
        """One queue a key: when each row begins and ends; rows ready at the same time share."""
        if self.order is None:
            return ready, ready + seconds
        begin, end = self.most(ready), self.sum(seconds)
        if (self.spread(begin) == ready).all():
            return ready, self.spread(begin + end)
        return self._queue(ready, seconds)

    def _queue(self, ready: Floats, seconds: Floats) -> tuple[Floats, Floats]:
        # Keys are set apart on the axis of time, so that one scan over all rows serves all of them.
        apart = 2.0 * (float(ready.max()) + float(seconds.sum(axis=0).max()))
        at = ready + apart * self.which[:, None]
        order = np.argsort(at, axis=0, kind="stable")
        at, work = np.take_along_axis(at, order, 0), np.take_along_axis(seconds, order, 0)
        before = np.cumsum(work, axis=0) - work
        start = np.maximum.accumulate(at - before, axis=0) + before
        done = start + work
        # rows ready at once: the first one's begin, the last one's end
        new = np.diff(at, axis=0) > 1e-12 * apart
        rows = np.arange(len(at))[:, None]
        first = np.maximum.accumulate(np.where(np.vstack([new[:1] | True, new]), rows, 0), axis=0)
        last = np.where(np.vstack([new, new[:1] | True]), rows, len(at))
        last = np.minimum.accumulate(last[::-1], axis=0)[::-1]
        shift = apart * np.take_along_axis(np.broadcast_to(self.which[:, None], at.shape), order, 0)
        begin, end = np.empty_like(at), np.empty_like(at)
        np.put_along_axis(begin, order, np.take_along_axis(start, first, 0) - shift, 0)
        np.put_along_axis(end, order, np.take_along_axis(done, last, 0) - shift, 0)
        return begin, end

    def spread(self, values: Floats) -> Floats:
        return values if self.order is None else values[self.which]
