"""The price of a collective on a described cluster, its bound beside it, and the choice among all.

    price("all_reduce", 64 * 2**20, range(8), Cluster.preset("dgx-h100"))
        all_reduce 64MiB on 8 ranks: native (ring/Simple) 440.8us, bound 260.9us (59%)

A price reads a schedule (march.py) or a library's own form of a collective (native.py) with the
numbers of a transport (cluster/transport.py), and takes the cheapest of what the transport can
run. It is monotone in the size, zero for one rank or no bytes, and never below its bound
(bound.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from plait.cluster import Cluster
from plait.cluster.units import spell_seconds, spell_size
from plait.collectives.schedule import COLLECTIVES
from plait.cost.reading import Reading, cheapest, readings
from plait.errors import CollectiveError


@dataclass(frozen=True)
class Price:
    """What a collective costs: `seconds` by `algorithm`, as `detail` has it; and the bound."""

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
    cluster: Cluster | str,
    algorithm: str | None = None,
    *,
    transport: str | None = None,
    root: int = 0,
    deterministic: bool = False,
    noise: float = 1.0,
) -> Price:
    """The price of one collective of `nbytes`: the whole vector, or of all_to_all one rank's part.

    `ranks` are ranks of the cluster (one, or the name of a preset), in the order of the group. `algorithm` is a name, a
    schedule's spelling (`ring[8]/4`), or None for the cheapest. Of a name, the cheapest number of
    pieces is taken. `deterministic` as in `choose`; what is within `noise` times the cheapest gives way to a
    library's own form.
    """
    part, found = _found(collective, nbytes, ranks, cluster, deterministic, algorithm, transport, root)
    name, reading = cheapest(found, nbytes, _rate(part), noise)
    return _price(name, reading, nbytes, reading.seconds(nbytes))


def choose(
    collective: str,
    nbytes: float,
    ranks: Sequence[int],
    cluster: Cluster | str,
    *,
    deterministic: bool = False,
    algorithm: str | None = None,
    transport: str | None = None,
    root: int = 0,
) -> Choice:
    """Every algorithm that a transport of the cluster can run on these ranks, cheapest first.

    `deterministic` leaves out what chooses its order of addition by size or timing by itself:
    `native`.
    """
    _, found = _found(collective, nbytes, ranks, cluster, deterministic, algorithm, transport, root)
    best: dict[str, Price] = {}
    for name, reading in found:
        seconds = reading.seconds(nbytes)
        if name not in best or seconds < best[name].seconds:
            best[name] = _price(name, reading, nbytes, seconds)
    return Choice(tuple(sorted(best.values(), key=lambda p: (p.seconds, p.algorithm != "native"))))


def _found(
    collective: str,
    nbytes: float,
    ranks: Sequence[int],
    cluster: Cluster | str,
    deterministic: bool,
    algorithm: str | None,
    transport: str | None,
    root: int,
) -> tuple[Cluster, Sequence[tuple[str, Reading]]]:
    """The part of the cluster that the ranks are, and what it can run."""
    cluster = Cluster.of(cluster)
    _check(collective, nbytes, ranks, cluster)
    part = _part(cluster, tuple(ranks))
    found = readings(collective, part, algorithm, transport, root)
    if deterministic:
        found = tuple(pair for pair in found if pair[0] != "native")
    if not found:
        raise CollectiveError(
            f"{cluster.name} runs no {f'{algorithm!r}' if algorithm else 'algorithm'} for {collective} "
            f"on {len(ranks)} ranks"
            f"{f' by {transport}' if transport else ''}; it runs "
            + ", ".join(dict.fromkeys(n for n, _ in readings(collective, part, None, None, root)))
        )
    return part, found


def _price(algorithm: str, found: Reading, nbytes: float, seconds: float) -> Price:
    return Price(
        seconds=seconds,
        algorithm=algorithm,
        bytes_per_rank=found.path.sent * nbytes,
        bound_seconds=found.bound(nbytes),
        collective=found.collective,
        nbytes=nbytes,
        ranks=found.n,
        transport=found.transport,
        detail=found.detail,
    )


@lru_cache(maxsize=1024)
def _rate(part: Cluster) -> float:
    """Bytes a second of the fastest port."""
    return max((link.bandwidth * link.share for link in part.links), default=1.0)


@lru_cache(maxsize=1024)
def _part(cluster: Cluster, ranks: tuple[int, ...]) -> Cluster:
    return cluster.subset(ranks)


def _check(collective: str, nbytes: float, ranks: Sequence[int], cluster: Cluster) -> None:
    wrong = []
    if collective not in COLLECTIVES:
        wrong.append(f"{collective!r}, which is none of {', '.join(COLLECTIVES)}")
    if nbytes < 0:
        wrong.append(f"{nbytes} bytes")
    if not len(ranks):
        wrong.append("no ranks")
    if twice := sorted(r for r, count in Counter(ranks).items() if count > 1):
        wrong.append(f"ranks {twice} listed twice")
    if outside := sorted(r for r in set(ranks) if not 0 <= r < cluster.size):
        wrong.append(f"ranks {outside}, which are not among 0 to {cluster.size - 1} of {cluster.label}")
    if wrong:
        raise CollectiveError("a collective cannot be priced for " + "; ".join(wrong))
