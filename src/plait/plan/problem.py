"""The planner's view of a described program: choices per node, edges with layouts as keys.

A `Key` spells a layout relative to one value: `whole`, `copied`, `partial(sum)`, `shard(0)`,
`shard(0,2)` where the numbers count the free factors of that value's dims. So equal layers have
equal keys, whatever their factors are called, and can share variables.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from plait.plan.looks import Looks, look
from plait.program import Program
from plait.rules.describe import Access, Description, Letter, Operand
from plait.rules.equation import Dims, Factor, atoms
from plait.rules.layout import WHOLE, Layout, Strategy, shard, strategies
from plait.rules.split import Split

Key = str


@dataclass(frozen=True)
class Choice:
    """One node: its strategies, and what prices need to know of its values."""

    node: fx.Node
    strategies: tuple[Strategy, ...]
    results: tuple[Dims, ...]
    dtypes: tuple[torch.dtype, ...]
    grad: bool
    look: int = -1  # nodes of one look differ in the names of their factors alone; -1: a look of its own
    access: Access | None = None
    learns: tuple[bool, ...] = ()  # to which operands a gradient comes, in a call like the example
    weight: bool = False
    free: bool = False  # a constant or an input: no work
    forbidden: frozenset[int] = frozenset()  # of a weight that is loaded for another program
    index: int = 0  # which result a conversion is about

    def for_result(self, index: int) -> Choice:
        if index == self.index:
            return self
        return replace(self, index=index)


@dataclass(frozen=True)
class Edge:
    """`have[i]`: what the producer's strategy i gives; `need[j]`: what the consumer's j asks."""

    producer: fx.Node
    consumer: fx.Node
    result: int
    slot: int
    have: tuple[Key, ...]
    need: tuple[Key, ...]


@dataclass
class Problem:
    n: int
    choices: dict[fx.Node, Choice]
    edges: list[Edge]
    splits: tuple[Split, ...]


def candidate_splits(d: Description, n: int) -> tuple[Split, ...]:
    """Every factor with at least `n` rows, and the fused runs where that balances better."""
    single = [
        Split.even((f,), n) for f in d.factors.values() if f.size >= n and f not in d.symbolic
    ]
    fused = [
        Split.even(run, n, ordinal)
        for ordinal, run in enumerate(d.fused)
        if run[0].size % n and run[0].size * run[1].size >= n and not d.symbolic & set(run)
    ]
    return tuple(single + fused)


def key(layout: Layout, dims: Dims, grad: bool) -> Key:
    """The spelling of a layout relative to a value with `dims`."""
    if layout.split is None:
        return "whole" if layout.kind == "copied" and not grad else str(layout)
    order = list(dict.fromkeys(atom for f in dims for atom in atoms(f)))
    at = [str(order.index(f)) for f in layout.split.factors if f in order]
    run = layout.split
    others = "" if len(run.factors) == 1 else f"/{len(run.factors)}"
    return f"shard({','.join(at)}{others})"


def build(program: Program, d: Description, n: int) -> Problem:
    """Choices and edges of a program on an axis of `n` ranks."""
    splits = candidate_splits(d, n)
    grads, asked = program.differentiable(), program.differentiable(asked=True)
    by_atom: dict[Factor, list[Split]] = {}
    for split in splits:
        for f in split.factors:
            by_atom.setdefault(f, []).append(split)
    weights = {w.node for w in program.weights}
    looks = Looks()
    choices: dict[fx.Node, Choice] = {}
    for node in program.graph.nodes:
        if node not in d.dims or node.op == "get_attr":
            continue
        grad, access = node in grads, d.accesses.get(node)
        if access is None:
            choices[node] = _given(node, d.dims[node], grad, by_atom if node.name in weights else None, looks)
        else:
            learns = tuple(o.node in asked for o in access.operands)
            choices[node] = _made(node, access, grad, learns, _near(access, by_atom), looks)
    output = next(iter(reversed(program.graph.nodes)))
    choices[output] = _output(output, d)
    return Problem(n, choices, list(_edges(choices)), splits)


def _given(
    node: fx.Node, results: tuple[Dims, ...], grad: bool, by_atom: dict[Factor, list[Split]] | None, looks: Looks
) -> Choice:
    """A weight, which any of the splits of its factors may cut; or an input (`by_atom` is None)."""
    (dims,), dtypes = results, (node.meta["val"].dtype,)
    near = _unique(dims, by_atom or {})
    mine = look((by_atom is not None, grad), results, dtypes, None, near)
    number, found = looks.strategies(mine, near, None, lambda: _sources(dims, near))
    return Choice(node, found, results, dtypes, grad, number, weight=by_atom is not None, free=True)


def _made(
    node: fx.Node, access: Access, grad: bool, learns: tuple[bool, ...], near: list[Split], looks: Looks
) -> Choice:
    dtypes = _dtypes(node) if access.results else ()
    of_operands = dtypes if node.target is operator.getitem else tuple(_dtypes(o.node)[0] for o in access.operands)

    def find() -> tuple[Strategy, ...]:
        return tuple(s for s in strategies(access, near, grad) if _adds(s, (*of_operands, *dtypes), grad))

    mine = look((str(node.target), grad, learns), access.results, (*of_operands, *dtypes), access, near)
    number, found = looks.strategies(mine, near, access, find)
    return Choice(node, found, access.results, dtypes, grad, number, access, learns)


def _sources(dims: Dims, near: Sequence[Split]) -> tuple[Strategy, ...]:
    """What a weight may be: whole, or stored in shares."""
    found = [Strategy("whole", (), (WHOLE,))]
    for split in near:
        if split.splittable(dims) and split.dim(dims) is not None:
            found.append(Strategy(f"split({split.name})", (), (shard(split),), split))
    return tuple(found)


def _unique(dims: Dims, by_atom: dict[Factor, list[Split]]) -> list[Split]:
    order = dict.fromkeys(atom for f in dims for atom in atoms(f))
    return list(dict.fromkeys(s for atom in order for s in by_atom.get(atom, ())))


def _near(access: Access, by_atom: dict[Factor, list[Split]]) -> list[Split]:
    """The splits that touch a node, in the order of its own factors."""
    dims: list[Factor] = [f for o in access.operands for f in o.dims]
    dims += [f for r in access.results for f in r]
    dims += [letter.factor for letter in access.letters]
    return _unique(tuple(dims), by_atom)


def _adds(s: Strategy, dtypes: Sequence[torch.dtype], grad: bool) -> bool:
    """Whether parts that will be summed, of values or of their gradients, are of a dtype that torch can add."""
    summed = ("partial", "copied") if grad else ("partial",)
    return not any(
        layout.kind in summed and dtype.is_floating_point and dtype.itemsize == 1
        for layout, dtype in zip((*s.operands, *s.results), dtypes, strict=True)
    )


def _dtypes(node: fx.Node) -> tuple[torch.dtype, ...]:
    value = node.meta["val"]
    values = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(v.dtype if isinstance(v, torch.Tensor) else torch.int64 for v in values)


def _output(node: fx.Node, d: Description) -> Choice:
    """The caller gets whole values on every rank."""
    operands = tuple(
        Operand(n, d.dims[n][0]) for n in node.all_input_nodes if n in d.dims and n.op != "get_attr"
    )
    letters = tuple(Letter(f, "whole") for o in operands for f in o.dims)
    access = Access(operands, (), letters)
    whole = Strategy("whole", (WHOLE,) * len(operands), ())
    return Choice(node, (whole,), (), (), False, access=access, free=True)


def _edges(choices: dict[fx.Node, Choice]) -> Iterator[Edge]:
    """Keys count factors as looks do, so they are spelled once for each look."""
    known: dict[tuple[int, int, bool], tuple[Key, ...]] = {}

    def spelled(layouts: Iterable[Layout], dims: Dims, grad: bool, look: int, at: int) -> tuple[Key, ...]:
        keys = known.get((look, at, grad))
        if keys is None:
            keys = tuple(key(layout, dims, grad) for layout in layouts)
            if look >= 0:
                known[look, at, grad] = keys
        return keys

    for choice in choices.values():
        for slot, operand in enumerate(choice.access.operands if choice.access is not None else ()):
            producer = choices.get(operand.node)
            if producer is None:
                continue
            result = choice.node.args[1] if len(producer.results) > 1 else 0
            assert isinstance(result, int)
            dims, grad = producer.results[result], producer.grad
            have = spelled((s.results[result] for s in producer.strategies), dims, grad, producer.look, ~result)
            mine = choice.look if dims is operand.dims else -1
            need = spelled((s.operands[slot] for s in choice.strategies), dims, grad, mine, slot)
            yield Edge(operand.node, choice.node, result, slot, have, need)


__all__ = ["Choice", "Edge", "Key", "Problem", "build", "key"]
