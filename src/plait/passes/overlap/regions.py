"""Regions: what can run in chunks of one factor around a collective, read from the equations.

A node can be chunked by a factor if the factor is parallel in its equation, cuts one dim of every
value it touches and every result has it; in order, if it is a prefix (causal attention): a chunk
then reads the rows so far. Nodes are grouped with their neighbours as far as that holds; a path that
leaves a group through a node that mixes the factor does not come back into it, because every such
node begins a new level:

    level 0             mixes s     level 1
    norm q k v          attention   o add norm gate up mul down add norm q k v       by s
    norm q k v attention o add norm gate up mul down ...                             by b, or by s in order

A group is of one stage of a pipeline. No path leaves a stage and comes back into it either, since stages
are cut out of the program's order; what every stage makes again is in no group, and nothing leads from a
group to it.

What is left of a group after trimming light operators from its ends, with the edges of it that
communicate, is a region. No operator or model is known here by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor, fx

from plait.errors import PlanError
from plait.passes.overlap.chunks import Chunks, Form, cut
from plait.passes.overlap.flow import Edge, Flow
from plait.rules.describe import Access
from plait.rules.equation import ONE, Dims, Factor, Ranges, atoms, flatten
from plait.rules.layout import Strategy
from plait.rules.split import Split


@dataclass(frozen=True)
class Region:
    """`nodes` in program order; `sites`: the edges whose moves are done in chunks."""

    factor: Factor
    nodes: tuple[fx.Node, ...]
    sites: tuple[Edge, ...]
    n: int
    split: Split | None  # the factor's own cut in space, at gathers and reduce-scatters
    rotates: bool  # may be cut in blocks: nothing in it is done by all ranks at once
    ordered: bool = False  # a chunk needs those before it

    @property
    def name(self) -> str:
        order = " in order" if self.ordered else ""
        return f"{self.nodes[0].name}..{self.nodes[-1].name} by {self.factor.name}{order}"

    @cached_property
    def members(self) -> frozenset[fx.Node]:
        return frozenset(self.nodes)

    @cached_property
    def keys(self) -> frozenset[object]:
        """Of its moves."""
        return frozenset(e.key for e in self.sites)

    @property
    def most(self) -> int:
        """The greatest number of chunks."""
        if self.split is None:
            return self.factor.size
        return min(self.split.sizes(self.factor))

    def forms(self, counts: Iterable[int]) -> list[Form]:
        """The ways to cut it in about `counts` chunks."""
        kind = "rows" if self.split is None else "parts"
        found = [Form(kind, min(c, self.most)) for c in counts]
        found = [f for f in dict.fromkeys(found) if f.count > 1]
        return found + ([Form("blocks", self.n)] if self.rotates else [])

    def form(self, wanted: Form) -> Form:
        """`wanted` as it is here: blocks are as many as ranks."""
        legal = self.forms([wanted.count])
        found = [f for f in legal if (f.kind, f.kind == "blocks" or f.count) == (
            wanted.kind, wanted.kind == "blocks" or wanted.count)]
        if not found:
            raise PlanError(f"{self.name} cannot be cut as {wanted}; it can as {', '.join(map(str, legal))}")
        return replace(found[0], ratio=wanted.ratio)

    def chunks(self, form: Form, rank: int) -> Chunks:
        rows: Sequence[Ranges] = ()
        if self.split is not None:
            rows = [self.split.ranges(self.factor, r) for r in range(self.n)]
        return cut(self.factor, form, rows, rank)

    def spread_out(self, edge: Edge) -> bool:
        """The move of `edge` gathers or scatters the factor itself."""
        return self.split is not None and any(
            layout.split is not None and layout.split.touches(self.factor)
            for layout in (edge.have, edge.need)
        )


def regions(flow: Flow, n: int) -> list[Region]:
    """All regions, by factor; those of different factors may have nodes in common."""
    return [r for f in factors(flow) for r in _regions(flow, f, n)]


def factors(flow: Flow) -> list[Factor]:
    """The factors of what is sent, those of more sends first."""
    count: dict[Factor, int] = {}
    for edge in flow.edges:
        if edge.collectives:
            for f in dict.fromkeys(atom for dim in edge.dims for atom in atoms(dim)):
                count[f] = count.get(f, 0) + 1
    found = [f for f in count if f.size > 1 and f not in flow.description.symbolic]
    return sorted(found, key=lambda f: -count[f])


def _regions(flow: Flow, f: Factor, n: int) -> list[Region]:
    cut = probe(f)
    can = {
        node
        for node, access in flow.description.accesses.items()
        if node in flow.strategies and node in flow.stages and chunkable(access, flow.strategies[node], cut)
    }
    ordered = {node for node in can if in_order(flow.description.accesses[node], cut)}
    found = _grown(flow, f, n, can - ordered)
    if ordered:
        found += [r for r in _grown(flow, f, n, can) if r.ordered]
    return found


def _grown(flow: Flow, f: Factor, n: int, can: set[fx.Node]) -> list[Region]:
    _drop_torn_tuples(can)
    found = [region(flow, f, n, _trim(flow, group, probe(f))) for group in _groups(flow, can)]
    return [r for r in found if r is not None]


def probe(f: Factor) -> Chunks:
    """Two chunks of `f`, with which it is asked what can be cut by it."""
    return Chunks((f,), (), rows=(((0, 1),), ((1, f.size),)))


def chunkable(access: Access, strategy: Strategy, chunk: Split) -> bool:
    """Whether one operator can run chunk by chunk."""
    touched = {x.property for x in access.letters if chunk.touches(x.factor)}
    if not touched or touched - {"parallel", "prefix"}:
        return False
    if "prefix" in touched and not _begins_at_row_0(access, chunk):
        return False
    if any(map(chunk.touches, (*(access.fused or ()), *access.counts))):
        return False
    so_far = set(access.so_far)
    values = [
        tuple(ONE if (i, at) in so_far else f for at, f in enumerate(o.dims))
        for i, o in enumerate(access.operands)
    ]
    values += access.results
    if not all(_cuts_cleanly(dims, chunk, strategy.split) for dims in values):
        return False
    return all(chunk.dim(dims) is not None for dims in access.results)


def in_order(access: Access, chunk: Split) -> bool:
    return any(chunk.touches(access.operands[i].dims[at]) for i, at in access.so_far)


def _begins_at_row_0(access: Access, chunk: Split) -> bool:
    """The rows so far are one run: the factor is the outermost of their dim."""
    dims = [access.operands[i].dims[at] for i, at in access.so_far]
    return all(f.size == 1 or tuple(flatten(f)[:1]) == chunk.factors for f in dims)


def _cuts_cleanly(dims: Dims, chunk: Split, split: Split | None) -> bool:
    if not chunk.splittable(dims):
        return False
    at = chunk.dim(dims)
    if at is None:
        return True
    return chunk.disjoint(dims[at]) and (split is None or split.dim(dims) != at)


def _drop_torn_tuples(can: set[fx.Node]) -> None:
    """An operator with several results is chunked together with all their readers, or not at all."""
    for node in list(can):
        if not isinstance(node.meta.get("val"), Tensor) and not set(node.users) <= can:
            can.discard(node)
    for node in list(can):
        if any(not isinstance(i.meta.get("val"), (Tensor, int)) and i not in can and i.op == "call_function"
               for i in node.all_input_nodes):
            can.discard(node)


def _groups(flow: Flow, can: set[fx.Node]) -> list[list[fx.Node]]:
    """Neighbours of one level and stage: readers of each other, or of one value that is sent to them."""
    level: dict[fx.Node, int] = {}
    shared: dict[tuple[object, int, int], fx.Node] = {}
    tainted: set[fx.Node] = set()
    group: dict[fx.Node, list[fx.Node]] = {}
    for node in flow.program.graph.nodes:
        inputs = node.all_input_nodes
        level[node] = max((level[i] + (i in tainted and i not in can) for i in inputs), default=0)
        if node in can or any(i in tainted for i in inputs):
            tainted.add(node)
        if node not in can:
            continue
        stage = flow.stages[node]
        near = [i for i in inputs if i in can and (level[i], flow.stages[i]) == (level[node], stage)]
        near += [
            shared.setdefault((e.key, level[node], stage), node) for e in flow.into[node] if e.collectives
        ]
        mine = [node]
        for other in {id(group[i]): group[i] for i in near if i in group}.values():
            mine = other + mine
        for member in mine:
            group[member] = mine
    order = {node: at for at, node in enumerate(flow.program.graph.nodes)}
    unique = {id(g): sorted(g, key=order.__getitem__) for g in group.values()}
    return sorted(unique.values(), key=lambda g: order[g[0]])


def heavy(access: Access) -> bool:
    """An operator that multiplies matrices: what a transfer can hide under."""
    many = len([o for o in access.operands if not o.added]) > 1
    return many and (any(x.property == "sum" for x in access.letters) or bool(access.products))


def _trim(flow: Flow, group: list[fx.Node], cut: Split) -> list[fx.Node]:
    """Without light operators at either end: cutting them hides nothing."""
    left = set(group)
    if not any(heavy(flow.description.accesses[n]) for n in group):
        return group

    def idle(node: fx.Node, edges: list[Edge], ends: list[fx.Node]) -> bool:
        busy = heavy(flow.description.accesses[node]) or not isinstance(node.meta.get("val"), Tensor)
        sends = any(e.collectives and cut.dim(e.dims) is not None for e in edges)
        return not busy and not sends and not any(x in left for x in ends)

    for order, sides in ((group, flow.into), (group[::-1], flow.out)):
        for node in order:
            ends = node.all_input_nodes if sides is flow.into else list(node.users)
            torn = any(not isinstance(i.meta.get("val"), (Tensor, int)) for i in node.all_input_nodes)
            if not torn and idle(node, sides[node], ends):
                left.discard(node)
    return [node for node in group if node in left]


def region(flow: Flow, f: Factor, n: int, nodes: list[fx.Node]) -> Region | None:
    """`nodes` with what they send and are sent in chunks of `f`; None if that is nothing."""
    members, cut = set(nodes), probe(f)
    touching = dict.fromkeys(e for node in nodes for e in (*flow.into[node], *flow.out[node]))
    sends = [e for e in touching if e.collectives and cut.dim(e.dims) is not None and not flow.at_home(e)]
    sites = [e for e in sends if _in_chunks(e, members, cut)]
    splits = {s for e in sites for s in (e.have.split, e.need.split) if s is not None and s.touches(f)}
    if any(min(s.sizes(f)) < 2 for s in splits):  # moves of single rows stay whole
        sites, splits = [e for e in sites if not _of(e, f)], set()
    if not sites or len(splits) > 1:
        return None
    split = next(iter(splits), None)
    still = not any(flow.strategies[node].statistics for node in nodes)
    rotates = still and split is not None and all(_of(e, f) for e in sites)
    ordered = any(in_order(flow.description.accesses[node], cut) for node in nodes)
    found = Region(f, tuple(nodes), tuple(sites), n, split, rotates, ordered)
    return found if found.most > 1 and not (ordered and split) else None


def _of(edge: Edge, f: Factor) -> bool:
    return any(x.split is not None and x.split.touches(f) for x in (edge.have, edge.need))


def _in_chunks(edge: Edge, members: set[fx.Node], cut: Split) -> bool:
    """Whether the move of an edge can be done chunk by chunk."""
    f = cut.factors[0]
    if not _of(edge, f):
        at = cut.dim(edge.dims)
        return all(c.cut is None or c.cut.dim != at for c in edge.moves)
    if (edge.reader in members and edge.source in members) or len(edge.moves) != 1:
        return False
    if any(x.split is not None and x.split.factors != (f,) for x in (edge.have, edge.need)):
        return False  # cut together with another factor
    (move,) = edge.moves
    assert move.cut is not None
    kinds = (edge.have.kind, edge.need.kind)
    entering = edge.reader in members and kinds in (("shard", "whole"), ("shard", "copied"))
    leaving = edge.source in members and kinds == ("partial", "shard")
    return move.cut.disjoint and (entering or leaving)
