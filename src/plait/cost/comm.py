"""The price of a collective: seconds on a described cluster, its bound beside it, and the choice of algorithm.

    price("all_reduce", 64 * 2**20, range(8), Cluster.preset("dgx-h100"))
        all_reduce 64MiB on 8 ranks: native (ring/Simple) 440.8us, bound 260.9us (59%)

A price reads a schedule (march.py) or a library's own form of a collective (native.py) with the numbers of a
transport (cluster/transport.py), and takes the cheapest of what the transport can run. It is monotone in the size,
zero for one rank or no bytes, and never below its bound (bound.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from plait.cluster import Cluster, Protocol, Transport
from plait.cluster.transport import moved
from plait.cluster.units import spell_seconds, spell_size
from plait.collectives.algorithms import ALGORITHMS, supports
from plait.collectives.schedule import COLLECTIVES, Collective, Spec
from plait.cost.bound import bound
from plait.cost.flow import flow_of
from plait.cost.march import envelope_of
from plait.cost.native import form
from plait.errors import CollectiveError

@dataclass(frozen=True)
class Price:
    """What a collective costs: `seconds` by `algorithm` as `detail` runs it, and what nothing beats."""

    seconds: float
    algorithm: str  # "ring", "native", ...: what the run-time is asked for
    bytes_per_rank: float  # sent by the rank that sends most
    bound_seconds: float
    collective: str = "all_reduce"
    nbytes: float = 0.0
    ranks: int = 1
    transport: str = ""
    detail: str = ""  # "ring[8]/4 by p2p", "ring/LL"

    @property
    def percent(self) -> float:
        """How much of the physical limit is reached."""
        return 100.0 if self.seconds == 0 else 100 * self.bound_seconds / self.seconds

    def __str__(self) -> str:
        return (
            f"{self.collective} {spell_size(self.nbytes)} on {self.ranks} ranks: {self.algorithm} "
            f"({self.transport} {self.detail}) {spell_seconds(self.seconds)}, "
            f"bound {spell_seconds(self.bound_seconds)} ({self.percent:.0f}%)"
        )


@dataclass(frozen=True)
class Choice:
    """All candidates, cheapest first."""

    prices: tuple[Price, ...]

    @property
    def winner(self) -> Price:
        return self.prices[0]

    @property
    def runner_up(self) -> Price | None:
        return self.prices[1] if len(self.prices) > 1 else None

    @property
    def algorithm(self) -> str:
        return self.winner.algorithm

    def __str__(self) -> str:
        return "\n".join(map(str, self.prices))


def price(
    collective: str,
    nbytes: float,
    ranks: Sequence[int],
    cluster: Cluster,
    algorithm: str | None = None,
    *,
    transport: str | None = None,
    root: int = 0,
) -> Price:
    """The price of one collective of `nbytes` (the whole vector; for all_to_all one rank's send buffer).

    `ranks` are ranks of the cluster, in the order of the group. `algorithm` is a name, a schedule's spelling
    (`ring[8]/4`), or None for the cheapest. Of a name, the cheapest number of pieces is taken.
    """
    return choose(
        collective, nbytes, ranks, cluster, algorithm=algorithm, transport=transport, root=root
    ).winner


def choose(
    collective: str,
    nbytes: float,
    ranks: Sequence[int],
    cluster: Cluster,
    *,
    deterministic: bool = False,
    algorithm: str | None = None,
    transport: str | None = None,
    root: int = 0,
) -> Choice:
    """Every algorithm that a transport of the cluster can run on these ranks, cheapest first.

    `deterministic` leaves out what chooses its order of addition by size or timing by itself: `native`.
    """
    _check(collective, nbytes, ranks, cluster)
    part = _part(cluster, tuple(ranks))
    best: dict[str, Price] = {}
    for name, found in readings(collective, part, algorithm, transport, root):
        if deterministic and name == "native":
            continue
        seconds = found.seconds(nbytes)
        if name not in best or seconds < best[name].seconds:
            best[name] = found.price(name, nbytes, seconds)
    if not best:
        raise CollectiveError(
            f"{cluster.name} runs no {algorithm or 'algorithm'} for {collective} on {len(ranks)} ranks"
            f"{f' by {transport}' if transport else ''}; it runs "
            + ", ".join(dict.fromkeys(n for n, _ in readings(collective, part, None, None, root)))
        )
    return Choice(tuple(sorted(best.values(), key=lambda p: (p.seconds, p.algorithm != "native"))))


# --- readings: everything a size is priced by -------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """One way to run a collective: seconds as a function of the size."""

    collective: Collective
    n: int
    transport: str
    detail: str
    latency: float
    lines: tuple[tuple[float, float], ...]  # of the march: latency, seconds a byte
    protocol: Protocol
    steps: int
    sent: float  # bytes sent by the busiest rank, per byte of the size
    floor: tuple[float, float]  # the bound: seconds, seconds a byte

    @property
    def start(self) -> float:
        """Seconds of the hops of a vector with no bytes."""
        return max((a for a, _ in self.lines), default=0.0)

    def moving(self, nbytes: float) -> float:
        """Seconds that its bytes add."""
        return max((a + b * nbytes for a, b in self.lines), default=0.0) - self.start

    def seconds(self, nbytes: float) -> float:
        if nbytes <= 0 or self.n == 1:
            return 0.0
        return self.latency + self.start + float(moved(self.moving(nbytes), self.protocol, self.steps))

    def bound(self, nbytes: float) -> float:
        return 0.0 if nbytes <= 0 or self.n == 1 else max(self.floor[0], self.floor[1] * nbytes)

    def price(self, algorithm: str, nbytes: float, seconds: float) -> Price:
        return Price(
            seconds=seconds,
            algorithm=algorithm,
            bytes_per_rank=self.sent * nbytes,
            bound_seconds=self.bound(nbytes),
            collective=self.collective,
            nbytes=nbytes,
            ranks=self.n,
            transport=self.transport,
            detail=self.detail,
        )


@lru_cache(maxsize=1024)
def _part(cluster: Cluster, ranks: tuple[int, ...]) -> Cluster:
    return cluster.subset(ranks)


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
        if algorithm in (None, "native"):
            found += [("native", reading) for reading in _natives(collective, cluster, by)]
        for name, spec in _specs(collective, cluster, by, algorithm, root):
            found += [(name, _stepwise(spec, cluster, by, p)) for p in by.protocols]
    return tuple(found)


def _natives(collective: Collective, cluster: Cluster, by: Transport) -> Iterator[Reading]:
    limit = bound(collective, cluster)
    if cluster.size == 1 and by.internal:
        yield Reading(collective, 1, by.name, "nothing", 0.0, (), by.internal[0][1], 0, 0.0, (0.0, 0.0))
    for name, protocol in by.internal:
        made = form(name, collective, cluster)
        if made is None or (protocol.flags and not _ordered(cluster)):
            continue
        hop = sum(
            count * (protocol.hops * level.latency + protocol.step + protocol.message)
            for count, level in zip(made.hops, cluster.levels, strict=True)
        )
        yield Reading(
            collective,
            cluster.size,
            by.name,
            f"{name}/{protocol.name}",
            by.launch + protocol.base,
            (
                (hop, made.load / protocol.share),
                (hop, made.adding / (protocol.share * protocol.adding)),
            ),
            protocol,
            made.steps,
            made.sent,
            (limit.latency, limit.network if made.network else limit.slope),
        )


def _ordered(cluster: Cluster) -> bool:
    """Do all levels that the ranks cross deliver bytes in the order sent?"""
    counts = [len(cluster.units(level)) for level in range(len(cluster.levels) + 1)]
    return all(
        level.ordered or below == above
        for level, below, above in zip(cluster.levels, counts, counts[1:], strict=False)
    )


def _stepwise(spec: Spec, cluster: Cluster, by: Transport, protocol: Protocol) -> Reading:
    shape = flow_of(spec)
    limit = bound(spec.collective, cluster, spec.root)
    return Reading(
        spec.collective,
        spec.n,
        by.name,
        str(spec),
        by.launch + protocol.base,
        envelope_of(spec, cluster, by, protocol).lines if cluster.size > 1 else (),
        protocol,
        sum(1 for _ in shape.stages()),
        shape.sent(),
        (limit.latency, limit.slope),
    )


def _specs(
    collective: Collective, cluster: Cluster, by: Transport, algorithm: str | None, root: int
) -> Iterator[tuple[str, Spec]]:
    """The schedules to try: every algorithm of the transport, in a few numbers of pieces."""
    if algorithm is not None and "[" in algorithm:
        spec = Spec.parse(algorithm)
        if spec.algorithm in by.algorithms and spec.n == cluster.size:
            yield spec.algorithm, spec
        return
    at = root if collective in ("broadcast", "reduce") else 0
    for name in by.algorithms:
        if algorithm not in (None, name):
            continue
        if name == "hierarchical":
            yield from ((name, spec) for spec in _hierarchies(collective, cluster, at))
        elif supports(name, collective):
            for pieces in _PIECES if name in _PIPELINED and cluster.size > 2 else (1,):
                yield name, Spec(name, (cluster.size,), collective, (), pieces, at)


def _hierarchies(collective: Collective, cluster: Cluster, root: int) -> Iterator[Spec]:
    """Two levels, hosts and devices, if the ranks lie in equal runs, host by host."""
    hosts = cluster.nodes
    g = len(hosts[0])
    if len(hosts) < 2 or g < 2 or hosts != tuple(tuple(range(i * g, i * g + g)) for i in range(len(hosts))):
        return
    for outer, inner in _PAIRS:
        if supports(outer, collective) and supports(inner, collective):
            yield Spec("hierarchical", (len(hosts), g), collective, (outer, inner), 1, root)


def _reaches(by: Transport, cluster: Cluster) -> bool:
    return by.reach is None or all(len(cluster.units(i)) == 1 for i in range(by.reach + 1, len(cluster.levels)))


def _check(collective: str, nbytes: float, ranks: Sequence[int], cluster: Cluster) -> None:
    wrong = []
    if collective not in COLLECTIVES:
        wrong.append(f"{collective!r}, which is none of {', '.join(COLLECTIVES)}")
    if nbytes < 0:
        wrong.append(f"{nbytes} bytes")
    if not len(ranks):
        wrong.append("no ranks")
    if twice := sorted({r for r in ranks if list(ranks).count(r) > 1}):
        wrong.append(f"ranks {twice} listed twice")
    if outside := sorted(r for r in set(ranks) if not 0 <= r < cluster.size):
        wrong.append(f"ranks {outside}, which are not among 0 to {cluster.size - 1} of {cluster}")
    if wrong:
        raise CollectiveError("a collective cannot be priced for " + "; ".join(wrong))


# --- tables ---------------------------------------------------------------------------------------------------

_PIECES = (1, 4, 16)
_PIPELINED = frozenset(name for name, a in ALGORITHMS.items() if a.style == "root" or name == "ring") - {
    "parameter_server"
}
_PAIRS = (("ring", "two_shot"), ("tree", "two_shot"), ("two_shot", "two_shot"), ("ring", "ring"))
