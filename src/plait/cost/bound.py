"""What no algorithm can beat: lower bounds from the cuts of the topology, at line rate.

Let K be a unit of a level (a device, a host), m of the N ranks in it, out(K) and in(K) the line
rates of all ports by which its ranks' bytes can leave and enter it, and k the number of units
that hold ranks.

    all_gather       what the others own must enter K          (N - m)/N S / in(K)
    reduce_scatter   the same backwards                        (N - m)/N S / out(K)
    all_to_all       m ranks send (N - m)/N S each out of K    m (N - m)/N S / out(K)
    broadcast        S enters every K without the root; reduce: S leaves it
    all_reduce       K's sum must leave, the others' enter     S / out(K), S / in(K);
                     and without addition in the network       2 (k - 1) S / (sum of out(K))

The last: the reduction to one value and its copy back each cross the partition k - 1 times at
least for every element. With k = N on a flat switch it is the well known 2(N-1)/N S/B (Patarasuk
and Yuan 2009), with hosts as units the bound of the network. A switch that adds and copies lifts
it at its own level, and one crossing is enough: S/B. Where a port's two ways share its rate, every
byte that crosses passes two ports: twice the bytes of the collective that cross, over all of
out(K). Time to the first byte: one latency of the
outermost level crossed, and where a rank has a single port that takes one message after another
the count of steps would be ceil(log2 N); it is left out, since NVSwitch reaches all peers at
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from plait.cluster import Cluster
from plait.collectives.schedule import Collective


@dataclass(frozen=True)
class Bound:
    """Least seconds: max(latency, slope * size). `network` is the slope where switches may add."""

    latency: float
    slope: float
    network: float

    def __call__(self, nbytes: float, in_network: bool = False) -> float:
        return max(self.latency, nbytes * (self.network if in_network else self.slope))


def bound(collective: Collective, cluster: Cluster) -> Bound:
    """The bound of a collective over all ranks of a cluster, per byte of its size."""
    return _bound(collective, cluster.hardware)


@lru_cache(maxsize=4096)
def _bound(collective: Collective, cluster: Cluster) -> Bound:
    if cluster.size == 1:
        return Bound(0.0, 0.0, 0.0)
    top = _outermost(cluster)
    slopes = [_level(collective, cluster, level, top) for level in range(top + 1)]
    buses = max(_shared(collective, cluster, level, top) for level in range(top + 1))
    latency = cluster.levels[top].latency
    return Bound(
        latency,
        max(buses, *(plain for plain, _ in slopes)),
        max(0.0, *(network for _, network in slopes)),
    )


def _outermost(cluster: Cluster) -> int:
    ranks = np.arange(cluster.size)
    return int(cluster.level_of(np.zeros_like(ranks), ranks).max())


def _level(collective: Collective, cluster: Cluster, level: int, top: int) -> tuple[float, float]:
    """Seconds a byte that the units of a level need: without, and with, addition by a switch."""
    units = cluster.units(level)
    if len(units) == 1:
        return 0.0, 0.0
    n, exits = cluster.size, [_exit(cluster, level, unit, top) for unit in units]
    pairs = list(zip(units, exits, strict=True))
    if collective in ("all_gather", "reduce_scatter"):
        slope = max((n - len(unit)) / n / rate for unit, rate in pairs)
    elif collective == "all_to_all":
        slope = max(len(unit) * (n - len(unit)) / n / rate for unit, rate in pairs)
    elif collective in ("broadcast", "reduce"):
        slope = max(1 / rate for _, rate in pairs)
    else:
        cut = max(1 / rate for _, rate in pairs)
        partition = 2 * (len(units) - 1) / sum(exits)
        adds = any(outer.reduces for outer in cluster.levels[level:])
        return max(cut, partition), cut if adds else max(cut, partition)
    return slope, slope


def _exit(cluster: Cluster, level: int, unit: Sequence[int], top: int) -> float:
    """Line rate of all ports by which these ranks leave their unit of `level`."""
    rate = 0.0
    for outer in range(level, top + 1):
        rate += len(cluster.ports_of(outer, unit)) * cluster.levels[outer].bandwidth
        if cluster.levels[outer].through:
            break
    return rate


def _shared(collective: Collective, cluster: Cluster, level: int, top: int) -> float:
    """Seconds a byte of what carries all that the units of a level exchange: the bus that joins
    everything, and ports of one rate for both ways, which each byte passes twice."""
    spec, units, n = cluster.levels[level], cluster.units(level), cluster.size
    crossings = {
        "all_reduce": 2 * (len(units) - 1),
        "all_to_all": sum(len(unit) * (n - len(unit)) for unit in units) / n,
    }.get(collective, len(units) - 1)
    alone = len(cluster.units(level + 1)) == 1
    bus = crossings / spec.total if spec.total is not None and alone else 0.0
    ports = sum(_exit(cluster, level, unit, top) for unit in units)
    return bus if spec.duplex else max(bus, 2 * crossings / ports)
