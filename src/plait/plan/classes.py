"""Classes of nodes that look alike: the layers of a model share their variables in the plan.

Colour refinement: a node's first colour is its own description (operator, shapes, factors by local
number, strategies); each round adds the colours of its producers and consumers. A few rounds tell
the first and the last layer's boundary from the middle, and leave all middle layers one class.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping

from torch import fx

from plait.plan.problem import Choice, Problem
from plait.rules.equation import Dims, Factor, flatten

ROUNDS = 3


def classes(problem: Problem, rounds: int = ROUNDS) -> dict[fx.Node, int]:
    """The class of every node, numbered in order of appearance."""
    colours = _number({node: _own(choice) for node, choice in problem.choices.items()})
    before: dict[fx.Node, list[tuple[int, int, fx.Node]]] = defaultdict(list)
    after: dict[fx.Node, list[tuple[int, int, fx.Node]]] = defaultdict(list)
    for e in problem.edges:
        before[e.consumer].append((e.slot, e.result, e.producer))
        after[e.producer].append((e.slot, e.result, e.consumer))
    for _ in range(rounds):
        colours = _number(
            {
                node: (
                    colours[node],
                    tuple((s, r, colours[p]) for s, r, p in before[node]),
                    tuple(sorted((s, r, colours[c]) for s, r, c in after[node])),
                )
                for node in colours
            }
        )
    return colours


def leaders(tied: Mapping[fx.Node, int]) -> dict[int, fx.Node]:
    """The first node of every class."""
    first: dict[int, fx.Node] = {}
    for node, c in tied.items():
        first.setdefault(c, node)
    return first


def _number(colours: dict[fx.Node, Hashable]) -> dict[fx.Node, int]:
    names: dict[Hashable, int] = {}
    return {node: names.setdefault(c, len(names)) for node, c in colours.items()}


def _own(choice: Choice) -> Hashable:
    """What a node is by itself, with its factors numbered in order of appearance."""
    numbers: dict[Factor, int] = {}
    access = choice.access
    dims = [o.dims for o in access.operands] if access else []
    dims += list(choice.results)
    letters = [(x.property, _shape(x.factor, numbers)) for x in access.letters] if access else []
    return (
        str(choice.node.target) if choice.node.op != "placeholder" else choice.weight,
        choice.dtypes,
        choice.grad,
        choice.learns,
        tuple(_dims(d, numbers) for d in dims),
        tuple(letters),
        tuple(
            (s.label.split("(")[0], s.split and tuple(numbers.get(f, -1) for f in s.split.factors))
            for s in choice.strategies
        ),
        tuple(sorted(choice.forbidden)),
    )


def _dims(dims: Dims, numbers: dict[Factor, int]) -> Hashable:
    return tuple(_shape(f, numbers) for f in dims)


def _shape(f: Factor, numbers: dict[Factor, int]) -> Hashable:
    f = f.root()
    if f.kind == "free":
        return (f.size, numbers.setdefault(f, len(numbers)) if f.size > 1 else -1)
    if f.kind == "prod":
        return ("*", tuple(_shape(p, numbers) for p in flatten(f)))
    return ("+", tuple(_shape(p, numbers) for p in f.parts))
