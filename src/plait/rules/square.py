"""Weights whose two dims are one factor: a product, and a residual behind it, tie them together.

    x + linear(x, w)      `* i, o i -> * o` and the sum says i = o: w is `d d`, a diagonal, and is split nowhere

Here the tie is cut behind the product: an alias takes its rows for rows of another factor, so that w
is `o d`, and what is split by o is gathered there.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch import fx

from plait.rules.equation import Dims, Factor, atoms

if TYPE_CHECKING:
    from plait.program import Program
    from plait.rules.describe import Description

CUT = "cut"  # of an alias: the dims whose rows it takes for others
alias = torch.ops.aten.alias.default


def cut(program: Program, d: Description) -> bool:
    """Put an alias behind the products of every such weight; whether there were any."""
    found = {
        product: twice
        for node in program.graph.nodes
        if node.op == "placeholder" and node in d.dims and (twice := _twice(d.dims[node][0]))
        for product in _products(node, d)
    }
    made = [_cut(program.graph, node, d, twice) for node, twice in found.items()]
    return any(made)


def _twice(dims: Dims) -> frozenset[Factor]:
    """The factors of a value, where every one is in several dims."""
    counts = Counter(a for f in dims for a in set(atoms(f)))
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


def _cut(graph: fx.Graph, node: fx.Node, d: Description, twice: frozenset[Factor]) -> bool:
    if any(user.target is alias and CUT in user.meta for user in node.users):
        return False
    dims = tuple(i for i, f in enumerate(d.dims[node][0]) if twice & set(atoms(f)))
    with graph.inserting_after(node):
        new = graph.call_function(alias, (node,))
    new.meta = {**node.meta, CUT: dims}
    node.replace_all_uses_with(new, delete_user_cb=new.__ne__)
    return bool(dims)
