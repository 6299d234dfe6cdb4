"""Chains: runs of element-wise operators of a rank's program that can be one kernel.

    linear ─ silu ─┐                       linear ─┐
                   mul ─ linear     ->             chain ─ linear
    linear ────────┘                       linear ─┘

In training a chain may reduce rows as well: norms are not one kernel there, and on the way back a chain is
computed again from what it read.

An element-wise operator may run anywhere between what it reads and what reads it, so each is first moved
down to its first reader; chains are then what stands together. Nothing else moves, so the order of
collectives stays.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

# Element-wise or a rearrangement, without the tag that says so.
MORE = (
    aten.cat.default,
    aten.repeat_interleave.self_int,
    aten._to_copy.default,
    aten.stack.default,
)
# Of rows, as norms have them.
REDUCTIONS = (
    aten.mean.dim,
    aten.sum.dim_IntList,
    aten.var.correction,
    aten.layer_norm.default,
    aten.native_layer_norm.default,
    aten.rms_norm.default,
)


def chains(graph: fx.Graph, also: Collection[Any] = ()) -> list[Chain]:
    """Of two kernels or more, in the order of the program; `graph` is sorted for them. `also`: targets that may
    stand in them beside what is element-wise."""
    _late(graph, also)
    found, run = list[Chain](), list[fx.Node]()
    for node in graph.nodes:
        if joins(node, also):
            run.append(node)
            continue
        if sum(computes(n, also) for n in run) > 1:
            found.append(Chain(tuple(run)))
        run = []
    return found


def reads(node: fx.Node, x: fx.Node, fused: Collection[fx.Node]) -> bool:
    """Whether `node` reads its operand `x` from memory, where `fused` nodes are parts of chains."""
    if node not in fused:
        return True
    while joins(x) and not computes(x):
        (x,) = x.all_input_nodes[:1]
    return x not in fused


def writes(node: fx.Node, fused: Collection[fx.Node]) -> bool:
    """Whether the result of `node` goes to memory."""
    front = [node] if node in fused else []
    while front:
        for user in front.pop().users:
            if joins(user) and not computes(user):
                front.append(user)
            elif user not in fused:
                return True
    return node not in fused


def computes(node: fx.Node, also: Collection[Any] = ()) -> bool:
    """A kernel of its own, of one element at a time or as good as, or one of `also`."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    known = _element_wise(node.target) or node.target in also
    return known and not node.target._schema.is_mutable and _of_tensors(node)


@cache
def _element_wise(target: torch._ops.OpOverload) -> bool:
    tags = target.tags
    return target in MORE or (torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags)


def joins(node: fx.Node, also: Collection[Any] = ()) -> bool:
    """May stand in a chain."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return joins(node.args[0], also)  # type: ignore[arg-type]
    view = isinstance(node.target, torch._ops.OpOverload) and node.target.is_view
    return computes(node, also) or (view and _of_tensors(node))


def _of_tensors(node: fx.Node) -> bool:
    """Reads what an earlier node made; a factory would not be known by its inputs."""
    return bool(node.all_input_nodes)


def _late(graph: fx.Graph, also: Collection[Any]) -> None:
    """Every operator that may join a chain just before the first other one that needs it.

    What is read of a tuple comes right behind it, so that it parts no chain; what nobody reads goes.
    """
    for node in reversed(list(graph.nodes)):
        if joins(node, also) and not node.users:
            graph.erase_node(node)
    order = {node: i for i, node in enumerate(graph.nodes)}
    end, placed = graph.find_nodes(op="output")[0], set[fx.Node]()

    def place(node: fx.Node) -> None:
        if node not in placed and node is not end:
            placed.add(node)
            end.prepend(node)

    for node in sorted(order, key=lambda n: (n.op not in ("placeholder", "get_attr"), order[n])):
        if joins(node, also):
            continue
        for needed in sorted(_needed(node, also), key=order.__getitem__):
            place(needed)
        place(node)
        for part in [u for u in node.users if u.target is operator.getitem and not joins(u, also)]:
            place(part)


def _needed(node: fx.Node, also: Collection[Any]) -> set[fx.Node]:
    """What can join a chain, of all that `node` reads and what that reads in turn."""
    found, front = set[fx.Node](), [node]
    while front:
        new = [i for i in front.pop().all_input_nodes if joins(i, also) and i not in found]
        found |= set(new)
        front += new
    return found


@dataclass(frozen=True)
class Chain:
    nodes: tuple[fx.Node, ...]

    @property
    def inputs(self) -> list[fx.Node]:
        mine = set(self.nodes)
        return list(dict.fromkeys(i for n in self.nodes for i in n.all_input_nodes if i not in mine))

    @property
    def outputs(self) -> list[fx.Node]:
        mine = set(self.nodes)
        return [n for n in self.nodes if any(u not in mine for u in n.users)]

    def text(self) -> str:
        """The same for chains that compute the same of their inputs."""
        names = {n: f"${i}" for i, n in enumerate(self.inputs)}
        names |= {n: f"%{i}" for i, n in enumerate(self.nodes)}
        lines = [f"{names[n]} = {n.target} {_spelled((n.args, n.kwargs), names)}" for n in self.nodes]
        return "\n".join([*lines, f"return {[names[n] for n in self.outputs]}"])

    def module(self) -> fx.GraphModule:
        graph = fx.Graph()
        copies = {n: graph.placeholder(f"x{i}") for i, n in enumerate(self.inputs)}
        for node in self.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[n] for n in self.outputs))
        return fx.GraphModule({}, graph)

    def replace(self, target: str) -> None:
        graph, outputs = self.nodes[0].graph, self.outputs
        with graph.inserting_after(self.nodes[-1]):
            every = graph.call_module(target, tuple(self.inputs))
        for i, node in reversed(list(enumerate(outputs))):
            with graph.inserting_after(every):
                part = graph.call_function(operator.getitem, (every, i))
            part.meta.update(node.meta)
            node.replace_all_uses_with(part, delete_user_cb=lambda user: user not in self.nodes)
        for node in reversed(self.nodes):
            graph.erase_node(node)


def _spelled(value: Any, names: dict[fx.Node, str]) -> str:
    """As `repr`, nodes by these names."""
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_spelled(v, names) for v in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k}: {_spelled(v, names)}' for k, v in value.items())}}}"
    return repr(value)
