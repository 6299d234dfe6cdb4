"""Writes out the blocks of an exported graph while copying it into a new one."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from plait.capture.blocks import BLOCK, Blocks

KEPT_META = ("val", "stack_trace", "nn_module_stack")
Stack = dict[str, tuple[str, Any]]


@dataclass
class _Leader:
    """The exported operators of a group, between its two markers."""

    enter: fx.Node
    nodes: list[fx.Node] = field(default_factory=list)
    results: list[fx.Node] = field(default_factory=list)


class Splice:
    """`env`: exported node -> new node, the placeholders' to begin with.

    `of_member(placeholder, leader, member)` is the new node of the member's tensor that corresponds
    to the leader's; the same node's for a tensor that is not the leader's own.
    """

    def __init__(
        self,
        graph: fx.Graph,
        env: dict[fx.Node, Any],
        blocks: Blocks,
        of_member: Callable[[fx.Node, str, str], fx.Node],
    ):
        self.graph, self.env = graph, env
        self.blocks, self.of_member = blocks, of_member
        self.leaders: dict[int, _Leader] = {}
        self.open: _Leader | None = None

    def copy(self, node: fx.Node) -> None:
        source = node.args[0] if node.target is operator.getitem else None
        if node.target is BLOCK:
            self.env[node] = self._block(node)
        elif isinstance(source, fx.Node) and source.target is BLOCK:
            self.env[node] = self.env[source][node.args[1]]
        else:
            self.env[node] = self._plain(node, self.env)
            if self.open is not None:
                self.open.nodes.append(node)

    def _plain(self, node: fx.Node, env: dict[fx.Node, Any]) -> fx.Node:
        new = self.graph.node_copy(node, env.__getitem__)
        new.meta = {k: node.meta[k] for k in KEPT_META if k in node.meta}
        return new

    def _block(self, node: fx.Node) -> list[fx.Node]:
        operands = [self.env[x] for x in node.args[0]]  # type: ignore[union-attr, index]
        kind, number = str(node.args[2]).split()
        if kind == "enter":
            self.open = self.leaders[int(number)] = _Leader(node)
        elif kind == "leave":
            assert self.open is not None
            self.open.results = list(node.args[0])  # type: ignore[arg-type]
            self.open = None
        else:
            return self._run(int(number), operands)
        return operands

    def _run(self, number: int, outer: list[fx.Node]) -> list[fx.Node]:
        before: list[fx.Node] = []
        for item in self.blocks.runs[number].items:
            sources = {"outer": outer, "before": before}
            operands = [sources[kind][i] for kind, i in item.operands]
            before = self._member(self.blocks.groups.index(item.group), item.path, operands)
        return before

    def _member(self, group: int, path: str, operands: list[fx.Node]) -> list[fx.Node]:
        leader, old = self.leaders[group], self.blocks.groups[group].leader
        env: dict[fx.Node, fx.Node] = {}
        for user in leader.enter.users:
            env[user] = operands[user.args[1]]  # type: ignore[index]
        stacks: dict[int, Stack] = {}
        for node in leader.nodes:
            for x in node.all_input_nodes:
                if x not in env:
                    env[x] = self.of_member(x, old, path)
            new = env[node] = self._plain(node, env)
            stack = new.meta.get("nn_module_stack")
            if stack is not None:
                if id(stack) not in stacks:
                    stacks[id(stack)] = _moved(stack, old, path)
                new.meta["nn_module_stack"] = stacks[id(stack)]
        return [env[x] for x in leader.results]


def _moved(stack: Stack, old: str, new: str) -> Stack:
    """The modules of the leader renamed to those of the member."""
    moved = {}
    for key, (path, cls) in stack.items():
        if path == old or path.startswith(old + "."):
            path = new + path[len(old) :]
            key = "L__self___" + path.replace(".", "_")
        moved[key] = (path, cls)
    return moved
