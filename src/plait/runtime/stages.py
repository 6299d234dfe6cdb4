"""Stages: what one rank runs of a pipeline, and what both ends of every wire know without being told.

A `Piece` is one micro-batch: the rank's program of it, cut into stages, and the modules of those
stages that this rank runs. Shapes, dtypes and the need of gradients come from a trace on the meta
device; which values get a gradient from a walk back from the outputs that have one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from plait.passes import late
from plait.passes.microbatch import WHOLE_COPY
from plait.passes.overlap.check import closed
from plait.passes.overlap.places import prove
from plait.passes.partition import SEED, Local
from plait.passes.pipeline import Stage, Wire, numbered, split, stage_of
from plait.passes.schedule import Schedule
from plait.passes.trace import Reach, Spec, reach, trace
from plait.plan.planner import Planned
from plait.plan.staged import Pieces
from plait.plan.ways import as_graphs
from plait.program import Program
from plait.rules.moves import Cut, take
from plait.runtime import streams
from plait.runtime.again import mark, segmented
from plait.runtime.channel import Channel
from plait.runtime.executor import capturable, place
from plait.runtime.fused import Fused, fuse
from plait.runtime.replicas import Replicas
from plait.runtime.streams import Beside
from plait.runtime.transport import Transport
from plait.runtime.trips import Trips


@dataclass(frozen=True)
class Given:
    """How a flat output comes out of the micro-batches."""

    kind: str  # shard | whole | partial
    cut: Cut | None = None


@dataclass(frozen=True)
class Feed:
    """Which leaf of the call a placeholder takes, and which of its rows."""

    leaf: int
    cut: Cut | None = None
    joined: Cut | None = None  # it takes the rows of all replicas, which have these


@dataclass(frozen=True)
class Piece:
    local: Local
    stages: tuple[Stage, ...]
    placed: Mapping[str, int]  # stage of every call of `local`
    modules: Mapping[int, fx.GraphModule]
    feeds: Mapping[str, Feed]  # by placeholder
    numbers: Mapping[Wire, int]
    trips: Mapping[int, Trips] = field(default_factory=dict)  # of the stages that run as CUDA graphs


@dataclass(frozen=True)
class Stages:
    """All micro-batches of one program. Place p runs the stages s with s % pp == p."""

    program: Program
    pieces: tuple[Piece, ...]
    given: tuple[Given, ...]  # of each flat output
    channel: Channel
    holders: Mapping[str, tuple[int, ...]]  # node of a weight -> places that hold it
    device: torch.device
    apart: bool = False  # gradients of weights are computed apart
    replicas: Replicas | None = None  # where there are several
    joined: bool = False  # the program is of all replicas' batches together
    gradients: str = "native"  # the algorithm of their sum
    again: bool = False  # a stage runs its forward again, whole, for its backward
    transport: Transport = field(default_factory=lambda: Transport(None, 0, 1))  # of the moves within stages
    _traces: dict[Any, tuple[dict[str, Spec], ...]] = field(default_factory=dict)
    _reaches: dict[Any, Reach] = field(default_factory=dict)

    @property
    def local(self) -> Local:
        return self.pieces[0].local

    @property
    def count(self) -> int:
        return len(self.pieces[0].stages)

    @property
    def last(self) -> int:
        """The place of the last stage."""
        return self.place(self.count - 1)

    def place(self, stage: int) -> int:
        return stage % self.channel.pp

    def homes(self) -> list[frozenset[str]]:
        """The weights, by node, that each stage may read."""
        held = [
            frozenset(n for n, places in self.holders.items() if p in places)
            for p in range(self.channel.pp)
        ]
        return [held[self.place(s)] for s in range(self.count)]

    # -- outputs -------------------------------------------------------------------------------------

    def owner(self, flat: int, k: int) -> int:
        """The stage that gives a flat output of micro-batch k: of one in chunks, or split otherwise, it may be
        another."""
        return next(s.index for s in self.pieces[k].stages if flat in s.results)

    def wanted(self) -> list[int]:
        """The flat outputs that the caller sees."""
        return sorted({o.index for o in self.program.outputs if o.index is not None})

    def parts(self, flat: int) -> range:
        """The micro-batches that have a say in a flat output."""
        return range(1 if self.given[flat].kind == "whole" else len(self.pieces))

    def spec(self, specs: Sequence[Mapping[str, Spec]], flat: int, k: int) -> Spec | None:
        """Of a flat output of micro-batch k; None where it is no tensor."""
        stage = self.pieces[k].stages[self.owner(flat, k)]
        at = len(stage.makes) - len(stage.results) + stage.results.index(flat)
        return specs[k].get(stage.makes[at])

    # -- what both ends know -------------------------------------------------------------------------

    def specs(self, leaves: Sequence[Any], grad: bool) -> tuple[dict[str, Spec], ...]:
        """Of every value of every micro-batch, for inputs like these."""
        key = (grad, *(Spec.of(x) if isinstance(x, Tensor) else None for x in leaves))
        if key not in self._traces:
            self._traces[key] = tuple(
                trace(piece.local, self._meta(piece, k, leaves, grad), grad)
                for k, piece in enumerate(self.pieces)
            )
        return self._traces[key]

    def _meta(self, piece: Piece, k: int, leaves: Sequence[Any], grad: bool) -> dict[str, Any]:
        feed: dict[str, Any] = {}
        for share in piece.local.shares:
            shape = list(share.weight.shape)
            if share.cut is not None:
                shape[share.cut.dim] = share.cut.counts()[piece.local.rank]
            needs = grad and share.weight.requires_grad
            feed[share.weight.node] = Spec(tuple(shape), share.weight.dtype, needs)
        for name, source in piece.feeds.items():
            x = leaves[source.leaf]
            if isinstance(x, Tensor):
                part = take(x.detach().to("meta"), source.cut.dim, source.cut.rows[k]) if source.cut else x
                shape = list(part.shape)
                if source.joined is not None:
                    shape[source.joined.dim] = source.joined.size
                feed[name] = Spec(tuple(shape), x.dtype, grad and x.requires_grad)
            else:
                feed[name] = x
        feed[SEED] = Spec((), torch.int64, False)
        return feed

    def reached(self, k: int, specs: Sequence[Mapping[str, Spec]], ends: frozenset[int]) -> Reach:
        """What gets a gradient in micro-batch k when the flat outputs `ends` have one."""
        ends = frozenset(i for i in ends if k in self.parts(i))
        key = (k, id(specs), ends)
        if key not in self._reaches:
            piece = self.pieces[k]
            self._reaches[key] = reach(piece.local, specs[k], piece.placed, ends)
        return self._reaches[key]


# -- making ----------------------------------------------------------------------------------------


def stages(
    pieces: Pieces,
    order: Schedule,
    transport: Transport,
    line: Channel,
    device: torch.device,
    holders: Mapping[str, tuple[int, ...]] | None,
    replicas: Replicas,
) -> Stages:
    """This rank's stages of every micro-batch; `holders` by node, where weights are loaded."""
    apart = "W" in order.kinds and pieces.full.training
    if any(planned.chosen for planned in pieces.planned):
        transport = Beside.of(transport, device)
    made = tuple(
        _piece(pieces, planned, transport, line, device, apart) for planned in pieces.planned
    )
    staged, training = pieces.staged, pieces.full.training
    woven = {p.program.digest: piece for p, piece in zip(pieces.planned, made, strict=True) if p.chosen}
    for piece in woven.values():
        prove(piece.local, training)
    if device.type == "cuda" and as_graphs(staged.schedule, staged.recompute, replicas.count, training):
        made = _graphed(pieces, made, transport)
    replicas.used(_in_order_of_use(made[0].local))
    wires = {(w.source % line.pp, w.target % line.pp) for piece in made for s in piece.stages for w in s.sends}
    back = {(b, a) for a, b in wires} if pieces.full.training else set()
    line.open({pair for pair in wires | back if len(set(pair)) == 2}, device)
    return Stages(
        pieces.full,
        made,
        _given(pieces),
        line,
        holders or _holders(made[0], pieces.full, line.pp),
        device,
        apart,
        replicas if replicas.count > 1 else None,
        pieces.joined is not None,
        pieces.plan.gradients.algorithm if pieces.plan.gradients is not None else "native",
        apart and pieces.staged.recompute != "off",
        transport,
    )


