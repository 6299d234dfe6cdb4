"""What every rank keeps whole of the weights, and why: no replica goes unsaid.

A dim is split where its factor can be: it has a row for every rank, and no operator that reads the
weight, itself or through views and casts of it alone, needs all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from torch import fx

from plait.passes.partition import Local
from plait.plan.plan import Kept
from plait.program import Weight
from plait.rules.describe import Access, Description
from plait.rules.equation import atoms
from plait.rules.split import Split

CHEAPER = "splitting it would cost more than it saves"
UNREAD = "no operator reads it"
DIAGONAL = "what reads it ties its rows to one another or to its columns: one factor stands in it twice"


def kept(local: Local, unused: tuple[Weight, ...], graph: fx.Graph, d: Description, n: int) -> tuple[Kept, ...]:
    """Of a program on an axis of `n` ranks; `local` is what one of them runs."""
    if n == 1:
        return ()
    nodes = {x.name: x for x in graph.find_nodes(op="placeholder")}
    found = [
        Kept(s.weight.name, _nbytes(s.weight), _why(nodes[s.weight.node], d, n))
        for s in local.shares
        if s.layout.split is None
    ]
    return (*found, *(Kept(w.name, _nbytes(w), UNREAD) for w in unused))


def _nbytes(weight: Weight) -> int:
    return prod(weight.shape) * weight.dtype.itemsize


def _why(node: fx.Node, d: Description, n: int) -> str:
    dims = d.dims[node][0]
    own = dict.fromkeys(a for f in dims for a in atoms(f) if a.size > 1)
    long = [a for a in own if a.size >= n]
    if not long:
        return f"no dim has a row for each of {n} ranks"
    bars = {a: DIAGONAL for a in long if not Split.even((a,), n).splittable(dims)}
    for access, reader in _readers(node, d):
        for letter in access.letters:
            if letter.property == "whole":
                reason = letter.reason or f"{reader.target} needs all of it"
                bars |= {a: reason for a in atoms(letter.factor) if a not in bars}
    if not all(a in bars for a in long):
        return CHEAPER
    return "; ".join(dict.fromkeys(bars[a] for a in long))


def _readers(node: fx.Node, d: Description) -> Iterator[tuple[Access, fx.Node]]:
    """Where the weight meets something else, or leaves the program."""
    for user in node.users:
        access = d.accesses.get(user)
        if access is None:
            continue
        yield access, user
        if len(access.operands) == 1 and len(access.results) == 1:
            yield from _readers(user, d)
