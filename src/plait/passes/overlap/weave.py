"""Weave: the program of one rank with its regions in chunks, moves started early and waited for late.

A region is emitted stage by stage, and in a stage chunk by chunk; a stage ends where chunks are sent:

    blocking    o_proj ── all_reduce ── add norm up down ── all_reduce ── ...
    rows 2      o_0  o_1  |  add norm up down 0   1   |  ...
                  └ start 0 ┄ wait 0 ┘    └ start 1 ┄┘

A start stands right behind its producer, a wait right before its first reader. Autograd runs nodes
in the reverse of the order in which they were made, and the dual of a start is a wait, so the
backward is overlapped by the same graph, mirrored. In `blocks` a rank begins with its own rows and
fetches the others' one by one, and delivers the others' terms of a sum before it computes its own.

Everything else is the emitter's (passes/partition.py): the same moves, expansions and arguments,
asked for rows of a chunk.
"""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from plait.passes import ops
from plait.passes.overlap.arrange import arranged, stages
from plait.passes.overlap.chunks import Chunks, Form
from plait.passes.overlap.flow import Edge, Flow
from plait.passes.overlap.regions import Region
from plait.passes.partition import Emitter, Local, Site, partition
from plait.rules.describe import Access
from plait.rules.equation import Dims, Factor, Ranges
from plait.rules.layout import COPIED, WHOLE, Layout, Strategy
from plait.rules.moves import Conversion, Cut, Step, count
from plait.rules.split import Split, merged

aten = torch.ops.aten
Key = tuple[fx.Node, Layout]


def weave(flow: Flow, chosen: Mapping[Region, Form], rank: int) -> Local:
    """The program of `rank`; `chosen`: disjoint regions, whose order `arranged` accepts."""
    whole = partition(flow.program, flow.description, flow.strategies, flow.grads, rank)
    if not chosen:
        return whole
    names = {site.key: site.name for site in whole.sites.values()}
    emitter = Weaver(
        flow.program, flow.description, flow.strategies, flow.grads, rank,
        flow=flow, chosen=dict(chosen), names=names,
    )  # fmt: skip
    return emitter.run()


@dataclass(frozen=True)
class Both(Split):
    """A split in space and one in time, asked together for the sizes on one rank of one chunk."""

    space: Split | None = None
    place: int = 0
    time: Chunks | None = None
    turn: int = 0

    def touches(self, f: Factor) -> bool:
        return self._in_time(f) or (self.space is not None and self.space.touches(f))

    def _in_time(self, f: Factor) -> bool:
        return self.time is not None and self.time.touches(f)

    def size(self, f: Factor, rank: int) -> int:
        return count(self.ranges(f, rank))

    def ranges(self, f: Factor, rank: int) -> Ranges:
        if self.time is not None and self._in_time(f):
            return self.time.ranges(f, self.turn)
        if self.space is not None:
            return self.space.ranges(f, self.place)
        return ((0, f.size),) if f.size else ()


@dataclass
class Turn:
    """What one chunk of the open region has so far."""

    asked: Counter[Any]
    own: dict[fx.Node, tuple[fx.Node, Layout]] = field(default_factory=dict)
    values: dict[Key, fx.Node] = field(default_factory=dict)
    started: dict[Key, fx.Node] = field(default_factory=dict)  # on its way; waited for by its first reader


@dataclass(frozen=True)
class Part:
    """Run k of every rank's own rows: as rows of this rank's share, and of the chunk by rank."""

    mine: Ranges
    size: int
    rows: tuple[Ranges, ...]

    def of(self, move: Conversion) -> Conversion:
        assert move.cut is not None
        return replace(move, cut=Cut(move.cut.dim, self.size, self.rows, self.rows))


