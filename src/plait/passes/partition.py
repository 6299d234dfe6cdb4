"""Partition: Program + strategies -> the program of one rank.

Local sizes are read from the factors, moves (rules/moves.py) are put on the edges where a value's
layout is not the one its consumer needs, once per value and layout. All ranks' graphs have the same
nodes in the same order; only arguments differ. So the order of collectives is the same everywhere.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from plait.passes.expand import expansion, is_random
from plait.program import Program, Weight, module_path
from plait.rules.describe import Access, Description
from plait.rules.equation import Dims, Ranges
from plait.rules.layout import COPIED, WHOLE, Layout, Strategy
from plait.rules.moves import Conversion, Cut, Step, conversion, take
from plait.rules.split import Split

aten = torch.ops.aten


BACK = ".backward"  # of a move's name: that of its way back
SEED = "plait_seed"  # the last placeholder of a program that draws


@dataclass(frozen=True)
class Site:
    """One move in the program; `name` is the same on all ranks and in all runs: users say it."""

    name: str
    conversion: Conversion
    source: str  # the node whose value moves
    module: str  # the user's module there
    line: str
    shape: tuple[int, ...]  # of the whole value
    dtype: torch.dtype
    grad: bool  # gradients come back through it
    key: str = ""  # what moves and where to: equal however the program is ordered
    of: str = ""  # the site of which this is one chunk: started and waited for apart

    @property
    def edge(self) -> str:
        """The key without the number of the move among those that have it in common."""
        return self.key.rpartition(" #")[0]


@dataclass(frozen=True)
class Share:
    """What one rank stores of a weight."""

    weight: Weight
    layout: Layout
    dims: Dims

    @property
    def cut(self) -> Cut | None:
        return Cut.of(self.dims, self.layout.split) if self.layout.split is not None else None

    def of(self, value: Tensor, rank: int) -> Tensor:
        """What the rank stores of a whole value."""
        cut = self.cut
        return value if cut is None else take(value, cut.dim, cut.rows[rank])


@dataclass
class Local:
    """One rank's program. Placeholders: weights (in `shares` order), tensor inputs, [seed]."""

    rank: int
    graph: fx.Graph
    shares: tuple[Share, ...]
    sites: dict[str, Site]
    constants: dict[str, Tensor]
    seeded: bool = False
    origins: tuple[str, ...] = ()  # the program's node behind each node of the graph
    runs: tuple[tuple[str, ...], ...] = ()  # weights that lie one behind the other (passes/pack.py)


