"""Meanwhile: gradients of weights, computed while the gradient of what they multiplied is on its way.

A value that comes to all ranks has a gradient with a term from each of them. Its move back begins as soon as
the matmuls that read the value have given theirs, and nothing waits for the gradients of the weights:

    y = linear(move(x), w)        back: dx | move of dx        | what x was made of
                                             dw, and dw owed from before

In the graph a move is started and awaited apart (runtime/streams.py), with a `Pay` between its halves, whose
backward computes what the `Late` matmuls (late.py) behind it owe. Their weights are inputs of the `Pay`, so
gradients come to them by autograd's own ways, whoever asks for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable

from plait.passes import ops
from plait.passes.late import Queue, postpone
from plait.passes.pack import hoist
from plait.passes.partition import Local

aten = torch.ops.aten
MATMULS = {  # and the place of the data among their arguments
    aten.linear.default: 0,
    ops.packed_linear: 0,
    aten.mm.default: 0,
    aten.addmm.default: 1,
}


def weights(local: Local) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """Of every matmul that meets data with weights to be trained: these, or what moves make of them."""
    known = {node for node in local.graph.nodes if node.op == "placeholder"} & _trained(local)
    for node in local.graph.nodes:  # a weight as it comes, or through its own moves
        if node.op == "call_module" and known.issuperset(node.all_input_nodes):
            known.add(node)
    out = {}
    for node in local.graph.nodes:
        mine = tuple(dict.fromkeys(i for i in node.all_input_nodes if i in known))
        if mine and node.target in MATMULS and node.args[MATMULS[node.target]] not in known:
            out[node] = mine
    return out


def pay(local: Local, owed: Mapping[str, Sequence[str]]) -> dict[str, nn.Module]:
    """Rewrite `local`: site -> names of the matmuls whose weights' gradients are computed beside its move back.

    Returns the modules that the graph calls now, but for the halves of the moves.
    """
    nodes = {node.name: node for node in local.graph.nodes}
    places = {str(node.target): node for node in local.graph.nodes if node.op == "call_module"}
    of = weights(local)
    made: dict[str, nn.Module] = {}
    for name, matmuls in owed.items():
        late = [nodes[m] for m in matmuls]
        made |= _pay(local, places[name], late, list(dict.fromkeys(w for m in late for w in of[m])))
    return made


def _pay(local: Local, move: fx.Node, late: Sequence[fx.Node], known: Sequence[fx.Node]) -> dict[str, nn.Module]:
    graph, name = local.graph, str(move.target)
    for weight in known:
        hoist(weight, move)
    with graph.inserting_before(move):
        start = graph.call_module(f"{name}.start", move.args)
        both = graph.call_module(f"{name}.pay", (start, *known))
        wait = graph.call_module(f"{name}.wait", (both,))
        queue = graph.call_function(getattr, (both, "queue"))
    wait.meta.update(move.meta)
    move.replace_all_uses_with(wait)
    graph.erase_node(move)
    local.sites[name] = replace(local.sites[name], of=name)
    made: dict[str, nn.Module] = {f"{name}.pay": Pay()}
    for matmul in late:
        postponed = postpone(graph, matmul, queue, known)
        made[f"late_{matmul.name}"] = postponed
    return made


def _trained(local: Local) -> set[fx.Node]:
    names = {share.weight.node for share in local.shares if share.weight.requires_grad}
    return {node for node in local.graph.nodes if node.name in names}


class Pay(nn.Module):
    """Between the halves of a move: its backward computes what the matmuls behind it owe."""

    def forward(self, underway: Any, *known: Tensor) -> Any:
        if underway.token is None or not any(w.requires_grad for w in known):
            return underway
        queue = Queue()
        token, queue.anchor = _Pay.apply(queue.owed, underway.token, *known)  # type: ignore[no-untyped-call]
        return replace(underway, token=token, queue=queue)


class _Pay(torch.autograd.Function):
    """The anchor goes into every late matmul: so autograd comes here only when all of these are done."""

    @staticmethod
    def forward(ctx: Any, owed: list[Any], token: Tensor, *known: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.owed, ctx.places = owed, {id(w): i for i, w in enumerate(known)}
        return token.view_as(token), token.new_empty(0)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, token: Tensor | None, anchor: Tensor | None) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = [None] * len(ctx.places)
        while ctx.owed:
            o = ctx.owed.pop(0)
            for w, g in zip(o.weights, o.gradients(), strict=True):
                i = ctx.places[id(w)]
                known = found[i]
                found[i] = g if known is None else known if g is None else known + g
        return None, token, *found