def _graphed(pieces: Pieces, made: tuple[Piece, ...], transport: Transport) -> tuple[Piece, ...]:
    """With kernels fused and in CUDA graphs, where a stage can be; micro-batches of one program share them."""
    if not capturable(pieces.full, [piece.local for piece in made], transport):
        return made
    known: dict[str, Fused] = {}
    shared: dict[str, dict[int, Trips]] = {}
    out = []
    for planned, piece in zip(pieces.planned, made, strict=True):
        digest = planned.program.digest
        if digest not in shared:
            mine = [(s, piece.modules[s.index]) for s in piece.stages if s.index in piece.modules and not s.seeded]
            for _, module in mine:
                fuse(module.graph, rows=True, known=known)
                module.recompile()
            shared[digest] = {
                s.index: Trips.of(module, len(s.weights), pieces.full.training, transport) for s, module in mine
            }
        out.append(replace(piece, trips=shared[digest]))
    return tuple(out)


def _in_order_of_use(local: Local) -> list[str]:
    at = {n: i for i, n in enumerate(local.graph.nodes)}
    nodes = {n.name: n for n in local.graph.nodes if n.op == "placeholder"}
    first = {name: min(map(at.__getitem__, n.users), default=len(at)) for name, n in nodes.items()}
    return sorted((s.weight.node for s in local.shares), key=first.__getitem__)


