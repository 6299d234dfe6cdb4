"""What `plait collectives` prints: steps drawn, prices of a described cluster, measured times."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from plait.cluster import Cluster
from plait.cluster.units import spell_seconds, spell_size
from plait.collectives.algorithms import build
from plait.collectives.explain import draw, explain
from plait.collectives.ledger import least
from plait.collectives.measure import Measured
from plait.collectives.schedule import COLLECTIVES, Collective
from plait.cost.bound import bound
from plait.cost.comm import choose, price
from plait.errors import ClusterError, CollectiveError
from plait.report.tables import plain


def known(collective: str) -> Collective:
    """CollectiveError unless it is one."""
    if collective not in COLLECTIVES:
        raise CollectiveError(f"{collective!r} is none of {', '.join(COLLECTIVES)}")
    return collective  # type: ignore[return-value]


def part(name: str, ranks: int | None) -> Cluster:
    """The first `ranks` devices of a preset, or all."""
    machine = Cluster.of(name)
    if ranks is not None and ranks > machine.size:
        raise ClusterError(f"--ranks {ranks}: {name} has {machine.size}; {name}[{ranks}] may do")
    return machine if ranks is None else machine.subset(range(ranks))


def drawn(algorithm: str, collective: Collective, ranks: int | None) -> str:
    """The steps of `ring` on so many ranks, or of a spelling that has them: `tree[6]/2`."""
    name, slash, pieces = algorithm.partition("/")
    spelling = algorithm if "[" in algorithm else f"{name}[{ranks or 4}]{slash}{pieces}"
    schedule = build(spelling if " " in spelling else f"{collective} {spelling}")
    if ranks not in (None, schedule.n):
        raise CollectiveError(f"--ranks {ranks}: {algorithm} is one of {schedule.n} ranks")
    return f"{draw(schedule)}\n\n{explain(schedule)}"


def priced(collective: str, size: int, cluster: Cluster) -> Table:
    """Every algorithm that the cluster can run, cheapest first, beside the bound."""
    title = f"{collective} of {spell_size(size)} on {cluster.label}"
    table = plain(title, "algorithm", "as", "time", "of the bound", "sent by a rank")
    for row in choose(collective, size, range(cluster.size), cluster).prices:
        table.add_row(
            row.algorithm,
            f"{row.detail} by {row.transport}",
            spell_seconds(row.seconds),
            f"{row.percent:.0f}%",
            spell_size(row.bytes_per_rank),
        )
    return table


def measured(found: Sequence[Measured], cluster: Cluster) -> Table:
    """Fastest first: time, bandwidths, bytes beside ledger and bound, prediction and its error."""
    first = found[0]
    title = f"{first.collective} of {spell_size(first.size)} on {first.ranks} processes"
    table = plain(
        *(title, "algorithm", "time", "algbw", "busbw", "bytes a rank", "ledger", "bound"),
        *("predicted", "error"),
    )
    for row in sorted(found, key=lambda m: m.seconds):
        guess = _predicted(row, cluster)
        table.add_row(
            str(row.schedule or row.algorithm),
            spell_seconds(row.seconds),
            f"{row.algorithm_bandwidth / 1e9:.3g} GB/s",
            f"{row.bus_bandwidth / 1e9:.3g} GB/s",
            _each(row.wire, row.ranks),
            _each(row.counted, row.ranks),
            spell_size(_least(row)),
            "" if guess is None else spell_seconds(guess),
            "" if guess is None else f"{guess / row.seconds - 1:+.0%}",
        )
    return table


def _least(row: Measured) -> float:
    """What a rank must send, over all ranks on average, whatever the algorithm."""
    return least(row.collective, row.ranks).total * row.size / row.ranks


def _each(total: int | None, ranks: int) -> str:
    return "" if total is None else spell_size(total / ranks)


def _predicted(row: Measured, cluster: Cluster) -> float | None:
    if not row.size:  # a call with nothing in it: its Python is not in the prices
        return None
    try:
        return price(
            row.collective, row.size, range(row.ranks), cluster, algorithm=row.algorithm
        ).seconds
    except CollectiveError:
        return None


def notes(found: Sequence[Measured], cluster: Cluster, private: bool) -> list[str]:
    """The bound, and what to know of the figures; `private`: nobody else used the loopback."""
    first = found[0]
    limit = bound(first.collective, cluster)(first.size)
    said = [f"no algorithm can take less than {spell_seconds(limit)} on {cluster.name}"]
    if not cluster.source.startswith("measured"):
        said.append("predicted from a preset: `plait calibrate` measures this machine")
    if not private:
        said.append("bytes are of the whole loopback, other programs' included")
    return said