@dataclass
class Weaver(Emitter):
    flow: Flow = field(kw_only=True)
    chosen: dict[Region, Form] = field(kw_only=True)
    names: dict[str, str] = field(kw_only=True)
    _region: Region | None = None
    _form: Form = field(default_factory=Form)
    _chunks: Chunks | None = None
    _turns: list[Turn] = field(default_factory=list)
    _turn: int | None = None  # the chunk that is being emitted
    _moved: dict[Key, fx.Node] = field(default_factory=dict)  # by a region, joined again
    _whole_asked: Counter[Any] = field(default_factory=Counter)

    # -- the walk ----------------------------------------------------------------------------------

    def _order(self) -> Iterator[fx.Node]:  # type: ignore[override]
        """Regions are emitted where their first node stands; the walk sees the nodes around them."""
        order = arranged(self.program.graph, list(self.chosen))
        assert order is not None, "regions that wait for each other"
        starts = {region.nodes[0]: region for region in self.chosen}
        inside = {node for region in self.chosen for node in region.nodes}
        for node in order:
            if node in starts:
                self._place_seed()
                self._emit(starts[node])
            elif node not in inside:
                yield node

    def _emit(self, region: Region) -> None:
        self._region, self._form = region, self.chosen[region]
        self._chunks = region.chunks(self._form, self.rank)
        self._turns = [Turn(Counter(self._asked)) for _ in self._chunks.rows]
        self._enter(region)
        for nodes, turns in stages(self.flow, region, self._form):
            for turn in turns:
                with self._in_chunk(turn):
                    for node in nodes:
                        self._current = node
                        self._call(node)
                        self._send(node)
                        self._made_for(node)
        self._leave(region)
        self._made_for(region.nodes[-1])
        self._asked |= self._turns[-1].asked
        self._region = self._chunks = None

    @contextmanager
    def _in_chunk(self, turn: int) -> Iterator[None]:
        saved = self._own, self._values, self._asked
        mine = self._turns[turn]
        self._own, self._values = ChainMap(mine.own, self._own), ChainMap(mine.values, self._values)  # type: ignore[arg-type]
        self._asked, self._turn, self._whole_asked = mine.asked, turn, self._asked
        try:
            yield
        finally:
            (self._own, self._values, self._asked), self._turn = saved, None

    @contextmanager
    def _outside(self) -> Iterator[None]:
        """Back to the values of the whole program, from within a chunk."""
        saved = self._own, self._values, self._asked, self._turn
        assert isinstance(self._own, ChainMap) and isinstance(self._values, ChainMap)
        self._own, self._values = self._own.maps[-1], self._values.maps[-1]
        self._asked, self._turn = self._whole_asked, None
        try:
            yield
        finally:
            self._own, self._values, self._asked, self._turn = saved

    # -- values of a chunk ---------------------------------------------------------------------------

    def operand(self, access: Access, i: int, need: Layout) -> fx.Node:
        o, chunks, turn = access.operands[i], self._chunks, self._turn
        ats = [at for j, at in access.so_far if j == i]
        if turn is None or chunks is None or not any(chunks.touches(o.dims[at]) for at in ats):
            return super().operand(access, i, need)
        (at,) = ats
        rows = [chunks.ranges(o.dims[at], j) for j in range(turn + 1)]
        if self._comes_in_chunks(o.node, need):
            pieces = [self._of_turn(j, o.node, need, o.dims) for j in range(turn + 1)]
            return self._join(pieces, at, rows) if turn else pieces[0]
        with self._outside():
            whole = self.value(o.node, need, o.dims)
        for dim, f in enumerate(o.dims):  # of a mask, queries as well
            if chunks.touches(f):
                held = merged([r for some in rows for r in some]) if dim == at else rows[-1]
                whole = self._take(whole, dim, held)
        return whole

    def _comes_in_chunks(self, node: fx.Node, need: Layout) -> bool:
        assert self._region is not None
        key = (node, self._needed(node, need))
        return node in self._region.members or key in self._turns[0].started

    def _of_turn(self, turn: int, node: fx.Node, need: Layout, dims: Dims) -> fx.Node:
        with self._outside(), self._in_chunk(turn):
            return self.value(node, need, dims)

    def value(self, node: fx.Node, need: Layout, dims: Dims) -> fx.Node:
        if self._turn is None or self._chunks is None:
            key = (node, self._needed(node, need))
            return self._moved[key] if key in self._moved else super().value(node, need, dims)
        at = self._chunks.dim(dims)
        if at is None:
            with self._outside():
                return self.value(node, need, dims)
        key = (node, self._needed(node, need))
        turn = self._turns[self._turn]
        if key in turn.started and key not in turn.values:
            turn.values[key] = self._wait(turn.started[key])
        if key in turn.values or (self._region is not None and node in self._region.members):
            return turn.values[key] if key in turn.values else super().value(node, need, dims)
        with self._outside():
            whole = self.value(node, need, dims)
        turn.values[key] = self._take(whole, at, self._chunks.ranges(dims[at], self._turn))
        return turn.values[key]

    def _needed(self, node: fx.Node, need: Layout) -> Layout:
        return WHOLE if need == COPIED and node not in self.grads else need

    def _take(self, x: fx.Node, dim: int, rows: Ranges) -> fx.Node:
        return self.call(ops.take_rows, x, dim, rows)

    def _localise(self, node: fx.Node, access: Access, strategy: Strategy) -> Any:
        if self._turn is None or access.local is None:
            return super()._localise(node, access, strategy)
        both = Both((), (), 0, strategy.split, self.rank, self._chunks, self._turn)
        return self._localised(node, access, both, 0)

    def rows(self, dims: Dims) -> list[tuple[int, int, Ranges]]:
        if self._turn is None or self._chunks is None:
            return []
        at = self._chunks.dim(dims)
        return [] if at is None else [(at, dims[at].size, self._chunks.ranges(dims[at], self._turn))]

    # -- moves of a chunk ----------------------------------------------------------------------------

    def _site(
        self, c: Conversion, x: fx.Node, about: fx.Node, grad: bool, dims: Dims, key: str
    ) -> fx.Node:
        """A move that was not started before: inside a region it is waited for at once."""
        return self._wait(self._start(c, x, about, grad, dims, key))

    def _start(
        self, c: Conversion, x: fx.Node, about: fx.Node, grad: bool, dims: Dims, key: str
    ) -> fx.Node:
        site = self._named(self._new_site(c, about, grad, dims, key), dims)
        self.sites[site.name] = site
        return self.graph.call_module(f"{site.name}.start" if site.of else site.name, (x,))

    def _wait(self, started: fx.Node) -> fx.Node:
        name, _, half = str(started.target).partition(".")
        return self.graph.call_module(f"{name}.wait", (started,)) if half else started

    def _named(self, site: Site, dims: Dims) -> Site:
        """As the whole program calls it, and of which chunk."""
        of = self._name(site.key)
        if self._turn is None or self._chunks is None:
            return replace(site, name=of)
        at, turn = self._chunks.dim(dims), self._turn
        shape = tuple(self._chunks.size(f, turn) if i == at else f.size for i, f in enumerate(dims))
        name = f"{of}_c{turn}"
        assert name not in self.sites, name
        talks = site.conversion.forward.collective or site.conversion.backward.collective
        return replace(site, name=name, of=of if talks else "", shape=shape or site.shape)

    def _name(self, key: str) -> str:
        """A value that is moved both in chunks and whole has one name in the whole program."""
        first, _, ordinal = key.rpartition(" #")
        return self.names.get(key) or f"{self.names[f'{first} #1']}_{ordinal}"

    def _started(
        self, edge: Edge, x: fx.Node, moves: Sequence[Conversion], grad: bool | None = None
    ) -> fx.Node:
        """The move of an edge, all of it but the last wait."""
        grad = edge.grad if grad is None else grad
        label = f"{edge.source.name}: {edge.have} -> {edge.need}"
        moves = [c for c in moves if grad or c.forward.action != "identity"]
        for c in moves[:-1]:
            x = self._site(c, x, edge.source, grad, edge.dims, label)
        return self._start(moves[-1], x, edge.source, grad, edge.dims, label)

    def _part(self, region: Region, f: Factor, turn: int) -> Part:
        assert self._chunks is not None and region.split is not None
        rows = self._chunks.ranges(f, turn)
        held = [region.split.ranges(f, r) for r in range(region.n)]
        return Part(
            within(held[self.rank], rows), count(rows), tuple(within(rows, own) for own in held)
        )

    # -- into the region -----------------------------------------------------------------------------

    def _enter(self, region: Region) -> None:
        """Start what comes in from outside, in the order of the chunks."""
        entering = {e.key: e for e in region.sites if e.source not in region.members}
        for edge in entering.values():
            if edge.key in self._moved or edge.key in self._values:
                continue  # moved whole, or by the region that it comes from
            self._current = edge.reader
            whole = self._shared(edge.source, self._own[edge.source][0], edge.have, edge.dims)
            for turn in range(len(self._turns)):
                with self._in_chunk(turn):
                    self._incoming(region, edge, whole, self._turns[turn], turn)

    def _incoming(self, region: Region, edge: Edge, whole: fx.Node, turn: Turn, i: int) -> None:
        assert self._chunks is not None
        at = self._chunks.dim(edge.dims)
        assert at is not None
        f = edge.dims[at]
        if not region.spread_out(edge):
            piece = self._take(whole, at, self._chunks.ranges(f, i))
            turn.started[edge.key] = self._started(edge, piece, edge.moves)
        elif self._form.kind == "parts":
            part = self._part(region, f, i)
            piece = self._take(whole, at, part.mine)
            turn.started[edge.key] = self._started(edge, piece, [part.of(edge.moves[0])])
        elif i == 0:
            turn.values[edge.key] = whole
        else:
            fetch = Conversion(Step("fetch", by=i), Step("deliver", by=i), edge.moves[0].cut)
            grad = edge.grad and edge.need == COPIED  # else the gradient is whole: own rows have it
            if edge.grad and not grad:
                whole = self.call(aten.detach.default, whole)
            turn.started[edge.key] = self._started(edge, whole, [fetch], grad)

    # -- and out of it -------------------------------------------------------------------------------

    def _send(self, node: fx.Node) -> None:
        """Start the moves of a value of this chunk as soon as it is there."""
        region, i = self._region, self._turn
        assert region is not None and self._chunks is not None and i is not None
        turn = self._turns[i]
        for edge in {e.key: e for e in region.sites if e.source is node}.values():
            x = self._own[node][0]
            at = self._chunks.dim(edge.dims)
            assert at is not None
            if not region.spread_out(edge):
                turn.started[edge.key] = self._started(edge, x, edge.moves)
            elif self._form.kind == "parts":
                part = self._part(region, edge.dims[at], i)
                turn.started[edge.key] = self._started(edge, x, [part.of(edge.moves[0])])
            elif i == 0:
                turn.values[edge.key] = x
            else:
                deliver = Conversion(Step("deliver", by=i), Step("fetch", by=i), edge.moves[0].cut)
                turn.started[edge.key] = self._started(edge, x, [deliver])

    def _leave(self, region: Region) -> None:
        """What is read outside: chunks waited for and joined."""
        moved = {e.key: e for e in region.sites}
        for key, edge in moved.items():
            others = [e for e in self.flow.out[edge.source] if e.reader not in region.members]
            known = key in self._moved or key in self._values
            if not known and any(e.key == key for e in others):
                pieces = [self._arrived(turn, key) for turn in self._turns]
                self._moved[key] = self._joined(region, edge, pieces)
        for node in region.nodes:
            readers = {u for u in node.users if u not in region.members}
            told = {e.reader for e in self.flow.out[node] if e.key in moved}
            as_it_is = {e.reader for e in self.flow.out[node] if e.key not in moved}
            if isinstance(node.meta.get("val"), Tensor) and readers - (told - as_it_is):
                self._join_own(node)

    def _arrived(self, turn: Turn, key: Key) -> fx.Node:
        if key not in turn.values:
            turn.values[key] = self._wait(turn.started[key])
        return turn.values[key]

    def _joined(self, region: Region, edge: Edge, pieces: list[fx.Node]) -> fx.Node:
        assert self._chunks is not None
        at = self._chunks.dim(edge.dims)
        assert at is not None
        f, turns = edge.dims[at], range(len(pieces))
        if not region.spread_out(edge) or edge.have.kind == "shard":
            return self._join(pieces, at, [self._chunks.ranges(f, i) for i in turns])
        if self._form.kind == "parts":
            return self._join(pieces, at, [self._part(region, f, i).mine for i in turns])
        by_source = sorted(turns, key=lambda i: (self.rank - i) % region.n)
        return self.call(ops.sum_terms, *(pieces[i] for i in by_source))

    def _join_own(self, node: fx.Node) -> None:
        dims = self.flow.description.dims[node][0]
        assert self._chunks is not None
        at = self._chunks.dim(dims)
        assert at is not None
        pieces = [turn.own[node] for turn in self._turns]
        rows = [self._chunks.ranges(dims[at], i) for i in range(len(pieces))]
        self._set(node, self._join([x for x, _ in pieces], at, rows), pieces[0][1])

    def _join(self, pieces: list[fx.Node], dim: int, rows: list[Ranges]) -> fx.Node:
        return self.call(ops.join_rows, pieces, dim, rows)


def within(outer: Ranges, rows: Ranges) -> Ranges:
    """The positions among the rows of `outer` of those that are also in `rows`."""
    out: list[tuple[int, int]] = []
    at = 0
    for lo, hi in outer:
        for a, b in rows:
            begin, end = max(lo, a), min(hi, b)
            if begin >= end:
                continue
            run = (at + begin - lo, at + end - lo)
            if out and out[-1][1] == run[0]:
                out[-1] = (out[-1][0], run[1])
            else:
                out.append(run)
        at += hi - lo
    return tuple(out)
