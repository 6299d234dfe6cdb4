"""Work: what every operator of a laid-out program costs one rank, for any share of the batch.

A micro-batch holds a share x of the batch's rows. Of an operator's flops, bytes and transfers some
grow with x and some do not (weights are read whole for every micro-batch), so one layout of the whole
batch prices every number of micro-batches:

    seconds(x) = passes * (max(flops(x) / rate, bytes(x) / bandwidth) + launch) + functions(x) + collectives(x)
               + (1 - 1 / M) * 3 * gradients / bandwidth     M micro-batches: all but one add to the weights' gradients

A loss that the program has not, since `step` is given it later, runs in the last stage: it is weighed as one function
of every element, in float32 and back, of the largest output that learns (docs/design/0004, 13).

What is kept for the backward follows from the equations too: an operator that is linear in all its
operands together (an addition, a view) keeps nothing, every other one its operands, once each; a product keeps of
them what another's gradient is made of: nothing of the data beside a frozen weight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from plait.passes.chains import reads, writes
from plait.passes.expand import is_random
from plait.passes.microbatch import Batch
from plait.passes.overlap.flow import Edge, Flow
from plait.plan import prices
from plait.plan.prices import Collective, Rates
from plait.plan.problem import Choice, Problem
from plait.plan.stages import Item, Line
from plait.rules.describe import Access
from plait.rules.equation import Dims
from plait.rules.layout import Layout, Strategy

aten = torch.ops.aten
LIGHT = 2**20  # bytes of a value that every stage makes again rather than receives
# What training holds of a trained weight beside itself: its gradient and the two averages of
# torch.optim.AdamW, all of the weight's own dtype.
STATES = 3.0
# A core's seconds for an element, above what its memory takes (one thread, float32, torch 2.13.0, AMD EPYC,
# 2026-11-30). On other devices these hide behind the memory.
FUNCTIONS: dict[Any, float] = {
    aten.exp.default: 0.5e-9,
    aten.log.default: 0.7e-9,
    aten.sin.default: 1.0e-9,
    aten.cos.default: 1.0e-9,
    aten.erf.default: 0.9e-9,
    aten.tanh.default: 2.0e-9,
    aten.softplus.default: 1.0e-9,
    aten.softmax.int: 0.3e-9,
    aten._softmax.default: 0.3e-9,
    aten.where.self: 3.4e-9,
}
ADDS = 3.0  # times that bytes move where a sum is added to: two are read, one is written
LOSS = 3.0  # passes of a function over what it reads and writes, as of any that learns (prices.py)


@dataclass(frozen=True)
class Amount:
    """`fixed + x * moving`, for a share x of the batch."""

    fixed: float = 0.0
    moving: float = 0.0

    def __call__(self, share: float) -> float:
        return self.fixed + share * self.moving

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.fixed + other.fixed, self.moving + other.moving)

    @classmethod
    def of(cls, value: float, moves: bool) -> Amount:
        return cls(0.0, value) if moves else cls(value, 0.0)


@dataclass(frozen=True)
class Step:
    """One operator on the busiest rank."""

    node: fx.Node
    flops: Amount
    nbytes: Amount
    passes: float  # 3 where gradients flow: the backward of a product is two products (prices.py)
    launches: float
    transfers: tuple[tuple[str, Amount], ...]  # collectives before it, forward and backward
    value: Amount  # bytes of its result, which may cross a cut; a tuple's are counted by its parts
    size: Amount  # bytes of memory that its result takes: none where it is a view of another
    kept: Amount  # bytes kept for the backward
    added: float = 0.0  # bytes of weights' gradients, to which every micro-batch but one is added
    functions: Amount = Amount()  # seconds of a core for what is no sum of products; their derivatives are

    def compute(self, share: float, rates: Rates, pieces: int = 1) -> float:
        busy = rates.busy(self.flops(share), self.nbytes(share))
        adding = ADDS * self.added * (1 - 1 / pieces) / rates.bandwidth
        return self.passes * busy + self.functions(share) + adding + self.launches * rates.launch


@dataclass(frozen=True)
class Work:
    """A program's operators in order, on one rank of a tensor-parallel group."""

    steps: tuple[Step, ...]
    rates: Rates
    weights: Mapping[str, float]  # bytes that one rank holds, gradients and optimizer included
    trained: Mapping[str, float]  # bytes of the gradients among them
    light: tuple[str, ...]  # operators that every stage repeats
    reads: tuple[tuple[str, ...], ...]  # of every step: the weights that its stage needs
    last: tuple[int, ...]  # of every step: the last one that reads its value, or -1
    until: tuple[int, ...]  # the last one that reads it or a view of it
    results: Amount  # bytes of the whole outputs
    moves: bool  # whether the batch can be cut
    loss: Amount = Amount()  # bytes that a step's own loss moves at least

    def compute(self, share: float, pieces: int = 1) -> list[float]:
        return [step.compute(share, self.rates, pieces) for step in self.steps]

    def times(self) -> tuple[tuple[str, float, float], ...]:
        """Of the whole batch: every operator that takes time, its seconds forward and backward."""
        out = []
        for step, seconds in zip(self.steps, self.compute(1.0), strict=True):
            if seconds > 0:
                once = step.functions(1.0)
                forward = once + (seconds - once) / step.passes
                out.append((step.node.name, forward, seconds - forward))
        return tuple(out)

    def communication(self, share: float, collective: Collective) -> list[float]:
        """Seconds of the collectives before every operator."""
        return [sum(collective(kind, n(share)) for kind, n in s.transfers) for s in self.steps]

    def line(self, share: float, collective: Collective, pieces: int = 1) -> Line:
        """What the cut sees of one of so many micro-batches, with a share of the batch."""
        seconds = self.compute(share, pieces)
        seconds[-1:] = [x + self.rates.busy(0.0, self.loss(share)) for x in seconds[-1:]]
        light = set(self.light)
        items = tuple(
            Item(
                step.node.name,
                busy + sent,
                0.0 if step.node.name in light else step.value(share),
                last,
                reads,
                joined=step.node.target is getitem,
                kept=step.kept(share),
            )
            for step, busy, sent, last, reads in zip(
                self.steps, seconds, self.communication(share, collective), self.last, self.reads,
                strict=True,
            )
        )  # fmt: skip
        return Line(items, dict(self.weights), self.workspace(share))

    def workspace(self, share: float) -> float:
        """The most bytes of values that are alive at once, and the whole outputs of other pieces."""
        return self._peak(share) + self.results(1.0) - self.results(share)

    def _peak(self, share: float) -> float:
        here = most = 0.0
        ends: dict[int, float] = {}
        for at, step in enumerate(self.steps):
            size = step.size(share)
            here += size
            most = max(most, here)
            ends[self.until[at]] = ends.get(self.until[at], 0.0) + size
            here -= ends.pop(at, 0.0)
        return most

    @cached_property
    def held(self) -> float:
        """Bytes of all weights, with what training holds beside them."""
        used = {name for reads in self.reads for name in reads}
        return sum(self.weights[name] for name in used)


