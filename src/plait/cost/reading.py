"""Readings: every way to run a collective on a cluster, as seconds by size.

    readings("all_reduce", cluster)     ("native", ring by LL), ("native", tree by LL), ...,
                                        ("ring", ring[8] by p2p), ("ring", ring[8]/4 by p2p), ...

A reading has no size in it, so that it is made once and asked often: the lines of a schedule's
march (march.py) or of a library's own form (native.py), and the protocol whose constants turn
them into seconds. A schedule marches when it is first asked: `cheapest` leaves out most of those
in many pieces, whose marches are the long ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from math import inf

from plait.cluster import Cluster, Level, Protocol, Transport
from plait.cluster.transport import moved
from plait.collectives.algorithms import ALGORITHMS, supports, transfers
from plait.collectives.schedule import COLLECTIVES, Collective, Spec
from plait.cost.bound import bound
from plait.cost.flow import flow_of
from plait.cost.march import envelope_of
from plait.cost.native import form


@dataclass(frozen=True)
class Path:
    """What of a way to run a collective is known without a protocol's constants."""

    lines: tuple[tuple[float, float], ...] = ()  # of the march: latency, seconds a byte
    steps: int = 0
    sent: float = 0.0  # bytes sent by the busiest rank, per byte of the size


@dataclass(frozen=True, eq=False)
class Reading:
    """One way to run a collective: seconds as a function of the size."""

    collective: Collective
    n: int
    transport: str
    detail: str
    latency: float
    march: Callable[[], Path]
    protocol: Protocol
    floor: tuple[float, float]  # the bound: seconds, seconds a byte
    pieces: int = 1

    @cached_property
    def path(self) -> Path:
        return self.march()

    @property
    def start(self) -> float:
        """Seconds of the hops of a vector with no bytes."""
        return max((a for a, _ in self.path.lines), default=0.0)

    def moving(self, nbytes: float) -> float:
        """Seconds that its bytes add."""
        return max((a + b * nbytes for a, b in self.path.lines), default=0.0) - self.start

    def seconds(self, nbytes: float) -> float:
        if nbytes <= 0 or self.n == 1:
            return 0.0
        moving = float(moved(self.moving(nbytes), self.protocol, self.path.steps))
        return self.latency + self.start + moving

    def least(self, nbytes: float, rate: float) -> float:
        """Seconds below which no number of pieces comes, at `rate` bytes a second of a port."""
        moving = self.path.sent * nbytes / (rate * self.protocol.share) - self.protocol.window
        return self.latency + max(self.start, moving)

    def bound(self, nbytes: float) -> float:
        return 0.0 if nbytes <= 0 or self.n == 1 else max(self.floor[0], self.floor[1] * nbytes)


def cheapest(
    found: Sequence[tuple[str, Reading]], nbytes: float, rate: float, noise: float = 1.0
) -> tuple[str, Reading]:
    """The one with the fewest seconds, or a library's own form where that takes no more than `noise` times
    as many. `rate`: bytes a second of the fastest port.

    Pieces add hops and take no bytes away: what is too slow for its hops or for its bytes alone is so in any
    number of pieces, and where a few do not pay, more do not.
    """
    families: list[list[Reading]] = []
    latest: dict[tuple[str, str, Protocol], list[Reading]] = {}
    for name, one in found:
        key = (name, one.transport, one.protocol)
        if one.pieces == 1 or key not in latest:
            latest[key] = []
            families.append(latest[key])
        latest[key].append(one)
    seconds = {one: one.seconds(nbytes) for one, *_ in families}
    best = min(seconds.values())
    native = min((seconds[one] for name, one in found if name == "native"), default=inf)
    for one, *more in families:
        last = seconds[one]
        if more and one.least(nbytes, rate) < min(best, native / noise):
            for other in more:
                seconds[other] = other.seconds(nbytes)
                if seconds[other] >= last:
                    break
                last = seconds[other]
            best = min(best, last)
    ours = native <= noise * best
    asked = [pair for pair in found if pair[1] in seconds and (not ours or pair[0] == "native")]
    return min(asked, key=lambda pair: seconds[pair[1]])


