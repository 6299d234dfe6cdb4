"""Simulation: a schedule's transfers as events on the links of a cluster, with contention.

    simulate("ring[8]/4", 64 * 2**20, cluster)                          every message, timed
    simulate(wide("hierarchical", (512, 8)), 2**30, big, record=False)  thousands of ranks

Two engines, one answer where links are not contended (tests hold them to each other):

    events   a message starts when what it reads is there and the one before it to that rank is out;
             on a link earlier steps go first, messages of one step share it fairly (their rates are
             max-min), and the rates change at every event. For schedules of some ten thousand
             messages.
    steps    the price's march (cost/march.py), all chunks of one size: a port serves a rank's
             messages step by step. Whole steps at a time, so that thousands of ranks take
             seconds.

The price is one formula over these rules; the parameter server's master, whose port all others
share, comes out N-1 times as slow here without anything being said about masters.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from plait.cluster import Cluster, Protocol, Transport
from plait.collectives.algorithms import build
from plait.collectives.schedule import Message, Schedule
from plait.cost.flow import Flow, Stage, flow
from plait.cost.march import march
from plait.errors import CollectiveError
from plait.timeline import Event, Timeline

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MOST_EVENTS = 20_000  # messages that `events` simulates when not asked for


@dataclass(frozen=True)
class Simulation:
    """`timeline` has the messages, unless not recorded; `loads` the bytes of each link."""

    timeline: Timeline
    loads: dict[str, float]

    @property
    def end(self) -> float:
        return self.timeline.end

    @property
    def busiest(self) -> str:
        return max(self.loads, key=lambda link: self.loads[link])


def simulate(
    schedule: Schedule | Flow | str,
    nbytes: int,
    cluster: Cluster,
    ranks: Sequence[int] | None = None,
    *,
    transport: str | None = None,
    engine: str = "auto",
    record: bool = True,
) -> Simulation:
    """Run a collective of `nbytes` on a described cluster; rank r of the schedule is `ranks[r]`."""
    made = build(schedule) if isinstance(schedule, str) else schedule
    part = cluster if ranks is None else cluster.subset(ranks)
    if made.n != part.size:
        name = made.name if isinstance(made, Flow) else str(made)
        raise CollectiveError(f"{name} has {made.n} ranks and is to run on {part.size}")
    by, protocol = _chosen(part, transport)
    small = isinstance(made, Schedule) and sum(map(len, made.messages)) <= MOST_EVENTS
    if engine == "events" or (engine == "auto" and small):
        if isinstance(made, Flow):
            raise CollectiveError(f"{made.name} is too wide for single events; use engine='steps'")
        return _Events(made, nbytes, part, by, protocol).run(record)
    return _steps(
        made if isinstance(made, Flow) else flow(made), nbytes, part, by, protocol, record
    )


def _chosen(cluster: Cluster, name: str | None) -> tuple[Transport, Protocol]:
    able = [t for t in cluster.transports if t.protocols and name in (None, t.name)]
    if not able:
        raise CollectiveError(f"{cluster.name} has no transport {name or ''} that runs schedules")
    return able[0], able[0].protocols[0]


# --- steps ---------------------------------------------------------------------------------------


def _steps(
    what: Flow, nbytes: int, cluster: Cluster, by: Transport, protocol: Protocol, record: bool
) -> Simulation:
    events: list[Event] = []
    loads = np.zeros(len(cluster.links))
    chunk = nbytes * what.whole / what.chunks
    start = by.launch + protocol.base

    def watch(step: int, stage: Stage, begin: Floats, end: Floats) -> None:
        paths = cluster.paths(stage.route.source, stage.route.target)
        counts = (
            np.ones(len(paths)) if stage.of is None else np.bincount(stage.of, minlength=len(paths))
        )
        for slot in paths.T:
            used = slot >= 0
            np.add.at(loads, slot[used], counts[used] * chunk)
        if record:
            events.extend(_messages(step, stage, start + begin[:, 0], start + end[:, 0]))

    end = float(march(what, cluster, by, protocol, np.array([float(nbytes)]), watch)[0])
    timeline = Timeline(tuple(sorted(events, key=lambda e: (e.begin, e.end))), start + end)
    return Simulation(timeline, _named(cluster, loads))


def _messages(step: int, stage: Stage, begin: Floats, end: Floats) -> list[Event]:
    pairs = zip(stage.route.source.tolist(), stage.route.target.tolist(), strict=True)
    return [
        Event(
            b, e, f"rank {source}", f"step {step}: {source} -> {target} {'add' if adds else 'copy'}"
        )
        for (source, target), adds, b, e in zip(
            pairs, stage.adds, begin.tolist(), end.tolist(), strict=True
        )
    ]


def _named(cluster: Cluster, loads: Floats) -> dict[str, float]:
    return {cluster.links[i].name: float(loads[i]) for i in np.flatnonzero(loads)}


# --- events --------------------------------------------------------------------------------------


@dataclass
class _Events:
    schedule: Schedule
    nbytes: int
    cluster: Cluster
    by: Transport
    protocol: Protocol
    messages: list[Message] = field(init=False)
    waits: Ints = field(init=False)  # [message]: how many things it still waits for
    frees: list[list[int]] = field(init=False)  # message -> those that read what it brings
    follows: list[int] = field(init=False)  # message -> the next one of the same pair, or -1
    step: Ints = field(init=False)
    size: Floats = field(init=False)
    path: Ints = field(init=False)  # [message, slot]
    latency: Floats = field(init=False)

    def __post_init__(self) -> None:
        self.messages = [m for step in self.schedule.messages for m in step]
        self.step = np.array([m.step for m in self.messages], np.int64)
        sizes = self.schedule.chunk_sizes(self.nbytes)
        self.size = np.array([float(sum(sizes[c] for c in m.chunks)) for m in self.messages])
        source = np.array([m.source for m in self.messages], np.int64)
        target = np.array([m.target for m in self.messages], np.int64)
        self.path = (
            self.cluster.paths(source, target) if len(source) else np.zeros((0, 1), np.int64)
        )
        hops = np.array([level.latency for level in self.cluster.levels]) * self.protocol.hops
        self.latency = (hops + self.protocol.step)[self.cluster.level_of(source, target)]
        self._order()

    def _order(self) -> None:
        """Who waits for whom: readers for all earlier writes, messages of a pair in order."""
        writes: dict[tuple[int, int], list[int]] = defaultdict(list)
        last: dict[tuple[int, int], int] = {}
        self.frees = [[] for _ in self.messages]
        self.follows = [-1] * len(self.messages)
        self.waits = np.zeros(len(self.messages), np.int64)
        index = 0
        for step in self.schedule.messages:
            for i, message in enumerate(step, start=index):
                needed = {w for c in message.chunks for w in writes[message.source, c]}
                for write in needed:
                    self.frees[write].append(i)
                self.waits[i] = len(needed)
                pair = message.source, message.target
                if pair in last:
                    self.follows[last[pair]] = i
                    self.waits[i] += 1
                last[pair] = i
            for i, message in enumerate(step, start=index):
                for chunk in message.chunks:
                    writes[message.target, chunk].append(i)
            index += len(step)

    def run(self, record: bool) -> Simulation:
        links = self.cluster.links
        rate = np.array([link.bandwidth * link.share for link in links]) * self.protocol.share
        rate = np.append(rate, np.inf)  # slot -1: no link
        # a message keeps its ports `message` seconds longer, whatever its size
        left = self.size + self.protocol.message * rate[self.path].min(axis=1)
        start = self.by.launch + self.protocol.base
        begin, end = np.zeros(len(left)), np.zeros(len(left))
        adding: dict[int, float] = defaultdict(float)
        arrivals: list[tuple[float, int]] = []
        active = np.flatnonzero(self.waits == 0)
        speed = _rates(self.path[active], self.step[active], rate)
        now = 0.0
        while len(active) or arrivals:
            finish = now + _shortest(left[active], speed)
            soon = min(finish, arrivals[0][0] if arrivals else np.inf)
            if len(active):
                left[active] -= speed * (soon - now)
            now = soon
            out = active[left[active] <= 1e-9 * np.maximum(self.size[active], 1.0)]
            started: list[int] = []
            for i in out.tolist():
                heapq.heappush(arrivals, (self._arrival(i, now, adding), i))
                self._one_less(self.follows[i], started)
            while arrivals and arrivals[0][0] <= now * (1 + 1e-12):
                _, i = heapq.heappop(arrivals)
                end[i] = now
                for reader in self.frees[i]:
                    self._one_less(reader, started)
            if len(out) or started:
                begin[started] = now
                active = np.concatenate([np.setdiff1d(active, out), np.array(started, np.int64)])
                speed = _rates(self.path[active], self.step[active], rate)
        last = float(end.max()) if len(end) else 0.0
        loads = np.zeros(len(links) + 1)
        np.add.at(loads, self.path, self.size[:, None])
        events = self._events(start + begin, start + end) if record else ()
        return Simulation(Timeline(events, start + last), _named(self.cluster, loads[:-1]))

    def _one_less(self, i: int, started: list[int]) -> None:
        if i >= 0:
            self.waits[i] -= 1
            if self.waits[i] == 0:
                started.append(i)

    def _arrival(self, i: int, now: float, adding: dict[int, float]) -> float:
        """When a message whose last byte has left is there and, if it is added, added."""
        there = now + float(self.latency[i])
        message = self.messages[i]
        if message.op == "copy" or self.by.fused:
            return there
        adding[message.target] = max(adding[message.target], there) + self.by.add * float(
            self.size[i]
        )
        return adding[message.target]

    def _events(self, begin: Floats, end: Floats) -> tuple[Event, ...]:
        made = [
            Event(b, e, f"rank {m.source}", str(m))
            for m, b, e in zip(self.messages, begin.tolist(), end.tolist(), strict=True)
        ]
        return tuple(sorted(made, key=lambda event: (event.begin, event.end)))


def _shortest(left: Floats, speed: Floats) -> float:
    """Seconds until the next message is out; those that wait for room take for ever."""
    moving = speed > 0
    return float((left[moving] / speed[moving]).min()) if moving.any() else np.inf


def _rates(paths: Ints, steps: Ints, rate: Floats) -> Floats:
    """Rates of the messages under way: earlier steps take what they can, later ones what is left."""
    speed = np.zeros(len(paths))
    room = rate.copy()
    for step in np.unique(steps):
        mine = np.flatnonzero(steps == step)
        speed[mine] = _fair(paths[mine], room)
        np.subtract.at(room, paths[mine], speed[mine][:, None])
        room = np.where(room > 1e-9 * rate, room, 0.0)
    return speed


def _fair(paths: Ints, rate: Floats) -> Floats:
    """Max-min fair rates of flows on these paths: the most crowded link first, and so on."""
    speed = np.zeros(len(paths))
    room = rate.copy()
    open_ = np.arange(len(paths))
    while len(open_):
        count = np.bincount(paths[open_].ravel() % len(rate), minlength=len(rate))
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where((count > 0) & np.isfinite(room), room / count, np.inf)
        mine = share[paths[open_]].min(axis=1)
        tight = mine <= share.min() * (1 + 1e-9)
        speed[open_[tight]] = mine[tight]
        np.subtract.at(room, paths[open_[tight]], mine[tight][:, None])
        room = np.maximum(room, 0.0)
        open_ = open_[~tight]
    return speed
