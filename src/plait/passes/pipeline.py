"""Pipeline: one rank's program cut into the programs of its stages.

The cut is made in the partitioned graph, after the tensor-parallel split: a value crosses from rank
i of one stage's group to rank i of another's in whatever layout it has there, and its gradient comes
back the same way. So a pipeline computes, operator by operator, what one process would.

    weights, inputs, constants   on every stage that reads them, never sent
    moves of weights             with the weights: each stage's group makes its own
    light values                 made from these alone, for less than sending costs: made again
    numbers                      read again from the tensor that holds them, which is sent
    everything else              a `Wire` from the stage that makes it to each that reads it
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import fx

from plait.passes.partition import SEED, Local


@dataclass(frozen=True)
class Wire:
    """A value of the local program that `target` reads and `source` makes."""

    value: str
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.value}: {self.source} -> {self.target}"


@dataclass(frozen=True)
class Stage:
    """Placeholders of `graph`: `weights`, `inputs`, [seed], then the values of `receives`; its
    outputs: the values of `sends` (each once), then those of `results`, flat output -> value."""

    index: int
    graph: fx.Graph
    weights: tuple[str, ...]  # nodes
    inputs: tuple[str, ...]  # nodes
    seeded: bool
    receives: tuple[Wire, ...]
    sends: tuple[Wire, ...]
    makes: tuple[str, ...]  # the values behind the outputs, in order
    results: tuple[int, ...]  # flat outputs that this stage gives, after the sent values


@dataclass(frozen=True)
class Borders:
    """Where a program is cut: `firsts`, the first node of each stage but the first; `light` nodes are
    made again by every stage that reads them."""

    firsts: tuple[str, ...] = ()
    light: frozenset[str] = frozenset()

    def places(self, graph: fx.Graph) -> dict[str, int]:
        """The stage in whose part of the program each node stands, by its name."""
        out: dict[str, int] = {}
        begins, now = set(self.firsts), 0
        for node in graph.nodes:
            now += node.name in begins
            out[node.name] = now
        return out


def numbered(stages: Sequence[Stage]) -> dict[Wire, int]:
    """The number by which both ends of a message name its wire."""
    return {wire: i for i, wire in enumerate(wire for stage in stages for wire in stage.sends)}


def stage_of(local: Local, borders: Borders, program: fx.Graph) -> dict[fx.Node, int]:
    """The stage of every call in the local graph, but for light ones, numbers and moves of weights: they
    have none.

    A node runs where that one of the program does for which it was made: regions in chunks are not in
    the program's order.
    """
    places, origin = borders.places(program), local.origins
    numbers = {n.name for n in program.nodes if isinstance(n.meta.get("val"), NUMBERS)}
    shares = {share.weight.node for share in local.shares}
    held = {n for n in local.graph.nodes if n.op == "placeholder" and n.name in shares}
    out: dict[fx.Node, int] = {}
    for at, node in enumerate(local.graph.nodes):
        if node.op == "call_module" and held.issuperset(node.all_input_nodes):
            held.add(node)
            continue
        if node.op not in ("call_function", "call_module", "output"):
            continue
        if node.op == "call_function" and origin[at] in numbers:
            continue
        if node.target is getitem and node.args[0] in out:
            out[node] = out[node.args[0]]
        elif origin[at] not in borders.light or not _can_repeat(node, out):
            out[node] = places[origin[at]]
    return out


def _can_repeat(node: fx.Node, placed: Mapping[fx.Node, int]) -> bool:
    """No collective inside, and everything it reads can be repeated too."""
    return node.op == "call_function" and not any(i in placed for i in node.all_input_nodes)


def split(local: Local, borders: Borders, program: fx.Graph) -> tuple[Stage, ...]:
    """The programs of all stages of one rank."""
    placed = stage_of(local, borders, program)
    shares = {share.weight.node for share in local.shares}
    output = next(iter(reversed(local.graph.nodes)))
    count = len(borders.firsts) + 1
    flat = list(output.args[0])  # type: ignore[arg-type]
    results: list[list[int]] = [[] for _ in range(count)]
    for i, item in enumerate(flat):
        results[placed.get(item, count - 1) if isinstance(item, fx.Node) else count - 1].append(i)
    builders = [_Builder(s, placed, shares, local) for s in range(count)]
    for builder, mine in zip(builders, results, strict=True):
        builder.take([n for n in placed if placed[n] == builder.index and n.op != "output"])
        builder.want([flat[i] for i in mine])
    wires = [wire for builder in builders for wire in builder.wires()]
    return tuple(
        builder.stage(
            [w for w in wires if w.source == builder.index], [(i, flat[i]) for i in mine]
        )
        for builder, mine in zip(builders, results, strict=True)
    )


@dataclass
class _Builder:
    """Collects what one stage runs, then writes its graph."""

    index: int
    placed: Mapping[fx.Node, int]
    shares: set[str]
    local: Local
    needed: dict[fx.Node, None] = field(default_factory=dict)  # all values, its own included

    def take(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            self.needed[node] = None
            self.want(node.all_input_nodes)

    def want(self, values: Iterable[Any]) -> None:
        """Values that are not its own: sources, or what can be repeated from them, or wires."""
        for node in values:
            if isinstance(node, fx.Node) and node not in self.needed:
                self.needed[node] = None
                if node not in self.placed:
                    self.want(node.all_input_nodes)

    def foreign(self) -> list[fx.Node]:
        return [n for n in self.needed if self.placed.get(n, self.index) != self.index]

    def wires(self) -> list[Wire]:
        order = {n: i for i, n in enumerate(self.local.graph.nodes)}
        nodes = sorted(self.foreign(), key=order.__getitem__)
        return [Wire(n.name, self.placed[n], self.index) for n in nodes]

    def stage(self, sends: Sequence[Wire], results: Sequence[tuple[int, Any]]) -> Stage:
        graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
        by_name = {n.name: n for n in self.local.graph.nodes}
        sources = [n for n in self.local.graph.nodes if n.op == "placeholder" and n in self.needed]
        receives = self.wires()
        for node in [*sources, *(by_name[w.value] for w in receives)]:
            made[node] = graph.placeholder(f"{node.name}")
        for node in self.local.graph.nodes:
            if node in self.needed and node not in made:
                made[node] = graph.node_copy(node, made.__getitem__)
        sent = list(dict.fromkeys(w.value for w in sends))
        outputs = [made[by_name[v]] for v in sent]
        outputs += [made[x] if isinstance(x, fx.Node) else x for _, x in results]
        graph.output(tuple(outputs))
        inputs = [n.name for n in sources if n.name not in self.shares and n.name != SEED]
        return Stage(
            self.index,
            graph,
            tuple(n.name for n in sources if n.name in self.shares),
            tuple(inputs),
            any(n.name == SEED for n in sources),
            tuple(receives),
            tuple(sends),
            (*sent, *(x.name if isinstance(x, fx.Node) else "" for _, x in results)),
            tuple(i for i, _ in results),
        )


NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
