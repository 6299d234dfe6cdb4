"""The forms that a library's own collective takes, as NCCL builds them: hops and bytes.

For N ranks in k hosts of at most g, hops that follow each other and bytes of the busiest port:

    ring    2(N-1) hops, 2(k-1) of them between hosts; 2(N-1)/N S through every device, and through
            each host as a whole, since the rings are rotated over all of its NICs; half of both
            for reduce_scatter and all_gather, whose ring runs once
    tree    up and down: a chain of g - 1 hops in the host, floor(log2 k) between hosts; two trees
            share the load: 2S through a device and through a host (S between just two hosts)
    nvls    the switch adds and copies: a hop each way, (N+1)/N S through a device's port; a tree
            between hosts
    direct  every rank takes the vectors of all the others: one hop, (N-1)S

Model and names: NCCL's src/graph/tuning.cc 2.30; (N+1)/N: src/sym_kernels.cc. All phases are
pipelined, so the slowest level's bytes count, not their sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import floor, log2

from plait.cluster import Cluster
from plait.collectives.schedule import Collective


@dataclass(frozen=True)
class Form:
    """What the topology has to do: hops[i] steps in a row that cross level i; seconds a byte of the
    busiest port, and of a port of a switch that adds, at what a copy reaches of the line rate.
    """

    hops: tuple[int, ...]
    load: float
    sent: float  # bytes a rank sends, per byte of the size
    adding: float = 0.0

    @property
    def network(self) -> bool:
        return self.adding > 0

    @property
    def steps(self) -> int:
        return sum(self.hops)


def form(name: str, collective: Collective, cluster: Cluster) -> Form | None:
    """The form of a collective over all ranks of a cluster, None if there is none so called."""
    return _form(name, collective, cluster.hardware)


@lru_cache(maxsize=4096)
def _form(name: str, collective: Collective, cluster: Cluster) -> Form | None:
    make = _FORMS.get((name, collective))
    return make(cluster) if make is not None and cluster.size > 1 else None


def _crossed(cluster: Cluster) -> tuple[int, ...]:
    """For each level, how many times a walk over all ranks, host by host, and back crosses it."""
    counts = [len(cluster.units(level)) for level in range(len(cluster.levels))]
    above = [*counts[1:], 1]
    return tuple(c - a for c, a in zip(counts, above, strict=True))


def _loads(cluster: Cluster, per_device: float, per_unit: float) -> float:
    """Seconds a byte of the slowest level: so much through a device, so much through a unit."""
    slowest = 0.0
    for i, (level, crossings) in enumerate(zip(cluster.levels, _crossed(cluster), strict=True)):
        if not crossings:
            continue
        ports = min(len(cluster.ports_of(i, unit)) for unit in cluster.units(i))
        slowest = max(
            slowest, (per_unit if i else per_device) / (ports * level.each_way * level.share)
        )
        if level.total is not None:
            slowest = max(slowest, per_device * len(cluster.units(i)) / level.total)
    return slowest


def _ring(turns: float, cluster: Cluster) -> Form:
    """`turns`: 2 for all_reduce, 1 for its halves."""
    n = cluster.size
    crossed = list(_crossed(cluster))
    hops = tuple(round(turns * c) for c in crossed)
    each = turns * (n - 1) / n
    return Form(hops, _loads(cluster, each, each), each)


def _chain(cluster: Cluster) -> Form:
    """Broadcast and reduce: the whole vector passes every rank once."""
    return Form(_crossed(cluster), _loads(cluster, 1.0, 1.0), 1.0)


def _tree(cluster: Cluster) -> Form:
    units = [len(cluster.units(i)) for i in range(len(cluster.levels))]
    inner = max(len(unit) for unit in cluster.units(1)) if len(cluster.levels) > 1 else units[0]
    hops = [2 * (inner - 1)] + [2 * floor(log2(max(count, 1))) for count in units[1:]]
    return Form(tuple(hops), _loads(cluster, 2.0, 1.0 if units[-1] == 2 else 2.0), 2.0)


def _nvls(cluster: Cluster) -> Form | None:
    if not cluster.levels[0].reduces:
        return None
    units = [len(cluster.units(i)) for i in range(len(cluster.levels))]
    inner = min(len(unit) for unit in cluster.units(1)) if len(cluster.levels) > 1 else units[0]
    if inner < 2:
        return None
    hops = [2] + [2 * floor(log2(max(count, 1))) for count in units[1:]]
    each = (inner + 1) / inner
    between = _loads(cluster, 0.0, 1.0 if units[-1] == 2 else 2.0)
    switch = cluster.levels[0]
    adding = each / (switch.bandwidth * switch.share * switch.reduces)
    return Form(tuple(hops), between, each, adding)


def _one_shot(cluster: Cluster) -> Form:
    """Every rank takes the whole vector of all the others, over the innermost level alone."""
    each = float(cluster.size - 1)
    hops = (1,) + (0,) * (len(cluster.levels) - 1)
    return Form(hops, _loads(cluster, each, each), each)


def _direct(cluster: Cluster) -> Form:
    """all_to_all: every pair at once, the bytes that leave a host over all of its ports."""
    n = cluster.size
    loads = [0.0]
    for i, level in enumerate(cluster.levels):
        for unit in cluster.units(i):
            group = next(g for g in cluster.units(i + 1) if unit[0] in g)
            outside = n - len(unit) if level.through else len(group) - len(unit)
            ports = len(cluster.ports_of(i, unit))
            loads.append(len(unit) * outside / n / (ports * level.each_way * level.share))
        if level.total is not None:
            loads.append((n - 1) / level.total)
    hops = tuple(n - 1 if c and i == 0 else int(c > 0) for i, c in enumerate(_crossed(cluster)))
    return Form(hops, max(loads), (n - 1) / n)


_FORMS = {
    ("ring", "all_reduce"): lambda c: _ring(2, c),
    ("ring", "reduce_scatter"): lambda c: _ring(1, c),
    ("ring", "all_gather"): lambda c: _ring(1, c),
    ("ring", "broadcast"): _chain,
    ("ring", "reduce"): _chain,
    ("ring", "all_to_all"): _direct,
    ("tree", "all_reduce"): _tree,
    ("direct", "all_reduce"): _one_shot,
    ("nvls", "all_reduce"): _nvls,
}
