"""Classes of nodes that look alike: the layers of a model share their variables in the plan.

Colour refinement: a node's first colour is its look (looks.py: operator, shapes, factors by local number);
each round adds the colours of its producers and consumers. A few rounds tell
the first and the last layer's boundary from the middle, and leave all middle layers one class.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping

from torch import fx

from plait.plan.problem import Problem

ROUNDS = 3


def classes(problem: Problem, rounds: int = ROUNDS) -> dict[fx.Node, int]:
    """The class of every node, numbered in order of appearance."""
    colours = _number({node: (c.look, tuple(sorted(c.forbidden))) for node, c in problem.choices.items()})
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
