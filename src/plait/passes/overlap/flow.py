"""Flow: the edges of a partitioned program, and the moves that stand on them.

An edge is a value and one reader that needs it in some layout. The same rule that the emitter
follows (passes/partition.py) says here, before anything is emitted, which edges communicate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from operator import getitem

from torch import fx

from plait.passes.pipeline import Borders
from plait.program import Program
from plait.rules.describe import Access, Description
from plait.rules.equation import Dims
from plait.rules.layout import COPIED, WHOLE, Layout, Strategy
from plait.rules.moves import Conversion, conversion


@dataclass(frozen=True)
class Edge:
    """`reader` needs the value of `source` in layout `need`; `moves` bring it there."""

    source: fx.Node
    reader: fx.Node
    have: Layout
    need: Layout
    dims: Dims
    moves: tuple[Conversion, ...]
    grad: bool

    @property
    def collectives(self) -> list[str]:
        """What the edge asks of the ranks, forward and (where gradients flow) backward."""
        steps = [step for c in self.moves for step in ((c.forward, c.backward) if self.grad else (c.forward,))]
        return [step.collective for step in steps if step.collective is not None]

    @property
    def key(self) -> tuple[fx.Node, Layout]:
        """Equal for edges that share one move."""
        return self.source, self.need


@dataclass(frozen=True)
class Flow:
    program: Program
    description: Description
    strategies: dict[fx.Node, Strategy]
    grads: set[fx.Node]
    borders: Borders = field(default_factory=Borders)  # of a pipeline's stages, over which no region goes

    @cached_property
    def stages(self) -> dict[fx.Node, int]:
        """Where each node runs, but for those that every stage makes again; a tuple's parts with it."""
        places = self.borders.places(self.program.graph)
        out: dict[fx.Node, int] = {}
        for node in self.program.graph.nodes:
            if node.name not in self.borders.light:
                whole = node.args[0] if node.target is getitem else None
                out[node] = out.get(whole, places[node.name])  # type: ignore[arg-type]
        return out

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        return tuple(self._edges())

    @cached_property
    def into(self) -> dict[fx.Node, list[Edge]]:
        return self._grouped("reader")

    @cached_property
    def out(self) -> dict[fx.Node, list[Edge]]:
        return self._grouped("source")

    def at_home(self, edge: Edge) -> bool:
        """The move of a weight that every stage which reads it makes for itself."""
        return bool(self.borders.firsts) and edge.source.name in self._weights

    @cached_property
    def _weights(self) -> frozenset[str]:
        return frozenset(w.node for w in self.program.weights)

    def access(self, node: fx.Node) -> Access | None:
        return self.description.accesses.get(node)

    def _grouped(self, end: str) -> dict[fx.Node, list[Edge]]:
        found: dict[fx.Node, list[Edge]] = {node: [] for node in self.program.graph.nodes}
        for edge in self.edges:
            found[getattr(edge, end)].append(edge)
        return found

    def _edges(self) -> Iterator[Edge]:
        for node in self.program.graph.nodes:
            access = self.access(node)
            if access is not None:
                for o, need in zip(access.operands, self.strategies[node].operands, strict=True):
                    yield self._edge(o.node, node, need, o.dims)
            elif node.op == "output":
                for source in node.all_input_nodes:
                    if source in self.description.dims:
                        yield self._edge(source, node, WHOLE, self.description.dims[source][0])

    def _edge(self, source: fx.Node, reader: fx.Node, need: Layout, dims: Dims) -> Edge:
        have = self._have(source)
        grad = source in self.grads
        if not grad and need == COPIED:
            need = WHOLE
        still = have is None or have == need or (not grad and {have, need} <= {WHOLE, COPIED})
        moves = () if still or have is None else conversion(have, need, dims)
        return Edge(source, reader, have or need, need, dims, moves, grad)

    def _have(self, source: fx.Node) -> Layout | None:
        """None: a constant, which every rank has as it likes, or a tuple."""
        if source.op == "get_attr" or source not in self.strategies:
            return None
        results = self.strategies[source].results
        return results[0] if len(results) == 1 else None
