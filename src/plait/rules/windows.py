"""Rules of the operators that slide windows over the last dims: convolutions, pooling, resizing, padding."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import fx

from plait.rules.describe import Access, Describer, Letter, Rule, bind, rebind
from plait.rules.equation import product
from plait.rules.rule import is_tensor, outputs
from plait.rules.split import Split
from plait.rules.views import moved


def convolution(d: Describer, node: fx.Node) -> Access:
    """`b (g c) l, (g o) c w, (g o) -> b (g o) l'`: g and o parallel, c summed, l and w whole.

    Transposed, the weight is `(g c) o w`; without a batch there is no b.
    """
    bound = bind(node)
    x, weight = d.operand(bound["input"]), d.operand(bound["weight"])
    spatial = len(weight.dims) - 2
    lead = len(x.dims) - spatial - 1  # dims before the channels
    channel, sizes = x.dims[lead], d.sizes(node)
    groups = bound["groups"]
    g, c, o = (d.fresh(n) for n in (groups, channel.size // groups, sizes[lead] // groups))
    inner, outer = product((g, c)), product((g, o))
    back = bool(bound.get("transposed"))
    ties = [(channel, inner), (weight.dims[0], inner if back else outer), (weight.dims[1], o if back else c)]
    operands = [x, weight]
    if is_tensor(bound.get("bias")):
        operands.append(d.operand(bound["bias"], added=True))
        ties.append((operands[-1].dims[0], outer))
    for f, to in ties:
        conflict = d.tie(node, f, to) if f.size > 1 else None
        if conflict:
            return d.whole(node, str(conflict))
    rows = d.fresh_dims(node)[lead + 1 :]
    letters = [Letter(f, "parallel") for f in (*x.dims[:lead], g, o) if f.size > 1]
    letters += [Letter(c, "sum")] if c.size > 1 else []
    letters += [Letter(f, "whole", SPANNED) for f in (*x.dims[lead + 1 :], *weight.dims[2:], *rows)]

    def local(node: fx.Node, split: Split, rank: int) -> Any:
        return rebind(node, groups=split.size(g, rank)) if split.touches(g) else rebind(node)

    result = (*x.dims[:lead], outer, *rows)
    return Access(tuple(operands), (result,), tuple(letters), ((0,),), local)


def windows(spatial: int) -> Rule:
    """Pooling, resizing: `* l -> * m`, the last `spatial` dims whole and new, the others parallel."""

    def rule(d: Describer, node: fx.Node) -> Access:
        operand = d.operand(node.all_input_nodes[0])
        lead = len(operand.dims) - spatial
        results = tuple(
            (*operand.dims[:lead], *d.fresh_dims(node, i)[lead:]) for i in range(outputs(node))
        )
        letters = [Letter(f, "parallel") for f in operand.dims[:lead] if f.size > 1]
        for dims in (operand.dims, *results):
            letters += [Letter(f, "whole", SPANNED) for f in dims[lead:]]
        return Access((operand,), results, tuple(letters))

    rule.__doc__ = f"`* {spatial}l -> * {spatial}m`: windows of the last {spatial}, which are whole and new"
    return rule


def unfold(d: Describer, node: fx.Node) -> Access:
    """`* l * -> * m * k`: m windows of k, both new and l whole, the others parallel."""
    dims, new = d.operand(bind(node)["self"]).dims, d.fresh_dims(node)
    at = bind(node)["dimension"] % max(1, len(dims))
    letters = [Letter(f, "parallel") for i, f in enumerate(dims) if i != at and f.size > 1]
    letters += [Letter(f, "whole", SPANNED) for f in (*dims[at : at + 1], new[at], new[-1])]
    return moved(d, node, (*dims[:at], *new[at : at + 1], *dims[at + 1 :], new[-1]), letters=letters)


def patches(d: Describer, node: fx.Node) -> Access:
    """im2col, col2im: `b c h w <-> b (c k) l`, k the places of a window: b and c parallel."""
    x, sizes = d.operand(bind(node)["self"]), d.sizes(node)
    if len(x.dims) != (4 if "im2col" in str(node.target) else 3) or len(sizes) < 3:
        return d.whole(node, "patches without a batch")
    k = d.fresh(prod(bind(node)["kernel_size"]))
    many, few = (None, x.dims[1]) if len(sizes) == 3 else (x.dims[1], d.fresh(sizes[1]))
    conflict = d.tie(node, many, product((few, k))) if many is not None else None
    if conflict:
        return d.whole(node, str(conflict))
    new = d.fresh_dims(node)
    result = (x.dims[0], product((few, k)) if many is None else few, *new[2:])
    letters = [Letter(f, "parallel") for f in (x.dims[0], few) if f.size > 1]
    letters += [Letter(f, "whole", SPANNED) for f in (k, *x.dims[2:], *new[2:])]
    return Access((x,), (result,), tuple(letters), ((0,),))


SPANNED = "windows span it"
