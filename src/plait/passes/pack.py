"""Pack: matmuls that read one value become one, over weights that lie one behind the other in memory.

    q = x Wq^T    k = x Wk^T    v = x Wv^T            [q k v] = x [Wq; Wk; Wv]^T

Their equation is `* i, o i -> * o` and i is the same factor, since x is the same value; so the o of all of
them are the segments of one sum. No weight is copied: each stays a parameter of its own, whose rows follow
those of the one before it (`run_of`), and what reads them all together is a view (`ops.joined`). A rank's
rows of every weight are its own, so uneven shares need no rule of their own.

    find     the packs that a plan could make, read from equations and layouts
    merge    those that it chose, in the program of a rank
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from plait.passes import ops
from plait.passes.overlap.flow import Flow
from plait.passes.partition import Local
from plait.rules.layout import COPIED, WHOLE, Layout

aten = torch.ops.aten
Names = tuple[str, ...]  # of weights, as the user knows them


@dataclass(frozen=True)
class Pack:
    """`matmuls` that read `x` in one layout, and the names of their weights."""

    x: fx.Node
    matmuls: tuple[fx.Node, ...]
    weights: Names


def find(flow: Flow) -> list[Pack]:
    """Packs of disjoint weights, in the order of the program; the same weights may be used again."""
    names = {w.node: w.name for w in flow.program.weights if w.kind == "parameter"}
    groups: dict[tuple[fx.Node, Layout, bool, torch.dtype], dict[Names, fx.Node]] = {}
    for node in flow.program.graph.nodes:
        if _by_weights(flow, node, names):
            x, weight, *bias = flow.description.accesses[node].operands
            need = _layout(flow, x.node, flow.strategies[node].operands[0])
            key = (x.node, need, bool(bias), weight.node.meta["val"].dtype)
            mine = tuple(names[o.node.name] for o in (weight, *bias))
            groups.setdefault(key, {}).setdefault(mine, node)
    taken: dict[str, Names] = {}
    out = []
    for key, found in groups.items():
        pack, every = tuple(mine[0] for mine in found), [name for mine in found for name in mine]
        alone = len(set(every)) == len(every) and all(taken.get(n, pack) == pack for n in every)
        if len(pack) > 1 and alone:
            taken |= dict.fromkeys(every, pack)
            out.append(Pack(key[0], tuple(found.values()), pack))
    return out


def merge(local: Local, packs: Iterable[Names]) -> None:
    """Rewrite `local`: each of `packs` whose matmuls all read one value is one call.

    What a rank keeps in one run of memory is noted in `local.runs`.
    """
    names = {share.weight.node: share.weight.name for share in local.shares}
    of = {name: pack for pack in packs for name in pack}
    groups: dict[tuple[fx.Node, Names], dict[str, fx.Node]] = {}
    for node in local.graph.nodes:
        weight = _known(node.args[1], names) if node.target is aten.linear.default else None
        if weight in of:
            groups.setdefault((node.args[0], of[weight]), {}).setdefault(weight, node)
    runs: dict[Names, None] = {}
    for (x, pack), found in groups.items():
        if len(found) == len(pack):
            matmuls = [found[name] for name in pack]
            runs |= dict.fromkeys(_merge(local.graph, x, matmuls, names))
    local.runs = tuple(runs)


def _by_weights(flow: Flow, node: fx.Node, names: Mapping[str, str]) -> bool:
    """Whether it is a matmul by weights alone, whose sum no rank has only a term of."""
    access = flow.access(node)
    if access is None or node.target is not aten.linear.default:
        return False
    whole = flow.strategies[node].results[0].kind != "partial"
    return whole and all(o.node.name in names for o in access.operands[1:])


def _layout(flow: Flow, node: fx.Node, need: Layout) -> Layout:
    return WHOLE if need == COPIED and node not in flow.grads else need


def _known(node: object, names: Mapping[str, str]) -> str | None:
    """The weight that a node of a rank's program is, seen through moves that change no value."""
    while isinstance(node, fx.Node) and node.op == "call_module":
        (node,) = node.all_input_nodes
    return names.get(str(node.target)) if isinstance(node, fx.Node) and node.op == "placeholder" else None


def _merge(
    graph: fx.Graph, x: fx.Node, matmuls: Sequence[fx.Node], names: Mapping[str, str]
) -> Iterator[Names]:
    """The runs that it reads. It stands where the first of `matmuls` stood: the others await no more."""
    first = min(matmuls)  # nodes are ordered as they stand in their graph
    rows = [[a for a in m.args[1:] if isinstance(a, fx.Node)] for m in matmuls]
    for node in (n for row in rows for n in row):
        hoist(node, first)
    columns = [list(column) for column in zip(*rows, strict=True)]
    with graph.inserting_before(first):
        every = graph.call_function(ops.packed_linear, (x, *columns))
        every.meta.update(first.meta)
        parts = [graph.call_function(operator.getitem, (every, i)) for i in range(len(matmuls))]
    for matmul, part in zip(matmuls, parts, strict=True):
        part.meta.update(matmul.meta)
        matmul.replace_all_uses_with(part)
        graph.erase_node(matmul)
    for column in columns:
        yield tuple(str(_known(node, names)) for node in column)


def hoist(node: fx.Node, before: fx.Node) -> None:
    """Move a weight's identity, whose dual sums its gradients, up to `before`, where it stands too late."""
    if node > before:
        for needed in node.all_input_nodes:
            hoist(needed, before)
        before.prepend(node)
