"""Arrange: in what order the nodes of a program with regions in chunks are emitted.

    arranged   the program, every region in one piece where its first node stands
    stages     a region: the nodes between two sends, and there the order of the chunks
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from torch import fx

from plait.passes.overlap.chunks import Form
from plait.passes.overlap.flow import Flow
from plait.passes.overlap.regions import Region


def arranged(graph: fx.Graph, chosen: Sequence[Region]) -> list[fx.Node] | None:
    """The nodes in an order in which every region stands in one piece; None where there is none."""
    units: list[tuple[fx.Node, ...]] = [region.nodes for region in chosen]
    number = {node: i for i, nodes in enumerate(units) for node in nodes}
    for node in graph.nodes:
        if node not in number:
            number[node] = len(units)
            units.append((node,))
    waiting = [{number[i] for n in nodes for i in n.all_input_nodes} - {u} for u, nodes in enumerate(units)]
    readers: list[list[int]] = [[] for _ in units]
    for unit, needs in enumerate(waiting):
        for other in needs:
            readers[other].append(unit)
    at = {node: i for i, node in enumerate(graph.nodes)}
    first = [(nodes[0].op != "placeholder", nodes[0].op == "output", at[nodes[0]]) for nodes in units]
    ready = [(first[unit], unit) for unit, needs in enumerate(waiting) if not needs]
    heapq.heapify(ready)
    out: list[fx.Node] = []
    while ready:
        _, unit = heapq.heappop(ready)
        out += units[unit]
        for reader in readers[unit]:
            waiting[reader].discard(unit)
            if not waiting[reader]:
                heapq.heappush(ready, (first[reader], reader))
    return out if len(out) == len(at) else None


def stages(flow: Flow, region: Region, form: Form) -> list[tuple[list[fx.Node], list[int]]]:
    """Nodes that run between two sends, and the order of the chunks there."""
    gathers = any(e.source not in region.members for e in region.sites)
    scatters = {e.source for e in region.sites if e.source in region.members}
    blocks = form.kind == "blocks"
    stage: dict[fx.Node, int] = {}
    for node in region.nodes:
        inner = [e for e in flow.into[node] if e.source in region.members]
        stage[node] = max((stage[e.source] + bool(e.collectives) for e in inner), default=0)
        stage[node] += blocks and gathers and node in scatters
    count = form.count if not blocks else region.n
    own_first, own_last = list(range(count)), [*range(1, count), 0]
    out = []
    for k in range(max(stage.values()) + 1):
        nodes = [n for n in region.nodes if stage[n] == k]
        if nodes:
            last = blocks and (not gathers or any(n in scatters for n in nodes))
            out.append((nodes, own_last if last else own_first))
    return out