def work(
    flow: Flow,
    problem: Problem,
    tied: Mapping[fx.Node, int],
    rates: Rates,
    batch: Batch | None,
    chained: frozenset[fx.Node] = frozenset(),
) -> Work:
    """`tied`: nodes that look alike. `batch`: how the batch would be cut, None where it cannot be. `chained`: parts
    of longer kernels."""
    program = flow.program
    counter = _Counter(flow, problem, tied, batch, chained, rates.in_turn)
    nodes = [n for n in program.graph.nodes if n.op == "call_function"]
    light = _light(flow)
    at = {n: i for i, n in enumerate(nodes)}
    kept = counter.kept() if program.training else {}
    weights = {w.node: w for w in program.weights}
    held = {name: counter.held(name) for name in weights}
    trained = {n: b for n, b in held.items() if program.training and weights[n].requires_grad}
    output = next(iter(reversed(program.graph.nodes)))
    finals = [n for n in output.all_input_nodes if n in at]
    last = tuple(
        max([at[u] for u in n.users if u in at and u not in light], default=-1) for n in nodes
    )
    return Work(
        tuple(counter.step(n, kept.get(n, Amount()), trained) for n in nodes),
        rates,
        {n: b + STATES * trained.get(n, 0.0) for n, b in held.items()},
        trained,
        tuple(n.name for n in light),
        _needs(nodes, output, light, weights.keys()),
        last,
        _until(nodes, last),
        sum((Amount.of(_nbytes(n), counter.moves(n)) for n in finals), Amount()),
        batch is not None,
        _loss(flow, [(n, counter.moves(n)) for n in finals]),
    )


def _loss(flow: Flow, finals: Iterable[tuple[fx.Node, bool]]) -> Amount:
    """What a loss that is still to come reads and writes, there and back; none where an output is one."""
    learns = [(n, moves) for n, moves in finals if flow.program.training and n in flow.grads]
    sizes = {n: n.meta["val"].dtype.itemsize for n, _ in learns}
    if any(_nbytes(n) == size for n, size in sizes.items()):
        return Amount()
    every = [Amount.of(LOSS * _nbytes(n) * (1 + 4 / sizes[n]), moves) for n, moves in learns]
    return max(every, key=lambda amount: amount(1.0), default=Amount())


