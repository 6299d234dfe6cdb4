"""Buckets: sums of small weights' gradients, as one collective at the end of the way back.

A weight that all ranks hold whole, and read apart, has a term of its gradient on each of them: a collective for
each such weight, and for a norm's it is all latency. Nothing on the way back waits for them:

    w1 -> move -> ..        w1 ┐          ┌ ..
    w2 -> move -> ..   ->   w2 ┼ bucket  ─┼ ..       back: one sum of [dw1 dw2 dw3], when the last is there
    w3 -> move -> ..        w3 ┘          └ ..
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from torch import fx

from plait.passes.partition import BACK, Local, Site

SMALL = 1 << 20  # bytes; a collective of more takes longer than its latency on any link


def bucket(local: Local, algorithms: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Rewrite `local`; name of a module that the graph calls now -> the sites that it stands for.

    `algorithms`: of collectives, by their names; those of one bucket have the same.
    """
    found: dict[Any, list[fx.Node]] = {}
    for node in local.graph.nodes:
        site = local.sites.get(str(node.target)) if node.op == "call_module" else None
        if site is not None and _sums(site) and node.all_input_nodes[0].op == "placeholder":
            how = algorithms.get(f"{site.name}{BACK}", "native")
            found.setdefault((site.dtype, how), []).append(node)
    return {
        f"bucket_{i}": _gather(local.graph, nodes, f"bucket_{i}")
        for i, nodes in enumerate(n for n in found.values() if len(n) > 1)
    }


def _sums(site: Site) -> bool:
    c = site.conversion
    alone = c.forward.action == "identity" and c.backward.action == "all_reduce" and c.backward.op == "sum"
    return alone and site.grad and not site.of and prod(site.shape) * site.dtype.itemsize <= SMALL


def _gather(graph: fx.Graph, moves: Sequence[fx.Node], name: str) -> tuple[str, ...]:
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    with graph.inserting_after(last):
        every = graph.call_module(name, tuple(m.args[0] for m in moves))
    for i, move in reversed(list(enumerate(moves))):
        with graph.inserting_after(every):
            part = graph.call_function(operator.getitem, (every, i))
        part.meta.update(move.meta)
        move.replace_all_uses_with(part)
        graph.erase_node(move)
    return tuple(str(m.target) for m in moves)
