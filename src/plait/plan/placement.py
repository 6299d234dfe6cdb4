"""Placement: where the ranks of a mesh stand on the cluster, and what their links then cost.

A group is priced on the devices where it stands (mesh.py has the order of the axes): the worst of all
groups of an axis (one that straddles two hosts holds up the others), with the links that groups share
while all of them talk at once divided among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from plait.cluster import Cluster
from plait.cost.comm import price
from plait.mesh import ORDERS, Mesh, Seats

Ranks = NDArray[np.int64]

PROBE = 2**20  # bytes of the all-reduce by which groups are compared


@dataclass(frozen=True)
class Group:
    """The worst group of an axis: its devices, and how many groups share its slowest link."""

    cluster: Cluster
    crowd: float = 1.0


@dataclass(frozen=True)
class Link:
    """A transfer between neighbouring stages while all the others send as well."""

    start: float = 0.0  # seconds
    byte: float = 0.0  # seconds a byte

    def seconds(self, nbytes: float) -> float:
        return self.start + nbytes * self.byte if nbytes > 0 else 0.0


@dataclass(frozen=True)
class Placement:
    cluster: Cluster
    mesh: Mesh
    order: str = ORDERS[0]

    @cached_property
    def grid(self) -> Ranks:
        """[pp, dp, tp]: the rank of each."""
        return Seats(self.mesh, self.order).grid

    @cached_property
    def tp(self) -> Group:
        return self._worst(self.grid.reshape(-1, self.mesh.tp))

    @cached_property
    def dp(self) -> Group:
        return self._worst(self.grid.transpose(0, 2, 1).reshape(-1, self.mesh.dp))

    @cached_property
    def link(self) -> Link:
        if self.mesh.pp == 1:
            return Link()
        sources, targets = self.grid[:-1].ravel(), self.grid[1:].ravel()
        paths = self.cluster.paths(sources, targets)
        by = self.cluster.transports[0]
        protocol = by.protocols[0]
        levels = [self.cluster.levels[i] for i in set(self._levels(sources, targets))]
        busy = self._load(paths) / protocol.share
        return Link(
            by.launch
            + protocol.base
            + protocol.step
            + protocol.hops * max(level.latency for level in levels),
            float(busy[paths].max()),
        )

    def _worst(self, groups: Ranks) -> Group:
        if groups.shape[1] == 1:
            return Group(self.cluster.subset([int(groups[0, 0])]))
        paths = [self.cluster.paths(g, np.roll(g, -1)) for g in groups]
        together = self._load(np.concatenate(paths))
        found: dict[tuple[object, ...], Group] = {}
        for group, mine in zip(groups, paths, strict=True):
            alone = float(self._load(mine)[mine].max())
            crowd = max(1.0, float(together[mine].max()) / alone)
            shape = *self._levels(group, np.roll(group, -1)), round(crowd, 6)
            if shape not in found:
                found[shape] = Group(self.cluster.subset(group.tolist()), crowd)
        return max(found.values(), key=_probe) if len(found) > 1 else next(iter(found.values()))

    def _load(self, paths: Ranks) -> NDArray[np.float64]:
        """Seconds a byte on every link if all these transfers run at once; 0 behind the last."""
        links = self.cluster.links
        rates = np.array([link.bandwidth * link.share for link in links])
        counts = np.bincount(paths[paths >= 0].ravel(), minlength=len(links))
        return np.append(counts / rates, 0.0)  # slot -1: no link

    def _levels(self, sources: Ranks, targets: Ranks) -> Sequence[int]:
        return [int(i) for i in self.cluster.level_of(sources, targets)]


def _probe(group: Group) -> float:
    ranks = range(group.cluster.size)
    return price("all_reduce", PROBE * group.crowd, ranks, group.cluster).seconds
