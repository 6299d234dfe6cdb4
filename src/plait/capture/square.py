"""Weights whose two dims are one factor: a product, and a residual behind it, tie them together.

    x + linear(x, w)      `* i, o i -> * o` and the sum says i = o: w is `d d`, a diagonal, and is split nowhere

Here the tie is cut behind the product: an alias takes its rows for rows of another factor, so that w
is `o d`, and what is split by o is gathered there. A bias that is read elsewhere too ties them before.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import fx

from plait.program import Program
from plait.rules.describe import Access, Description
from plait.rules.described import described
from plait.rules.equation import Dims, Factor, atoms
from plait.rules.views import CUT

alias = torch.ops.aten.alias.default


def cut(program: Program) -> Program:
    """With an alias behind the products of every such weight; before their biases too, where that is not enough."""
    for tie in (_behind, _before):
        d = described(program)
        weights = [n for n in program.graph.nodes if n.op == "placeholder" and n in d.dims]
        pairs = ((p, _twice(d.dims[w][0], d.accesses[p])) for w in weights for p in _products(w, d))
        found = {p: twice for p, twice in pairs if twice}
        if not found:
            break
        for node, twice in found.items():
            tie(program.graph, node, d, twice)
        program = program.with_()  # which is described anew
    return program


def _twice(dims: Dims, product: Access) -> frozenset[Factor]:
    """The factors that a weight could be split by, where every one is in several dims."""
    whole = {a for x in product.letters if x.property == "whole" for a in atoms(x.factor)}
    counts = Counter(a for f in dims for a in set(atoms(f)) - whole)
    return frozenset(counts) if min(counts.values(), default=0) > 1 else frozenset()


def _products(weight: fx.Node, d: Description) -> list[fx.Node]:
    """Where a weight, as it is or moved, first meets another value."""
    found: list[fx.Node] = []
    for user in weight.users:
        access = d.accesses.get(user)
        if access is not None and len(access.operands) == 1:
            found += _products(user, d)
        elif access is not None and "sum" in {x.property for x in access.letters}:
            found.append(user)
    return found


def _behind(graph: fx.Graph, node: fx.Node, d: Description, twice: frozenset[Factor]) -> None:
    with graph.inserting_after(node):
        new = _alias(graph, node, d.dims[node][0], twice)
    node.replace_all_uses_with(new, delete_user_cb=new.__ne__)


def _before(graph: fx.Graph, node: fx.Node, d: Description, twice: frozenset[Factor]) -> None:
    for bias in (o for o in d.accesses[node].operands if o.added and len(o.node.users) > 1):
        with graph.inserting_before(node):
            new = _alias(graph, bias.node, bias.dims, twice)
        node.replace_input_with(bias.node, new)


def _alias(graph: fx.Graph, x: fx.Node, dims: Dims, twice: frozenset[Factor]) -> fx.Node:
    new = graph.call_function(alias, (x,))
    new.meta = {**x.meta, CUT: tuple(i for i, f in enumerate(dims) if twice & set(atoms(f)))}
    return new