@dataclass
class Emitter:
    """Builds one rank's graph; expansions use its `call`, `move`, `constant` and `seed`."""

    program: Program
    description: Description
    strategies: dict[fx.Node, Strategy]
    grads: set[fx.Node]
    rank: int
    graph: fx.Graph = field(default_factory=fx.Graph)
    sites: dict[str, Site] = field(default_factory=dict)
    constants: dict[str, Tensor] = field(default_factory=dict)
    _values: MutableMapping[tuple[fx.Node, Layout], fx.Node] = field(default_factory=dict)
    _own: MutableMapping[fx.Node, tuple[fx.Node, Layout]] = field(default_factory=dict)
    _tables: dict[tuple[Any, ...], fx.Node] = field(default_factory=dict)
    _seed: fx.Node | None = None
    _draws: bool = False
    _salts: dict[fx.Node, int] = field(default_factory=dict)
    _asked: Counter[Any] = field(default_factory=Counter)
    _current: fx.Node | None = None
    _origins: list[str] = field(default_factory=list)

    # -- what expansions use -----------------------------------------------------------------------

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)

    def copy(self, node: fx.Node, xs: list[fx.Node]) -> fx.Node:
        """The node itself on this rank: arguments localised, operands replaced by `xs`."""
        access = self.description.accesses[node]
        strategy = self.strategies[node]
        args, kwargs, target = self._localise(node, access, strategy)
        target = _ALWAYS.get(target, target)
        queues: dict[fx.Node, deque[fx.Node]] = defaultdict(deque)
        for operand, x in zip(access.operands, xs, strict=True):
            queues[operand.node].append(x)

        def replace(n: fx.Node) -> fx.Node:
            queue = queues.get(n)
            if not queue:
                return self.scalar(n)
            return queue.popleft() if len(queue) > 1 else queue[0]

        return self.graph.call_function(
            target, fx.map_arg(args, replace), fx.map_arg(kwargs, replace)
        )

    def _localise(self, node: fx.Node, access: Access, strategy: Strategy) -> Any:
        """(args, kwargs, target) with the sizes that this rank has."""
        if strategy.split is None or access.local is None:
            return node.args, node.kwargs, node.target
        return self._localised(node, access, strategy.split, self.rank)

    def _localised(self, node: fx.Node, access: Access, split: Split, rank: int) -> Any:
        assert access.local is not None
        target = _LOCAL_TARGET.get(node.target, node.target)
        return *access.local(node, split, rank), target

    def scalar(self, node: fx.Node) -> fx.Node:
        """A node that is no tensor operand (a size), or a tensor only looked at for its sizes."""
        if node in self._own:
            return self._own[node][0]
        return self._constant_value(node, WHOLE, ())

    def move(
        self,
        x: fx.Node,
        a: Layout,
        b: Layout,
        dims: Dims,
        about: fx.Node,
        grad: bool | None = None,
    ) -> fx.Node:
        """`x` from layout `a` to layout `b`."""
        grad = about in self.grads if grad is None else grad
        for step in conversion(a, b, dims):
            if not grad and step.forward.action == "identity":
                continue
            x = self._site(step, x, about, grad, dims, f"{about.name}: {a} -> {b}")
        return x

    def constant(self, value: Tensor, name: str) -> fx.Node:
        key = f"{name}_{len(self.constants)}"
        self.constants[key] = value
        return self.graph.get_attr(key)

    def seed(self) -> fx.Node:
        assert self._seed is not None
        return self._seed

    def salt(self) -> int:
        """A number of the operator's own, whatever the order of emission."""
        assert self._current is not None
        return self._salts[self._current]

    def rows(self, dims: Dims) -> list[tuple[int, int, Ranges]]:
        """What a value with `dims` holds of dims that are cut otherwise than by its strategy."""
        return []

    # -- the walk ----------------------------------------------------------------------------------

    def run(self) -> Local:
        shares = []
        weights = {w.node: w for w in self.program.weights}
        random = [n for n in self.program.graph.nodes if is_random(n)]
        self._draws = bool(random)
        self._salts = {n: i + 1 for i, n in enumerate(random)}
        for node in self._order():
            self._current = node
            if node.op == "placeholder":
                if node.name in weights:
                    shares.append(self._weight(node, weights[node.name]))
                else:
                    self._input(node)
            elif node.op == "call_function":
                self._place_seed()
                self._call(node)
            elif node.op == "output":
                self._output(node)
            self._made_for(node)
        return Local(
            self.rank, self.graph, tuple(shares), self.sites, self.constants, self._draws,
            tuple(self._origins),
        )  # fmt: skip

    def _made_for(self, node: fx.Node) -> None:
        """What the graph has got since the last time stands for `node`."""
        self._origins += [node.name] * (len(self.graph.nodes) - len(self._origins))

    def _order(self) -> Sequence[fx.Node]:
        return list(self.program.graph.nodes)

    def _weight(self, node: fx.Node, weight: Weight) -> Share:
        layout = self.strategies[node].results[0]
        dims = self.description.dims[node][0]
        share = Share(weight, layout, dims)
        self._set(node, self.graph.placeholder(node.name), layout)
        return share

    def _input(self, node: fx.Node) -> None:
        self._set(node, self.graph.placeholder(node.name), WHOLE)

    def _place_seed(self) -> None:
        """One more placeholder, after the last, if anything draws."""
        if self._seed is None and self._draws:
            self._seed = self.graph.placeholder(SEED)

    def _set(self, node: fx.Node, x: fx.Node, layout: Layout) -> None:
        x.meta.update({k: node.meta[k] for k in _KEPT if k in node.meta})
        self._own[node] = (x, layout)
        self._values[node, layout] = x

    def _call(self, node: fx.Node) -> None:
        access = self.description.accesses.get(node)
        if access is None:  # arithmetic on sizes
            new = self.graph.node_copy(node, self.scalar)
            self._own[node] = (new, WHOLE)
            return
        strategy = self.strategies[node]
        xs = [self.operand(access, i, layout) for i, layout in enumerate(strategy.operands)]
        expand = expansion(node, access, strategy)
        new = expand(self, node, access, strategy, xs) if expand else self.copy(node, xs)
        if len(strategy.results) == 1:
            self._set(node, new, strategy.results[0])
        else:
            self._own[node] = (new, WHOLE)  # a tuple: its getitems say their layouts

    def operand(self, access: Access, i: int, need: Layout) -> fx.Node:
        """Operand number `i` as an operator reads it."""
        o = access.operands[i]
        return self.value(o.node, need, o.dims)

    def value(self, node: fx.Node, need: Layout, dims: Dims) -> fx.Node:
        """The value of `node` in layout `need`, moved there if necessary (once)."""
        if node.op == "get_attr":
            return self._constant_value(node, need, dims)
        x, have = self._own[node]
        if len(self.strategies[node].results) > 1:
            return x
        grad = node in self.grads
        if have == need or (not grad and {have, need} <= {WHOLE, COPIED}):
            return self._shared(node, x, have, dims)
        if (node, need) not in self._values:
            if not grad and need == COPIED:
                return self.value(node, WHOLE, dims)
            x = self._shared(node, x, have, dims)
            self._values[node, need] = self.move(x, have, need, dims, node)
        return self._values[node, need]

    def _shared(self, node: fx.Node, x: fx.Node, have: Layout, dims: Dims) -> fx.Node:
        """A trained weight with rows that neighbours hold too: their gradients are summed."""
        if node.op != "placeholder" or have.split is None or node not in self.grads:
            return x
        cut = Cut.of(dims, have.split)
        if cut.disjoint:
            return x
        key = (node, Layout("shared"))
        if key not in self._values:
            step = Conversion(Step("identity"), Step("share"), cut)
            self._values[key] = self._site(step, x, node, True, dims, f"{node.name}: shared")
        return self._values[key]

    def _constant_value(self, node: fx.Node, need: Layout, dims: Dims) -> fx.Node:
        table = self.program.constants[str(node.target)]
        key: tuple[Any, ...] = (node, need.kind, None)
        if need.kind == "shard":
            assert need.split is not None
            cut = Cut.of(dims, need.split)
            key = (node, "shard", (cut.dim, cut.rows[self.rank]))
            table = take(table, cut.dim, cut.rows[self.rank]).contiguous()
        elif need.kind == "partial" and self.rank > 0:
            table = torch.zeros_like(table)
        if key not in self._tables:
            self._tables[key] = self.constant(table, "table")
        return self._tables[key]

    def _site(
        self, c: Conversion, x: fx.Node, about: fx.Node, grad: bool, dims: Dims, key: str
    ) -> fx.Node:
        site = self._new_site(c, about, grad, dims, key)
        self.sites[site.name] = site
        return self.graph.call_module(site.name, (x,))

    def _new_site(self, c: Conversion, about: fx.Node, grad: bool, dims: Dims, key: str) -> Site:
        self._asked[key] += 1
        key = f"{key} #{self._asked[key]}"
        current = self._current if self._current is not None else about
        value = about.meta.get("val")
        dtype = value.dtype if isinstance(value, Tensor) else torch.float32
        shape = tuple(f.extent for f in dims) if dims else _shape(value)
        line, module = current.meta.get("stack_trace", ""), module_path(current)
        name = f"move_{len(self.sites)}"
        return Site(name, c, about.name, module, line, shape, dtype, grad, key)

    def _output(self, node: fx.Node) -> None:
        (flat,) = node.args
        assert isinstance(flat, (tuple, list))
        outs = []
        for item in flat:
            if not isinstance(item, fx.Node):
                outs.append(item)
            elif item in self.description.dims:
                outs.append(self.value(item, WHOLE, self.description.dims[item][0]))
            else:
                outs.append(self.scalar(item))
        self.graph.output(tuple(outs))


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(s for s in value.shape if isinstance(s, int)) if isinstance(value, Tensor) else ()


_KEPT = ("stack_trace", "nn_module_stack")
_ALWAYS: dict[Any, Any] = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
}
_LOCAL_TARGET: dict[Any, Any] = {
    aten.split.Tensor: aten.split_with_sizes.default,
    aten.chunk.default: aten.split_with_sizes.default,
}


def partition(
    program: Program,
    description: Description,
    strategies: dict[fx.Node, Strategy],
    grads: set[fx.Node],
    rank: int,
) -> Local:
    """The program of `rank`."""
    return Emitter(program, description, strategies, grads, rank).run()