@dataclass(frozen=True)
class _Size:
    """FLOPs of an operator on the busiest rank; bytes of what it makes, and of each operand."""

    flops: float
    value: float
    operands: tuple[float, ...]

    @staticmethod
    def of(choice: Choice, strategy: Strategy) -> _Size:
        access = choice.access
        assert access is not None
        made = zip(choice.results, choice.dtypes, strategy.results, strict=True)
        return _Size(
            sum(prices.flops_of(letters, strategy) for letters in prices.products_of(choice)),
            sum(prices.bytes_of(dims, dtype) * _share(dims, layout) for dims, dtype, layout in made),
            tuple(
                prices.bytes_of(o.dims, prices.dtype_of(o)) * prices.share_of(o.dims, strategy)
                for o in access.operands
            ),
        )


@dataclass
class _Counter:
    """Counts one node's work from its equation, its strategy and its place in the batch."""

    flow: Flow
    problem: Problem
    tied: Mapping[fx.Node, int]
    batch: Batch | None
    chained: frozenset[fx.Node]
    in_turn: bool  # a core computes, and moves bytes, in turn
    _sizes: dict[int, _Size] = field(default_factory=dict)

    def moves(self, node: fx.Node) -> bool:
        """Whether the value holds rows of the batch."""
        layout = self.batch.layouts.get(node) if self.batch is not None else None
        return layout is not None and layout.split is not None

    def step(self, node: fx.Node, kept: Amount, trained: Mapping[str, float]) -> Step:
        choice = self.problem.choices.get(node)
        if choice is None or choice.access is None:
            return Step(node, Amount(), Amount(), 0.0, 0.0, (), Amount(), Amount(), Amount())
        strategy = self.flow.strategies[node]
        passes = prices.passes_of(choice)
        size, view = self._size(choice, strategy), is_view(node)
        value = Amount.of(size.value, self.moves(node))
        return Step(
            node,
            self._flops(node, size),
            Amount() if view else self._bytes(choice, size, value),
            passes,
            passes if not view and writes(node, self.chained) else 0.0,
            tuple(self._transfers(node)),
            value if len(choice.results) == 1 else Amount(),
            Amount() if view else value,
            kept,
            sum(trained.get(x.name, 0.0) for x in node.all_input_nodes),
            self._functions(choice, strategy),
        )

    def held(self, weight: str) -> float:
        """Bytes of a weight on the busiest rank."""
        node = self._placeholders[weight]
        choice = self.problem.choices[node]
        return _share(choice.results[0], self.flow.strategies[node].results[0]) * prices.bytes_of(
            choice.results[0], choice.dtypes[0]
        )

    @cached_property
    def _placeholders(self) -> dict[str, fx.Node]:
        return {n.name: n for n in self.flow.program.graph.nodes if n.op == "placeholder"}

    def _size(self, choice: Choice, strategy: Strategy) -> _Size:
        alike = self.tied[choice.node]
        if alike not in self._sizes:
            self._sizes[alike] = _Size.of(choice, strategy)
        return self._sizes[alike]

    def _flops(self, node: fx.Node, size: _Size) -> Amount:
        found = self.batch.strategies.get(node) if self.batch is not None else None
        return Amount.of(size.flops, found is not None and found.split is not None)

    def _functions(self, choice: Choice, strategy: Strategy) -> Amount:
        seconds = FUNCTIONS.get(choice.node.target, 0.0) if self.in_turn else 0.0
        if not seconds:
            return Amount()
        elements = prod(f.extent for f in choice.results[0]) * _share(choice.results[0], strategy.results[0])
        return Amount.of(seconds * elements, self.moves(choice.node))

    def _bytes(self, choice: Choice, size: _Size, value: Amount) -> Amount:
        access, node = choice.access, choice.node
        assert access is not None
        read = [
            Amount.of(nbytes, self.moves(o.node))
            for o, nbytes in zip(access.operands, size.operands, strict=True)
            if reads(node, o.node, self.chained)
        ]
        return sum(read, value if writes(node, self.chained) else Amount())

    def _transfers(self, node: fx.Node) -> Iterable[tuple[str, Amount]]:
        """Collectives on the edges into a node, each where its first reader stands."""
        edges = self.flow.into[node]
        if any(n.op == "output" for n in node.users):
            edges = edges + [e for e in self.flow.out[node] if e.reader.op == "output"]
        for edge in edges:
            if edge.moves and self._first(edge):
                nbytes = Amount.of(_value_bytes(edge), self.moves(edge.source))
                yield from ((kind, nbytes) for kind in edge.collectives)
        choice, strategy = self.problem.choices[node], self.flow.strategies[node]
        if strategy.statistics:
            access = choice.access
            assert access is not None
            f = strategy.statistics[0]
            rows = 4.0 * prod(x.extent for x in access.operands[0].dims) / f.extent
            nbytes = Amount.of(rows, self.moves(access.operands[0].node))
            yield from [("all_reduce", nbytes)] * (4 if choice.grad else 2)

    def _first(self, edge: Edge) -> bool:
        return self._leaders[edge.key] is edge

    @cached_property
    def _leaders(self) -> dict[tuple[fx.Node, Layout], Edge]:
        """Edges with one key share one move."""
        out: dict[tuple[fx.Node, Layout], Edge] = {}
        for edge in self.flow.edges:
            if edge.moves:
                out.setdefault(edge.key, edge)
        return out

    def kept(self) -> dict[fx.Node, Amount]:
        """What every operator adds to the bytes kept: operands that none before it kept."""
        out: dict[fx.Node, Amount] = {}
        seen: set[tuple[fx.Node, Layout]] = set()
        weights = {w.node for w in self.flow.program.weights}
        for node in self.flow.program.graph.nodes:
            access = self.flow.description.accesses.get(node)
            if node not in self.flow.grads or access is None or _linear(access) or is_view(node):
                continue
            read = prices.kept_by(self.problem.choices[node])
            for edge in self.flow.into[node]:
                source = _root(edge.source)
                key = source, edge.need
                if edge.source in read and key not in seen and source.name not in weights and source.op != "get_attr":
                    seen.add(key)
                    nbytes = _value_bytes(edge) * _share(edge.dims, edge.need)
                    more = Amount.of(nbytes, self.moves(edge.source))
                    out[node] = out.get(node, Amount()) + more
        return out