def _piece(
    pieces: Pieces,
    planned: Planned,
    transport: Transport,
    line: Channel,
    device: torch.device,
    apart: bool,
) -> Piece:
    staged = pieces.staged
    local, program = planned.local(transport.rank), planned.program.graph
    segments = staged.recompute != "off" and not apart
    if segments:
        mark(local, staged.segments, program)
    cut = split(local, staged.borders, program)
    root: dict[str, Any] = {name: value.to(device) for name, value in local.constants.items()}
    algorithms = {p.name: p.algorithm for p in pieces.plan.collectives}
    root |= streams.modules(local.sites, transport, algorithms)
    trained = {s.weight.node for s in local.shares if s.weight.requires_grad}
    names = {s.weight.node: s.weight.name for s in local.shares}
    modules = {}
    for stage in cut:
        closed(stage.graph, f"stage {stage.index}")
        if stage.index % line.pp == line.place:
            place(stage.graph, device)
            owing = late.defer(stage.graph, trained) if apart else {}
            modules[stage.index] = (
                segmented(root, stage.graph, names)
                if segments
                else fx.GraphModule(root | owing, stage.graph)
            )
    placed = {n.name: s for n, s in stage_of(local, staged.borders, program).items()}
    return Piece(local, cut, placed, modules, _feeds(pieces, planned.program), numbered(cut))


def _feeds(pieces: Pieces, program: Program) -> dict[str, Feed]:
    at = {entry.path: leaf for leaf, entry in enumerate(pieces.full.inputs)}
    nodes = {n.name: n for n in pieces.full.graph.nodes if n.op == "placeholder"}
    out = {}
    for entry in program.inputs:
        if entry.node is None:
            continue
        path = entry.path.removesuffix(WHOLE_COPY)
        leaf, cut, joined = at[path], None, None
        name = pieces.full.inputs[leaf].node
        assert name is not None
        if pieces.batch is not None and nodes[name] in pieces.description.dims:
            dims = pieces.description.dims[nodes[name]][0]
            if pieces.batch.split.dim(dims) is not None:
                cut = Cut.of(dims, pieces.batch.split)
                if path != entry.path and pieces.joined is not None:
                    joined = cut.together(pieces.joined.all)
                cut = _own(cut, pieces) if path == entry.path else None
        out[entry.node] = Feed(leaf, cut, joined)
    return out


def _own(cut: Cut, pieces: Pieces) -> Cut:
    """The rows of this rank's micro-batches, counted in the batch of its replica."""
    return cut if pieces.joined is None else cut.within(pieces.joined.own)


def _given(pieces: Pieces) -> tuple[Given, ...]:
    output = next(iter(reversed(pieces.full.graph.nodes)))
    out = []
    for item in output.args[0]:  # type: ignore[union-attr]
        layout = pieces.batch.layouts.get(item) if pieces.batch is not None else None  # type: ignore[arg-type]
        if layout is None or layout.kind in ("whole", "copied"):
            out.append(Given("whole"))
        elif layout.kind == "partial":
            out.append(Given("partial"))
        else:
            assert layout.split is not None
            dims = pieces.description.dims[item][0]  # type: ignore[index]
            out.append(Given("shard", _own(Cut.of(dims, layout.split), pieces)))
    return tuple(out)


def _holders(piece: Piece, program: Program, pp: int) -> dict[str, tuple[int, ...]]:
    """A weight that no stage reads is held by the first; a buffer that no operator reads, by all: in
    another mode any stage may."""
    reads: dict[str, set[int]] = {s.weight.node: set() for s in piece.local.shares}
    for stage in piece.stages:
        for node in stage.weights:
            reads[node].add(stage.index % pp)
    held = {node: tuple(sorted(places)) or (0,) for node, places in reads.items()}
    idle = {w.node: (0,) if w.kind == "parameter" else tuple(range(pp)) for w in program.unused}
    return held | idle