@lru_cache(maxsize=4096)
def readings(
    collective: str,
    cluster: Cluster,
    algorithm: str | None = None,
    transport: str | None = None,
    root: int = 0,
) -> tuple[tuple[str, Reading], ...]:
    """Every way to run a collective over all ranks of a cluster, each with its algorithm's name."""
    assert collective in COLLECTIVES, collective
    found: list[tuple[str, Reading]] = []
    for by in cluster.transports:
        if transport not in (None, by.name) or not _reaches(by, cluster):
            continue
        measured = _measured(collective, cluster, by, root)
        if measured and algorithm is None:
            found += measured
            continue
        if algorithm in (None, "native"):
            own = [pair for pair in measured if pair[0] == "native"]
            found += own or [("native", reading) for reading in _natives(collective, cluster, by)]
        for name, spec in _specs(collective, cluster, by, algorithm, root):
            own = [pair for pair in measured if pair[1].detail == str(spec)]
            found += own or [(name, _stepwise(spec, cluster, by, p)) for p in by.protocols]
    return tuple(found)


def native_spelling(collective: str, n: int) -> str:
    """The key of a library's own collective in Transport.measured."""
    return f"native[{n}]" if collective == "all_reduce" else f"{collective} native[{n}]"


def _measured(
    collective: Collective, cluster: Cluster, by: Transport, root: int
) -> list[tuple[str, Reading]]:
    """What was measured by itself on so many ranks: lines at line rate, its own constants."""
    found: list[tuple[str, Reading]] = []
    if cluster.size == 1:
        return found
    bare = replace(by, protocols=(BARE,), internal=tuple((f, BARE) for f, _ in by.internal[:1]))
    for spelling, protocols in by.measured:
        spec = Spec.parse(spelling)
        if (spec.collective, spec.n, spec.root) != (collective, cluster.size, root):
            continue
        if spec.algorithm == "native":
            alone = next(_natives(collective, cluster, bare))
        else:
            alone = _stepwise(spec, cluster, replace(bare, fused=True), BARE)
        for p in protocols:
            by_p = replace(
                alone, latency=by.launch + p.base, march=partial(_shared, alone, p.share), protocol=p
            )
            found.append((spec.algorithm, replace(by_p, detail=spelling)))
    return found


def _natives(collective: Collective, cluster: Cluster, by: Transport) -> Iterator[Reading]:
    limit = bound(collective, cluster)
    if cluster.size == 1 and by.internal:
        yield Reading(
            collective, 1, by.name, "nothing", 0.0, Path, by.internal[0][1], (0.0, 0.0)
        )
    for name, protocol in by.internal:
        made = form(name, collective, cluster)
        if made is None or (protocol.flags and not _ordered(cluster.hardware)):
            continue
        far = any(count and lv.network for count, lv in zip(made.hops, cluster.levels, strict=True))
        if far and protocol.far_share is not None:
            protocol = replace(protocol, share=protocol.far_share)
        hop = (protocol.plateau if far else 1.0) * sum(
            count * (_hops(protocol, level) + protocol.step + at_once * protocol.message)
            for count, at_once, level in zip(
                made.hops, _at_once(cluster.hardware), cluster.levels, strict=True
            )
        )
        lines = (
            (hop, made.load / protocol.share),
            (hop, made.adding / (protocol.share * protocol.adding)),
        )
        yield Reading(
            collective,
            cluster.size,
            by.name,
            f"{name}/{protocol.name}",
            by.launch + protocol.base,
            partial(Path, lines, made.steps, made.sent),
            protocol,
            (limit.latency, limit.network if made.network else limit.slope),
        )


def _hops(protocol: Protocol, level: Level) -> float:
    """Seconds of one hop of a level."""
    if level.network and protocol.far_hops is not None:
        return level.latency * protocol.far_hops
    return level.latency * protocol.hops


@lru_cache(maxsize=1024)
def _at_once(hardware: Cluster) -> tuple[int, ...]:
    """Messages that the busiest link of each level carries in a step in which all ranks send one:
    all of them where there is a bus, one out and one in where a port's ways share it."""
    return tuple(
        len(hardware.units(i)) if level.total is not None else 1 if level.duplex else 2
        for i, level in enumerate(hardware.levels)
    )