def _linear(access: Access) -> bool:
    """Linear in all its operands together: its gradient needs none of them."""
    everything = set(range(len(access.operands)))
    return any(set(group) == everything for group in access.carries)


def is_view(node: fx.Node) -> bool:
    """No kernel: the operator's schema says that its result aliases its operand."""
    schema = getattr(node.target, "_schema", None)
    return schema is None or any(r.alias_info is not None for r in schema.returns)


def _root(node: fx.Node) -> fx.Node:
    """The value behind a chain of views."""
    while node.op == "call_function" and is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _until(nodes: Sequence[fx.Node], last: Sequence[int]) -> tuple[int, ...]:
    """The last reader of every value or of a view of it."""
    out = {n: max(i, at) for i, (n, at) in enumerate(zip(nodes, last, strict=True))}
    for node in reversed(nodes):
        sources = node.all_input_nodes
        if is_view(node) and sources and sources[0] in out:
            out[sources[0]] = max(out[sources[0]], out[node])
    return tuple(out[n] for n in nodes)


def _share(dims: Dims, layout: Layout) -> float:
    """The part of a value that the busiest rank holds in a layout."""
    dim = layout.split.dim(dims) if layout.split is not None else None
    if layout.split is None or dim is None:
        return 1.0
    return max(layout.split.sizes(dims[dim])) / dims[dim].size


def _value_bytes(edge: Edge) -> float:
    value = edge.source.meta.get("val")
    if not isinstance(value, Tensor):
        return 0.0
    return prices.bytes_of(edge.dims, value.dtype)


def _light(flow: Flow) -> dict[fx.Node, None]:
    """Values made from inputs, buffers and constants alone, with no gradient and little work:
    every stage makes them again (positions, masks, tables of sines)."""
    out: dict[fx.Node, None] = {}
    trained = {w.node for w in flow.program.weights if w.kind == "parameter"}
    for node in flow.program.graph.nodes:
        if node.op != "call_function" or node in flow.grads or is_random(node):
            continue
        free = all(
            s in out or s.op == "get_attr" or (s.op == "placeholder" and s.name not in trained)
            for s in node.all_input_nodes
        )
        if free and _nbytes(node) <= LIGHT:
            out[node] = None
    return out


def _needs(
    nodes: Sequence[fx.Node], output: fx.Node, light: Mapping[fx.Node, None], weights: Collection[str]
) -> tuple[tuple[str, ...], ...]:
    """Light values are made where they are read, and those that are given out in the last stage."""
    out = [() if n in light else tuple(_reads(n, light, weights)) for n in nodes]
    given = _reads(output, light, weights)
    return (*out[:-1], tuple(dict.fromkeys([*out[-1], *given]))) if out else ()


def _reads(node: fx.Node, light: Mapping[fx.Node, None], weights: Collection[str]) -> Sequence[str]:
    """Weights that a stage with this node needs: its own, and those of light values it reads."""
    found, queue = dict[str, None](), list(node.all_input_nodes)
    while queue:
        source = queue.pop()
        if source.op == "placeholder" and source.name in weights:
            found[source.name] = None
        elif source in light:
            queue += source.all_input_nodes
    return list(found)


def _nbytes(node: fx.Node) -> float:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return 0.0
    return float(prod(int(s) if isinstance(s, int) else 1 for s in value.shape)) * value.dtype.itemsize
