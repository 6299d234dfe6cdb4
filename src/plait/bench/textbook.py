"""Textbook: what every course on overlap does first, as a row to be compared with.

Each matmul whose result is summed over the ranks is cut in four equal chunks of rows; a chunk's sum
runs on a second stream beside the next chunk's matmul, and the next operator waits for all of them.
Nothing is carried through the next operator, and nothing is weighed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import fx

from plait.passes.overlap.choose import weigh
from plait.passes.overlap.flow import Edge, Flow
from plait.passes.overlap.regions import Region, chunkable, heavy, probe, region
from plait.passes.overlap.timeline import Machine
from plait.plan.planner import Planned
from plait.rules.equation import Factor, atoms

CHUNKS = 4


def textbook(whole: Planned, machine: Machine) -> Planned:
    """The blocking program `whole` with its sums behind matmuls in chunks."""
    flow = whole.flow
    chosen = {r: r.forms([CHUNKS])[0] for r in _regions(flow, whole.plan.tp)}
    found = [weigh(flow, region, form, machine) for region, form in chosen.items()]
    seconds = whole.plan.seconds - sum(c.gain for c in found)
    return replace(whole, plan=replace(whole.plan, seconds=seconds), chosen=chosen)


def _regions(flow: Flow, n: int) -> Iterator[Region]:
    for node, access in flow.description.accesses.items():
        sums = [e for e in flow.out.get(node, []) if _summed(e)]
        if sums and heavy(access):
            found = [r for f in _rows(flow, sums[0]) if (r := _alone(flow, node, f, n)) is not None]
            yield from found[:1]


def _summed(edge: Edge) -> bool:
    actions = [c.forward.action for c in edge.moves]
    return edge.have.kind == "partial" and actions in (["all_reduce"], ["reduce_scatter"])


def _rows(flow: Flow, edge: Edge) -> list[Factor]:
    """The factors by which the matmul can run in chunks, the longest first."""
    access, strategy = flow.description.accesses[edge.source], flow.strategies[edge.source]
    known = dict.fromkeys(atom for dim in edge.dims for atom in atoms(dim))
    fixed = [f for f in known if f.size > 1 and f not in flow.description.symbolic]
    found = [f for f in fixed if chunkable(access, strategy, probe(f))]
    return sorted(found, key=lambda f: -f.size)


def _alone(flow: Flow, node: fx.Node, f: Factor, n: int) -> Region | None:
    """The region of the matmul and of what it sends, without what is sent to it."""
    found = region(flow, f, n, [node])
    sites = tuple(e for e in found.sites if e.source is node) if found is not None else ()
    return replace(found, sites=sites, rotates=False) if found is not None and sites else None