@lru_cache(maxsize=1024)
def _ordered(hardware: Cluster) -> bool:
    """Do all levels that the ranks cross deliver bytes in the order sent?"""
    counts = [len(hardware.units(level)) for level in range(len(hardware.levels) + 1)]
    return all(
        level.ordered or below == above
        for level, below, above in zip(hardware.levels, counts, counts[1:], strict=False)
    )


def _stepwise(spec: Spec, cluster: Cluster, by: Transport, protocol: Protocol) -> Reading:
    limit = bound(spec.collective, cluster)
    return Reading(
        spec.collective,
        spec.n,
        by.name,
        str(spec),
        by.launch + protocol.base,
        partial(_marched, spec, cluster, by, protocol),
        protocol,
        (limit.latency, limit.slope),
        spec.pieces,
    )


def _marched(spec: Spec, cluster: Cluster, by: Transport, protocol: Protocol) -> Path:
    shape = flow_of(spec)
    lines = envelope_of(spec, cluster, by, protocol).lines if cluster.size > 1 else ()
    return Path(lines, sum(1 for _ in shape.stages()), shape.sent())


def _shared(alone: Reading, share: float) -> Path:
    """At a part of the line rate."""
    return replace(alone.path, lines=tuple((a, b / share) for a, b in alone.path.lines))


def _specs(
    collective: Collective, cluster: Cluster, by: Transport, algorithm: str | None, root: int
) -> Iterator[tuple[str, Spec]]:
    """The schedules to try: every algorithm of the transport, in a few numbers of pieces."""
    if algorithm is not None and "[" in algorithm:
        spec = Spec.parse(algorithm)
        if not algorithm.strip().startswith(spec.collective):  # the collective left out
            spec = replace(spec, collective=collective, root=spec.root or root)
        if (spec.collective, spec.n) == (
            collective,
            cluster.size,
        ) and spec.algorithm in by.algorithms:
            yield spec.algorithm, spec
        return
    wanted, _, count = (algorithm or "").partition("/")
    at = root if collective in ("broadcast", "reduce") else 0
    for name in by.algorithms:
        if wanted not in ("", name):
            continue
        if name == "hierarchical":
            yield from ((name, spec) for spec in _hierarchies(collective, cluster, at))
        elif supports(name, collective):
            several = _PIECES if name in _PIPELINED and cluster.size > 2 else (1,)
            for pieces in (int(count),) if count else several:
                spec = Spec(name, (cluster.size,), collective, (), pieces, at)
                if wanted or transfers(spec) <= _TRIED:
                    yield name, spec


def _hierarchies(collective: Collective, cluster: Cluster, root: int) -> Iterator[Spec]:
    """Two levels, hosts and devices, if the ranks lie in equal runs, host by host."""
    hosts = cluster.nodes
    g = len(hosts[0])
    if (
        len(hosts) < 2
        or g < 2
        or cluster.size**2 > _TRIED
        or hosts != tuple(tuple(range(i * g, i * g + g)) for i in range(len(hosts)))
    ):
        return
    for outer, inner in _PAIRS:
        if supports(outer, collective) and supports(inner, collective):
            yield Spec("hierarchical", (len(hosts), g), collective, (outer, inner), 1, root)


def _reaches(by: Transport, cluster: Cluster) -> bool:
    return by.reach is None or all(
        len(cluster.units(i)) == 1 for i in range(by.reach + 1, len(cluster.levels))
    )


# --- tables --------------------------------------------------------------------------------------

BARE = Protocol("bare")  # hops and line rate, nothing else
_PIECES = (1, 4, 16)
_TRIED = 1 << 16  # transfers of a schedule that nobody asked for by name: 256 ranks in one piece
_PIPELINED = frozenset(
    name for name, a in ALGORITHMS.items() if a.style == "root" or name == "ring"
) - {"parameter_server"}
_PAIRS = (("ring", "two_shot"), ("tree", "two_shot"), ("two_shot", "two_shot"), ("ring", "ring"))
