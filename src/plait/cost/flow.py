"""A schedule as arrays, step by step: what the price's march and the simulator read.

    flow(build("ring[8]/4"))        of any schedule
    wide("ring", (4096,))           the same steps for thousands of ranks, made on the fly: a ring
                                    of 4096 has 33 million transfers, which no list would hold

`wide` knows the all-reduces that are used at such sizes; tests compare it with `build` where both
exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from plait.collectives.algorithms import moves_of
from plait.collectives.moves import Move
from plait.collectives.schedule import Collective, Message, Schedule, Spec
from plait.errors import ScheduleError

Ints = NDArray[np.int64]
Moves = Sequence[Move] | Sequence[Message]


@dataclass(frozen=True, eq=False)
class Route:
    """Which rank sends to which, message by message; steps that do the same share one."""

    source: Ints
    target: Ints


@dataclass(frozen=True, eq=False)
class Stage:
    """One step: its messages, whether each is added, and their chunks in the same order.

    `of` tells the message of each transfer; None: every message is one chunk.
    """

    route: Route
    adds: NDArray[np.bool_]
    chunk: Ints
    of: Ints | None = None


@dataclass(frozen=True, eq=False)
class Flow:
    """`whole`: vectors in all chunks together; n for all_to_all, whose size is a rank's part.

    `held`: rank * chunks + chunk of every place that a message reads or writes, in order; None: of
    nearly all (in an all_to_all of 128 ranks it is one of a hundred).
    """

    name: str
    n: int
    chunks: int
    whole: float
    stages: Callable[[], Iterator[Stage]]
    held: Ints | None = None

    def sent(self) -> float:
        """Bytes that the busiest rank sends, per byte of the size."""
        return float(self._bytes(lambda route: route.source).max())

    def handled(self) -> float:
        """Bytes that the busiest rank sends and receives together, per byte of the size."""
        there = self._bytes(lambda route: route.target)
        return float((self._bytes(lambda route: route.source) + there).max())

    def total(self) -> float:
        """Bytes that all ranks send, per byte of the size."""
        return float(self._bytes(lambda route: route.source).sum())

    def _bytes(self, end: Callable[[Route], Ints]) -> NDArray[np.float64]:
        """[rank]: of the messages that have it at this end, per byte of the size."""
        counts = np.zeros(self.n, np.int64)
        for stage in self.stages():
            ranks = end(stage.route)
            counts += np.bincount(ranks if stage.of is None else ranks[stage.of], minlength=self.n)
        return np.asarray(counts * (self.whole / self.chunks), np.float64)


@lru_cache(maxsize=1024)
def flow_of(spec: Spec) -> Flow:
    """`flow` of the schedule that a spec names, remembered; its transfers are not."""
    chunks, steps = moves_of(spec)
    return _flow(str(spec), spec.collective, spec.n, chunks, steps)


def flow(schedule: Schedule) -> Flow:
    n, chunks = schedule.n, max(schedule.chunks, 1)
    return _flow(schedule.spelling, schedule.collective, n, chunks, schedule.messages)


def _flow(
    name: str,
    collective: Collective,
    n: int,
    chunks: int,
    steps: Iterable[Moves],
) -> Flow:
    routes: dict[bytes, Route] = {}
    made = tuple(_stage(step, n, chunks, routes) for step in steps if step)
    places = [ends * chunks + s.chunk for s in made for ends in _ends(s)]
    held = np.unique(np.concatenate(places)) if places else np.zeros(0, np.int64)
    whole = float(n if collective == "all_to_all" else 1)
    return Flow(name, n, chunks, whole, lambda: iter(made), held)


def _stage(step: Moves, n: int, chunks: int, routes: dict[bytes, Route]) -> Stage:
    """Transfers by source, target and op; those that have all three in common are one message."""
    counts = [len(m.chunks) for m in step]
    source = np.repeat([m.source for m in step], counts)
    target = np.repeat([m.target for m in step], counts)
    adds = np.repeat([m.op == "add" for m in step], counts)
    chunk = np.array([c for m in step for c in m.chunks], np.int64)
    key = (source * n + target) * 2 + ~adds  # "add" comes before "copy"
    order = np.argsort(key * chunks + chunk, kind="stable")
    key = key[order]
    of = np.cumsum(np.diff(key, prepend=key[0]) != 0)
    first = order[np.flatnonzero(np.diff(of, prepend=-1))]
    ends = np.stack([source[first], target[first]])
    return Stage(
        routes.setdefault(ends.tobytes(), Route(ends[0], ends[1])),
        adds[first],
        chunk[order],
        of if len(first) < len(order) else None,
    )


def _ends(stage: Stage) -> tuple[Ints, Ints]:
    """Source and target of each transfer."""
    source, target = stage.route.source, stage.route.target
    return (source, target) if stage.of is None else (source[stage.of], target[stage.of])


def wide(algorithm: str, levels: tuple[int, ...]) -> Flow:
    """All-reduce on levels[0] (or levels[0] hosts of levels[1]) ranks."""
    if algorithm not in _WIDE or len(levels) != (2 if algorithm == "hierarchical" else 1):
        raise ScheduleError(
            f"{algorithm}{list(levels)} has no wide form; there are ring, tree, parameter_server "
            "on (n,) ranks and hierarchical, ring in ring, on (hosts, devices)"
        )
    return _WIDE[algorithm](*levels)


# --- wide forms ----------------------------------------------------------------------------------


def _single(route: Route, chunk: Ints | int, adds: bool) -> Stage:
    """One chunk a message."""
    shape = route.source.shape
    return Stage(route, np.full(shape, adds), np.broadcast_to(chunk, shape))


def _ring(n: int) -> Flow:
    """Turn t of the reduce-scatter: rank r passes chunk r - t - 1; of the gather: r - t."""
    ranks = np.arange(n)
    route = Route(ranks, (ranks + 1) % n)

    def stages() -> Iterator[Stage]:
        for adds, lag in ((True, 1), (False, 0)):
            for turn in range(n - 1):
                yield _single(route, (ranks - turn - lag) % n, adds)

    return Flow(f"ring[{n}]", n, n, 1.0, stages)


def _server(n: int) -> Flow:
    others, master = np.arange(1, n), np.zeros(n - 1, np.int64)

    def stages() -> Iterator[Stage]:
        yield _single(Route(others, master), 0, True)
        yield _single(Route(master, others), 0, False)

    return Flow(f"parameter_server[{n}]", n, 1, 1.0, stages)


def _tree(n: int) -> Flow:
    """A complete binary tree: the parent of r is (r - 1) // 2; deepest level first, and back."""
    depth = np.floor(np.log2(np.arange(n) + 1)).astype(np.int64)
    levels = [np.flatnonzero(depth == level) for level in range(1, int(depth.max()) + 1)]

    def stages() -> Iterator[Stage]:
        for child in reversed(levels):
            yield _single(Route(child, (child - 1) // 2), 0, True)
        for child in levels:
            yield _single(Route((child - 1) // 2, child), 0, False)

    return Flow(f"tree[{n}]", n, 1, 1.0, stages)


def _hierarchical(hosts: int, devices: int) -> Flow:
    """Reduce-scatter rings in hosts, all-reduce rings across them by device, gather rings."""
    ranks = np.arange(hosts * devices)
    host, device = np.divmod(ranks, devices)
    near = Route(ranks, host * devices + (device + 1) % devices)
    far = Route(ranks, (host + 1) % hosts * devices + device)

    def within(adds: bool, lag: int) -> Iterator[Stage]:
        for turn in range(devices - 1):
            part = (device - turn - lag) % devices  # of `hosts` chunks each
            chunk = part[:, None] * hosts + np.arange(hosts)
            of = np.repeat(ranks, hosts) if hosts > 1 else None
            yield Stage(near, np.full(len(ranks), adds), chunk.reshape(-1), of)

    def stages() -> Iterator[Stage]:
        yield from within(True, 1)
        for adds, lag in ((True, 1), (False, 0)):
            for turn in range(hosts - 1):
                yield _single(far, device * hosts + (host - turn - lag) % hosts, adds)
        yield from within(False, 0)

    name = f"hierarchical[{hosts}x{devices}: ring, ring]"
    return Flow(name, hosts * devices, hosts * devices, 1.0, stages)


_WIDE: dict[str, Callable[..., Flow]] = {
    "ring": _ring,
    "parameter_server": _server,
    "tree": _tree,
    "hierarchical": _hierarchical,
}
