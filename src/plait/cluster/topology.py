"""Cluster: devices under levels of switches, as data; and the path between any two devices.

A level joins `arity` units of the level below (at the innermost, devices) through one switch or
bus:

    level 1  ib      4 x [ 8 x h100 ]      8 ports (NICs) a node, one for each device
    level 0  nvlink      8 x h100          1 port a device
    device 11 = unit 1 of level 1 (its node), unit 3 of level 0 in it

Two devices talk over the innermost level that joins them. A transfer occupies the source's port
out, the target's port in, and the level's bus if it has one; where a level is `through` (PCIe:
the way to the NIC is the same slot), transfers to outer levels occupy its ports too. Links are
thus ports with a direction (or with both, where a core copies bytes out and in, as on a loopback);
the list of ranks decides which are used.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.cluster.device import Device, Tile
from plait.cluster.transport import Protocol, Transport
from plait.errors import ClusterError

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Level:
    name: str
    arity: int  # units of the level below
    bandwidth: float  # bytes/s of one port, one direction, line rate
    latency: float  # seconds from the first byte out of one device to the first byte into another
    share: float = 1.0  # of the line rate that long transfers between two devices reach
    ports: int | None = None  # ports of one unit; None: one for each of its devices
    through: bool = False  # transfers to outer levels pass these ports as well
    total: float | None = None  # bytes/s of the bus that all ports share; None: non-blocking
    ordered: bool = (
        True  # bytes arrive in the order sent (EFA: not, so no protocol with flags in the data)
    )
    reduces: float = 0.0  # what a switch that adds and copies (SHARP) reaches of a port's rate
    network: bool = False  # joins hosts
    duplex: bool = True  # False: what a port sends and what it receives share its rate

    @property
    def each_way(self) -> float:
        """Bytes/s of a port that sends as much as it receives, at line rate."""
        return self.bandwidth if self.duplex else self.bandwidth / 2


class Link(NamedTuple):
    """One direction of one port, a port whose directions share its rate, or a bus."""

    name: str  # "nvlink 3 out", "ib 1.0 in", "loopback 2", "loopback bus 0"
    bandwidth: float  # line rate
    share: float


@dataclass(frozen=True)
class Cluster:
    """`places[r]` is the position of rank r's device among all positions of the levels."""

    name: str
    device: Device
    levels: tuple[Level, ...]  # innermost first
    transports: tuple[Transport, ...] = ()
    places: tuple[int, ...] | None = None  # None: every position, in order
    source: str = ""  # where the constants come from, with date and method if they were measured

    def __post_init__(self) -> None:
        wrong = [
            lv.name for lv in self.levels if min(lv.arity, lv.bandwidth) <= 0 or lv.latency < 0
        ]
        if wrong:
            raise ClusterError(
                f"{self.name}: levels {wrong} need arity and bandwidth above 0, latency 0 or more"
            )
        if self.places is not None:
            self._check(self.places, self.capacity, "devices")

    # --- what there is ---------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Positions of the levels, used or not."""
        return prod(level.arity for level in self.levels)

    @property
    def size(self) -> int:
        return self.capacity if self.places is None else len(self.places)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.size))

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host: what the outermost level joins; one if there is one level."""
        return self.units(len(self.levels) - 1) if len(self.levels) > 1 else (self.ranks,)

    def units(self, level: int, ranks: Iterable[int] | None = None) -> tuple[tuple[int, ...], ...]:
        """`ranks` by the units that `level` joins: devices for 0, hosts for the outermost."""
        groups: dict[int, list[int]] = {}
        for rank in self.ranks if ranks is None else ranks:
            groups.setdefault(int(self.at[rank]) // self.spans[level], []).append(rank)
        return tuple(tuple(group) for group in groups.values())

    def subset(self, ranks: Sequence[int]) -> Cluster:
        """The same machine with only these ranks' devices, renumbered from 0 in the order given."""
        self._check(ranks, self.size, "ranks")
        places = tuple(int(self.at[rank]) for rank in ranks)
        whole = places == tuple(range(self.capacity))
        return replace(self, places=None if whole else places)

    def with_launch(self, seconds: float) -> Cluster:
        """The same machine with collectives started otherwise (software.LAUNCH)."""
        return replace(self, transports=tuple(t.with_launch(seconds) for t in self.transports))

    def transport(self, name: str) -> Transport:
        for transport in self.transports:
            if transport.name == name:
                return transport
        have = ", ".join(t.name for t in self.transports)
        raise ClusterError(f"{self.name} has no transport {name!r}; it has {have}")

    @cached_property
    def hardware(self) -> Cluster:
        """The same machine without its software: what bounds and forms depend on."""
        return replace(self, transports=()) if self.transports else self

    # --- where bytes pass ------------------------------------------------------------------------

    @cached_property
    def at(self) -> Indices:
        return np.arange(self.capacity) if self.places is None else np.array(self.places)

    @cached_property
    def spans(self) -> tuple[int, ...]:
        """Positions in one unit of each level (1, 8, ...), and all of them at the end."""
        spans = [1]
        for level in self.levels:
            spans.append(spans[-1] * level.arity)
        return tuple(spans)

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """Ports out, ports in, buses, level by level; `paths` speaks of their indices."""
        links: list[Link] = []
        for i, level in enumerate(self.levels):
            ports = self._ports(i)
            for way in (" out", " in") if level.duplex else ("",):
                for port in range(self.capacity // self.spans[i] * ports):
                    name = f"{port}" if ports == 1 else f"{port // ports}.{port % ports}"
                    links.append(Link(f"{level.name} {name}{way}", level.bandwidth, level.share))
            if level.total is not None:
                for bus in range(self.capacity // self.spans[i + 1]):
                    links.append(Link(f"{level.name} bus {bus}", level.total, 1.0))
        return tuple(links)

    def level_of(self, sources: Indices, targets: Indices) -> Indices:
        """The innermost level that joins each pair of ranks."""
        a, b = self.at[sources], self.at[targets]
        level = np.zeros(len(a), np.int64)
        for i in range(1, len(self.levels)):
            level += a // self.spans[i] != b // self.spans[i]
        return level

    def paths(self, sources: Indices, targets: Indices) -> Indices:
        """[pair, slot]: the links that a transfer of each pair passes, in order; -1 for none."""
        a, b = self.at[sources], self.at[targets]
        level = self.level_of(sources, targets)
        out, into, bus = [], [], []
        for i, spec in enumerate(self.levels):
            used = (level == i) | ((level > i) & spec.through)
            first = self._first_link[i]
            ports = self.capacity // self.spans[i] * self._ports(i)
            back = ports if spec.duplex else 0  # from a port out to the same port in
            out.append(np.where(used, first + self._port(i, a), -1))
            into.append(np.where(used, first + back + self._port(i, b), -1))
            if spec.total is not None:
                buses = first + ports + back
                bus.append(np.where(level == i, buses + a // self.spans[i + 1], -1))
        return np.stack(out + bus + into[::-1], axis=1)

    def ports_of(self, level: int, ranks: Iterable[int]) -> set[int]:
        """The ports of `level` that these ranks use."""
        at = self.at[list(ranks)]
        return set(self._port(level, at).tolist())

    def _ports(self, level: int) -> int:
        return self.levels[level].ports or self.spans[level]

    def _port(self, level: int, at: Indices) -> Indices:
        span, ports = self.spans[level], self._ports(level)
        return at // span * ports + at % span * ports // span

    @cached_property
    def _first_link(self) -> tuple[int, ...]:
        first = [0]
        for i, level in enumerate(self.levels):
            ways = 2 if level.duplex else 1
            ports = ways * (self.capacity // self.spans[i]) * self._ports(i)
            buses = self.capacity // self.spans[i + 1] if level.total is not None else 0
            first.append(first[-1] + ports + buses)
        return tuple(first)

    # --- spelling --------------------------------------------------------------------------------

    def __str__(self) -> str:
        """One line that `Cluster.parse` reads back: a preset's spelling, else JSON."""
        from plait.cluster.presets import spell  # presets build clusters, and name them

        return spell(self) or self.to_json()

    @property
    def label(self) -> str:
        """For people: the spelling, or the name of what is no preset."""
        from plait.cluster.presets import spell

        return spell(self) or f"{self.name} ({self.size} devices)"

    @staticmethod
    def parse(text: str) -> Cluster:
        """Reads what `str` wrote, or a preset's name: `dgx-h100`, `dgx-h100[2x8]+nvls`, `{...}`."""
        from plait.cluster.presets import parse_preset

        return Cluster.from_json(text) if text.lstrip().startswith("{") else parse_preset(text)

    @staticmethod
    def preset(name: str, devices: int | None = None) -> Cluster:
        """A preset by name; `devices` beyond one host are several hosts over its fabric."""
        from plait.cluster.presets import make

        return make(name, devices)

    @staticmethod
    def of(spec: Cluster | str | None, measured: bool = True, processes: int = 1, kind: str = "") -> Cluster:
        """What the `cluster=` of the public calls means: a Cluster, a spelling, or this machine
        (as a calibration `measured` it, if there is one; its devices of a `kind`, else its GPUs if it has
        any; without GPUs, shared by so many `processes`)."""
        if isinstance(spec, Cluster):
            return spec
        if spec is None:
            from plait.cluster.presets import detect

            return detect(measured, processes, kind)
        if not isinstance(spec, str):
            raise ClusterError(f"a cluster is a plait.Cluster or the name of one, not {spec!r}")
        return Cluster.parse(spec)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Cluster:
        try:
            return Cluster._read(json.loads(text))
        except ClusterError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
            shown = text if len(text) <= 60 else f"{text[:60]}..."
            raise ClusterError(
                f"{shown!r} is no cluster ({what}); it is a preset's spelling, for example "
                "dgx-h100[2x8], or JSON as Cluster.to_json() writes it"
            ) from None

    @staticmethod
    def _read(data: dict[str, Any]) -> Cluster:
        device = data["device"]
        device |= {
            "flops": tuple(map(tuple, device["flops"])),
            "tiles": tuple(Tile(**tile) for tile in device["tiles"]),
        }
        places = data.get("places")
        return Cluster(
            name=data["name"],
            device=Device(**device),
            levels=tuple(Level(**level) for level in data["levels"]),
            transports=tuple(map(_transport, data["transports"])),
            places=None if places is None else tuple(places),
            source=data.get("source", ""),
        )

    def _check(self, chosen: Sequence[int], size: int, what: str) -> None:
        outside = sorted({r for r in chosen if not 0 <= r < size})
        twice = (
            sorted({r for r in chosen if list(chosen).count(r) > 1})
            if len(set(chosen)) < len(chosen)
            else []
        )
        if outside or twice or not chosen:
            raise ClusterError(
                f"{self.name} has {what} 0 to {size - 1}; "
                + "; ".join(
                    text
                    for text, wrong in (
                        (f"{outside} are not among them", outside),
                        (f"{twice} are listed twice", twice),
                        ("none were given", not chosen),
                    )
                    if wrong
                )
            )


def _transport(data: dict[str, Any]) -> Transport:
    known = {f.name: data[f.name] for f in fields(Transport) if f.name in data}
    return Transport(
        **known
        | {
            "protocols": tuple(Protocol(**p) for p in data["protocols"]),
            "algorithms": tuple(data["algorithms"]),
            "internal": tuple((form, Protocol(**p)) for form, p in data["internal"]),
            "measured": tuple(
                (spelling, tuple(Protocol(**p) for p in protocols))
                for spelling, protocols in data.get("measured", ())
            ),
        }
    )
