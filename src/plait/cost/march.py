"""The price's reader of a schedule: march through its steps once, for all sizes at a time.

Every rank issues its steps in order and a transfer starts when what it reads is there, so a step is

    out   a port serves a step's messages together: it begins when it is free and the last of them is ready,
          and all are out when its last byte is: end = begin + bytes / rate + message for each
    in    the target's port likewise, cut through: bytes enter while they leave
    add   an addition follows its arrival at once, or (not fused) takes `add` seconds a byte of its target

Only maxima and sums of latencies and of multiples of the size occur, so the time is a convex piecewise linear
function of the size: the upper envelope of lines, one a critical path (its latency, its seconds a byte):

    seconds |            ___---     few bytes: the path with the most steps
            |  ______----            many: the one with the most bytes
            +----------------- size

`envelope` finds the lines by marching with a grid of sizes and, at each, a size a little above.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from plait.cluster import Cluster, Protocol, Transport
from plait.collectives.algorithms import build
from plait.collectives.schedule import Schedule, Spec

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_SIZES = 2.0 ** np.arange(0, 41, 2)  # the grid: 1 B to 1 TiB
_ABOVE = 1 + 1 / 64


@dataclass(frozen=True)
class Envelope:
    """seconds(size) = the greatest of latency + slope * size."""

    lines: tuple[tuple[float, float], ...]

    def __call__(self, nbytes: float) -> float:
        return max((a + b * nbytes for a, b in self.lines), default=0.0)


@dataclass(frozen=True, eq=False)
class Stage:
    """One step as arrays: its messages, and its transfers (`of` tells the message of each)."""

    source: Ints
    target: Ints
    adds: NDArray[np.bool_]
    of: Ints
    chunk: Ints


def stages(schedule: Schedule) -> tuple[Stage, ...]:
    """The schedule's messages as arrays, step by step."""
    result = []
    for messages in schedule.messages:
        counts = [len(m.chunks) for m in messages]
        result.append(
            Stage(
                np.array([m.source for m in messages], np.int64),
                np.array([m.target for m in messages], np.int64),
                np.array([m.op == "add" for m in messages], np.bool_),
                np.repeat(np.arange(len(messages)), counts),
                np.array([chunk for m in messages for chunk in m.chunks], np.int64),
            )
        )
    return tuple(result)


def whole(schedule: Schedule) -> float:
    """Vectors in all chunks together: 1, or for all_to_all n (the size is one rank's send buffer)."""
    return float(schedule.n if schedule.collective == "all_to_all" else 1)


@lru_cache(maxsize=4096)
def envelope_of(spec: Spec, cluster: Cluster, transport: Transport, protocol: Protocol) -> Envelope:
    """`envelope` of the schedule that a spec names, remembered."""
    return envelope(build(spec), cluster, transport, protocol)


def envelope(
    schedule: Schedule, cluster: Cluster, transport: Transport, protocol: Protocol
) -> Envelope:
    """The time of a schedule as a function of the size; rank r of the schedule is rank r of the cluster."""
    sizes = np.concatenate([_SIZES, _SIZES * _ABOVE])
    ends = march(schedule, cluster, transport, protocol, sizes)
    low, high = np.split(ends, 2)
    slopes = (high - low) / (_SIZES * (_ABOVE - 1))
    latencies = low - slopes * _SIZES
    lines = {(f"{a:.6e}", f"{b:.6e}"): (max(a, 0.0), b) for a, b in zip(latencies, slopes, strict=True)}
    return Envelope(tuple((float(a), float(b)) for a, b in lines.values()))


def march(
    schedule: Schedule, cluster: Cluster, transport: Transport, protocol: Protocol, sizes: Floats
) -> Floats:
    """Seconds until the last rank is done, for each size in bytes."""
    chunk_bytes = sizes * (whole(schedule) / max(schedule.chunks, 1))
    n, width = schedule.n, len(sizes)
    ready = np.zeros((n, max(schedule.chunks, 1), width))
    rates = np.array([link.bandwidth * link.share for link in cluster.links]) * protocol.share
    latency = np.array([level.latency for level in cluster.levels]) * protocol.hops + protocol.step
    free = np.zeros((len(rates), width))
    adding = np.zeros((n, width))
    for stage in stages(schedule):
        count = np.bincount(stage.of, minlength=len(stage.source))
        nbytes = count[:, None] * chunk_bytes
        begin = _most(ready[stage.source[stage.of], stage.chunk], stage.of, len(count))
        end = begin
        for slot in cluster.paths(stage.source, stage.target).T:
            begin, end = _pass(slot, begin, end, nbytes, rates, free, protocol.message)
        end = end + latency[cluster.level_of(stage.source, stage.target)][:, None]
        if stage.adds.any() and not transport.fused:
            end = _add(stage, end, nbytes * transport.add, adding)
        arrived = end[stage.of]
        at = (stage.target[stage.of], stage.chunk)
        np.maximum.at(ready, at, arrived)
    return ready.max(axis=(0, 1))


def _pass(
    slot: Ints, begin: Floats, end: Floats, nbytes: Floats, rates: Floats, free: Floats, message: float
) -> tuple[Floats, Floats]:
    """Messages pass one link each (slot -1: none); when the first and the last byte of each is through."""
    used = np.flatnonzero(slot >= 0)
    if not len(used):
        return begin, end
    links, of = np.unique(slot[used], return_inverse=True)
    busy = np.zeros((len(links), nbytes.shape[1]))
    np.add.at(busy, of, nbytes[used] / rates[slot[used]][:, None] + message)
    start = np.maximum(_most(begin[used], of, len(links)), free[links])
    free[links] = start + busy
    begin, end = begin.copy(), end.copy()
    begin[used] = start[of]
    end[used] = np.maximum(end[used], free[links][of])
    return begin, end


def _add(stage: Stage, end: Floats, seconds: Floats, adding: Floats) -> Floats:
    """A rank adds what a step brings it one after another, beginning when the first has arrived."""
    which = np.flatnonzero(stage.adds)
    ranks, of = np.unique(stage.target[which], return_inverse=True)
    work = np.zeros((len(ranks), end.shape[1]))
    np.add.at(work, of, seconds[which])
    own = _most(end[which], of, len(ranks))
    done = np.maximum(own, adding[ranks]) + work
    adding[ranks] = done
    after = end.copy()
    after[which] = done[of]
    return after


def _most(values: Floats, of: Ints, groups: int) -> Floats:
    """The greatest of each group."""
    if groups == len(values) and np.array_equal(of, np.arange(groups)):
        return values
    result = np.zeros((groups, values.shape[1]))
    np.maximum.at(result, of, values)
    return result
