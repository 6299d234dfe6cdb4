"""Textbook: what every course on overlap does first, as a row to be compared with.

Each matmul whose result is summed over the ranks is cut in four equal chunks of rows; a chunk's sum
runs on a second stream beside the next chunk's matmul, and the next operator waits for all of them.
Nothing is carried through the next operator, and nothing is weighed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    for node in flow.description.accesses:
        if any(_summed(e) for e in flow.out.get(node, [])) and (chain := _chain(flow, node)):
            yield from [r for f in _rows(flow, chain) if (r := _alone(flow, chain, f, n))][:1]


def _summed(edge: Edge) -> bool:
    actions = [c.forward.action for c in edge.moves]
    return edge.have.kind == "partial" and actions in (["all_reduce"], ["reduce_scatter"])


def _chain(flow: Flow, node: fx.Node) -> list[fx.Node]:
    """The nearest matmuls whose terms `node` holds, and what stands between; [] if there is none."""
    if heavy(flow.description.accesses[node]):
        return [node]
    near = [e.source for e in flow.into[node] if e.have.kind == "partial" and not e.moves]
    near = [x for x in near if flow.access(x) is not None]
    matmuls = [x for x in near if heavy(flow.description.accesses[x])]
    found = matmuls or [x for source in near for x in _chain(flow, source)]
    return [*dict.fromkeys(found), node] if found else []


def _rows(flow: Flow, chain: Sequence[fx.Node]) -> list[Factor]:
    """The factors by which all of it can run in chunks, the longest first; none of a weight."""
    weights = {w.node for w in flow.program.weights}
    operands = [o for node in chain for o in flow.description.accesses[node].operands]
    fixed = {atom for o in operands if o.node.name in weights for dim in o.dims for atom in atoms(dim)}
    dims = flow.description.dims[chain[-1]][0]
    known = dict.fromkeys(atom for dim in dims for atom in atoms(dim))
    found = [f for f in known if f.size > 1 and f not in fixed | set(flow.description.symbolic)]
    return sorted((f for f in found if _runs(flow, chain, f)), key=lambda f: -f.size)


def _runs(flow: Flow, chain: Sequence[fx.Node], f: Factor) -> bool:
    return all(chunkable(flow.description.accesses[x], flow.strategies[x], probe(f)) for x in chain)


def _alone(flow: Flow, chain: list[fx.Node], f: Factor, n: int) -> Region | None:
    """The region of `chain` and of what its end sends, without what is sent to it."""
    found = region(flow, f, n, chain)
    sites = tuple(e for e in found.sites if e.source is chain[-1]) if found is not None else ()
    return replace(found, sites=sites, rotates=False) if found is not None and sites else None
