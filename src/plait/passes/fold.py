"""Fold: evaluate once what depends on no parameter, no input and no symbolic size."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from plait.program import Program


def fold(program: Program, values: dict[str, torch.Tensor]) -> Program:
    """`values`: placeholders whose values are known."""
    known: dict[fx.Node, Any] = {}
    graph = program.graph
    for node in graph.nodes:
        if node.op == "placeholder" and node.name in values:
            known[node] = values[node.name].cpu()
        elif node.op == "call_function" and _foldable(node, known):
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: known[n])
            kwargs = dict(kwargs)
            if "device" in kwargs:
                kwargs["device"] = torch.device("cpu")
            known[node] = node.target(*args, **kwargs)
    constants = dict(program.constants)
    kept = {w.node for w in program.weights if w.kind == "buffer" and w.persistent}
    for node, value in known.items():
        users = [u for u in node.users if u not in known]
        if not users or not isinstance(value, torch.Tensor) or node.name in kept:
            continue
        name = f"constant_{len(constants)}"
        constants[name] = _compact(value)
        with graph.inserting_before(_spot(node)):
            get = graph.create_node("get_attr", name, name=name)
            get.meta = dict(node.meta, val=constants[name].to("meta"))
        if constants[name].shape != value.shape:
            with graph.inserting_before(_spot(node)):
                c = get
                get = graph.call_function(torch.ops.aten.expand.default, (c, list(value.shape)))
                get.meta = dict(node.meta)
        for user in users:
            user.replace_input_with(node, get)
    graph.eliminate_dead_code()
    live = {n.name for n in graph.nodes if n.op == "placeholder" and n.users}
    dead = [w for w in program.weights if w.node not in live]
    for node in list(graph.nodes):
        if node.op == "placeholder" and node.name in {w.node for w in dead}:
            graph.erase_node(node)
    first = next(n for n in graph.nodes if n.op != "placeholder")
    for node in list(graph.nodes):
        if node.op == "get_attr" and node is not first:
            first.prepend(node)
    return program.with_(
        weights=tuple(w for w in program.weights if w.node in live),
        unused=program.unused + tuple(dead),
        constants=constants,
    )


def _foldable(node: fx.Node, known: dict[fx.Node, Any]) -> bool:
    if not all(n in known for n in node.all_input_nodes):
        return False
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded not in tags


def _spot(node: fx.Node) -> fx.Node:
    while node.op == "placeholder":
        node = node.next
    return node


def _compact(value: torch.Tensor) -> torch.Tensor:
    for dim, size in enumerate(value.shape):
        if size > 1 and bool((value == value.narrow(dim, 0, 1)).all()):
            value = value.narrow(dim, 0, 1)
    return value.contiguous()
