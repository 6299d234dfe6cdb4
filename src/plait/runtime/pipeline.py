"""Pipeline: the stages of one rank, run on micro-batches, forward and backward.

A call is one node of the user's autograd graph. Inside it every micro-batch has a graph of its own,
made of leaves: the rank's weights, the inputs, and the values that came over a wire. Backward runs
these graphs, sends the gradients of received values back to where they came from, and hands the
gradients of weights and inputs to autograd, which adds them up as always.

    forward     all micro-batches; outputs put together and given to every rank
    backward    all micro-batches; gradients of weights on several stages, and of inputs, summed in
                order of stage by one rank, so that every copy gets the same bits
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from plait.errors import PlaitError
from plait.passes.microbatch import WHOLE_COPY
from plait.passes.partition import Local, partition
from plait.passes.pipeline import Stage, split, stage_of
from plait.passes.trace import Reach, Spec, reach, trace
from plait.plan.planner import Planned
from plait.plan.staged import Pieces
from plait.program import Program
from plait.rules.moves import Cut, assemble, take
from plait.runtime import channel
from plait.runtime.channel import Channel
from plait.runtime.executor import Pattern, patterns_of, place, same
from plait.runtime.transport import MoveModule, Transport

SALT = 0x9E3779B97F4A7C15 % 2**62  # apart from the seed of the whole call: a draw per micro-batch


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


@dataclass(frozen=True)
class Piece:
    """One micro-batch: the rank's program, its stages, and the modules of those it runs."""

    local: Local
    stages: tuple[Stage, ...]
    placed: Mapping[str, int]  # stage of every call of `local`
    modules: Mapping[int, fx.GraphModule]
    feeds: Mapping[str, Feed]  # by placeholder


@dataclass(frozen=True)
class Pipeline:
    """The executable of one form of call; see executor.Executable, whose place it takes."""

    planned: Planned
    local: Local
    program: Program
    pieces: tuple[Piece, ...]
    given: tuple[Given, ...]  # of each flat output
    channel: Channel
    holders: Mapping[str, tuple[int, ...]]  # node of a weight -> places that hold it
    patterns: tuple[Any, ...]
    guard: Any  # agreement.guard
    device: torch.device
    only_last: bool = False
    schedule: str = "gpipe"
    _traces: dict[Any, tuple[dict[str, Spec], ...]] = field(default_factory=dict)
    _reaches: dict[Any, Reach] = field(default_factory=dict)

    @property
    def folded(self) -> tuple[str, ...]:
        return self.program.folded

    def __call__(self, weights: Mapping[str, Tensor], leaves: Sequence[Any], seed: Tensor) -> Any:
        grad = torch.is_grad_enabled() and self.program.training
        run = Run(self, weights, leaves, seed, grad)
        run.forward()
        if not grad:
            outs = run.outputs()
        else:
            outs = _connect(run)
        run.mutate(weights)
        self.channel.flush()
        if self.only_last and self.channel.place != self.last:
            return None
        values = [o.value if o.index is None else outs[o.index] for o in self.program.outputs]
        return pytree.tree_unflatten(values, self.program.out_spec)

    def accepts(self, leaves: Sequence[Any]) -> bool:
        return len(leaves) == len(self.patterns) and all(
            p.matches(x) if isinstance(p, Pattern) else same(p, x)
            for p, x in zip(self.patterns, leaves, strict=True)
        )

    def homes(self) -> list[frozenset[str]]:
        """The weights, by node, that each stage may read."""
        unused = {w.node for w in self.program.unused}
        held = [
            frozenset(n for n, places in self.holders.items() if p in places) | (unused if p == 0 else set())
            for p in range(self.channel.pp)
        ]
        return [held[self.place(s)] for s in range(len(self.pieces[0].stages))]

    # -- what both ends of a wire know ---------------------------------------------------------------

    @property
    def last(self) -> int:
        return (len(self.pieces[0].stages) - 1) % self.channel.pp

    @property
    def own(self) -> list[int]:
        """The stages of this rank."""
        return sorted(self.pieces[0].modules)

    def place(self, stage: int) -> int:
        return stage % self.channel.pp

    def owner(self, flat: int) -> int:
        """The stage that gives a flat output."""
        return next(s.index for s in self.pieces[0].stages if flat in s.results)

    def wanted(self) -> list[int]:
        """The flat outputs that the caller sees."""
        return sorted({o.index for o in self.program.outputs if o.index is not None})

    def parts(self, flat: int) -> range:
        """The micro-batches that have a say in a flat output."""
        return range(1 if self.given[flat].kind == "whole" else len(self.pieces))

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
                feed[name] = Spec(tuple(part.shape), x.dtype, grad and x.requires_grad)
            else:
                feed[name] = x
        feed["plait_seed"] = Spec((), torch.int64, False)
        return feed

    def reached(self, k: int, specs: Sequence[Mapping[str, Spec]], wanted: frozenset[int]) -> Reach:
        key = (k, id(specs), wanted)
        if key not in self._reaches:
            piece = self.pieces[k]
            self._reaches[key] = reach(piece.local, specs[k], piece.placed, wanted)
        return self._reaches[key]


@dataclass
class _Open:
    """What a stage keeps of one micro-batch between its forward and its backward."""

    received: dict[str, Tensor]
    made: dict[str, Tensor]


class Run:
    """One call. `forward_of` and `backward_of` are the two actions of every schedule."""

    def __init__(
        self,
        pipe: Pipeline,
        weights: Mapping[str, Tensor],
        leaves: Sequence[Any],
        seed: Tensor,
        grad: bool,
    ) -> None:
        self.pipe, self.grad, self.seed = pipe, grad, seed
        self.specs = pipe.specs(leaves, grad)
        self.leaves = [
            self._leaf(x.to(pipe.device), grad and x.requires_grad) if isinstance(x, Tensor) else x
            for x in leaves
        ]
        self.held = {
            s.weight.node: s.weight.name for s in pipe.local.shares if s.weight.name in weights
        }
        needs = {s.weight.node: grad and s.weight.requires_grad for s in pipe.local.shares}
        changed = {m.weight for m in pipe.program.mutations} if grad else set()
        self.weights = {
            n: self._leaf(weights[w].clone() if n in changed else weights[w], needs[n])
            for n, w in self.held.items()
        }
        self.originals = {n: weights[name] for n, name in self.held.items()}
        self.given_leaves = leaves
        self.open: dict[tuple[int, int], _Open] = {}
        self.results: dict[tuple[int, int], Any] = {}  # (flat, micro-batch) of this rank's stages
        self.sums = _Sums(self)

    @staticmethod
    def _leaf(x: Tensor, grad: bool) -> Tensor:
        return x.detach().requires_grad_(grad)

    # -- forward -------------------------------------------------------------------------------------

    def forward(self) -> None:
        for k in range(len(self.pipe.pieces)):
            for stage in self.pipe.own:
                self.forward_of(stage, k)

    def forward_of(self, index: int, k: int) -> None:
        """`{index}F{k}`."""
        pipe, piece = self.pipe, self.pipe.pieces[k]
        stage, specs = piece.stages[index], self.specs[k]
        received = {}
        for wire in stage.receives:
            tag = Channel.tag(channel.VALUE, self._number(piece, wire.value, wire.target), k)
            x = pipe.channel.receive(specs[wire.value], pipe.place(wire.source), tag, pipe.device)
            received[wire.value] = x.requires_grad_(specs[wire.value].grad)
        feed: list[Any] = [self.weights[n] for n in stage.weights]
        feed += [self._input(piece, n, k) for n in stage.inputs]
        if stage.seeded:
            feed.append((self.seed + k * SALT) % 2**62)
        feed += [received[w.value] for w in stage.receives]
        with torch.set_grad_enabled(self.grad):
            flat = piece.modules[index](*feed)
        made = dict(zip(stage.makes, flat, strict=True))
        for wire in stage.sends:
            tag = Channel.tag(channel.VALUE, self._number(piece, wire.value, wire.target), k)
            pipe.channel.send(made[wire.value], pipe.place(wire.target), tag)
        count = len(stage.makes) - len(stage.results)
        for i, value in zip(stage.results, flat[count:], strict=True):
            self.results[i, k] = value
        if self.grad:
            self.open[index, k] = _Open(received, made)

    def _number(self, piece: Piece, value: str, target: int) -> int:
        wires = [(w.value, w.target) for s in piece.stages for w in s.sends]
        return wires.index((value, target))

    def _input(self, piece: Piece, name: str, k: int) -> Any:
        source = piece.feeds[name]
        x = self.leaves[source.leaf]
        with torch.set_grad_enabled(self.grad):
            return take(x, source.cut.dim, source.cut.rows[k]) if source.cut is not None else x

    # -- outputs -------------------------------------------------------------------------------------

    def outputs(self) -> dict[int, Any]:
        """The flat outputs that the caller sees, whole, on every rank (or on the last stage)."""
        pipe, out = self.pipe, {}
        readers = [pipe.last] if pipe.only_last else list(range(pipe.channel.pp))
        for flat in pipe.wanted():
            owner = pipe.place(pipe.owner(flat))
            parts = [self._part(flat, k, owner, readers) for k in pipe.parts(flat)]
            if None not in [type(p) if p is None else 0 for p in parts] and parts[0] is not None:
                out[flat] = self._whole(flat, parts)
            else:
                out[flat] = None
        return out

    def _part(self, flat: int, k: int, owner: int, readers: Sequence[int]) -> Any:
        pipe = self.pipe
        spec = self._spec(flat, k)
        tag = Channel.tag(channel.OUTPUT, flat, k)
        if pipe.channel.place == owner:
            value = self.results[flat, k]
            if isinstance(value, Tensor):
                for place in readers:
                    if place != owner:
                        pipe.channel.send(value, place, tag)
                return value.detach()
            return value
        if pipe.channel.place not in readers or spec is None:
            return None
        return pipe.channel.receive(spec, owner, tag, pipe.device)

    def _spec(self, flat: int, k: int) -> Spec | None:
        piece = self.pipe.pieces[k]
        stage = piece.stages[self.pipe.owner(flat)]
        at = len(stage.makes) - len(stage.results) + stage.results.index(flat)
        return self.specs[k].get(stage.makes[at])

    def _whole(self, flat: int, parts: Sequence[Any]) -> Any:
        given = self.pipe.given[flat]
        if given.kind == "shard":
            assert given.cut is not None
            return assemble(list(parts), given.cut)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def differentiable(self, flat: int) -> bool:
        spec = self._spec(flat, 0)
        return spec is not None and spec.grad

    def mutate(self, weights: Mapping[str, Tensor]) -> None:
        """Buffers take their new values on every stage that holds them."""
        pipe = self.pipe
        for mutation in pipe.program.mutations:
            owner = pipe.place(pipe.owner(mutation.index))
            holders = pipe.holders[mutation.weight]
            tag = Channel.tag(channel.BUFFER, mutation.index)
            value = None
            if pipe.channel.place == owner:
                value = self.results[mutation.index, 0].detach()
                for place in holders:
                    if place != owner:
                        pipe.channel.send(value, place, tag)
            elif pipe.channel.place in holders:
                spec = self._spec(mutation.index, 0)
                assert spec is not None
                value = pipe.channel.receive(spec, owner, tag, pipe.device)
            if value is not None and pipe.channel.place in holders:
                with torch.no_grad():
                    weights[self.held[mutation.weight]].copy_(value)

    # -- backward ------------------------------------------------------------------------------------

    def backward(self, grads: Mapping[int, Tensor]) -> None:
        """`grads`: of the flat outputs, whole, the same on every rank."""
        for k in range(len(self.pipe.pieces)):
            for stage in reversed(self.pipe.own):
                self.backward_of(stage, k, grads)

    def backward_of(self, index: int, k: int, grads: Mapping[int, Tensor]) -> None:
        """`{index}B{k}`."""
        pipe, piece = self.pipe, self.pipe.pieces[k]
        stage, kept = piece.stages[index], self.open.pop((index, k))
        wanted = frozenset(i for i in grads if k in pipe.parts(i))
        reached = pipe.reached(k, self.specs, wanted)
        self.sums.note(reached)
        tensors, incoming = [], []
        for i in stage.results:
            if i in wanted and isinstance(self.results[i, k], Tensor):
                tensors.append(self.results[i, k])
                incoming.append(self._piece_of(i, grads[i], k))
        for wire in stage.sends:
            if wire.value in reached.values:
                tag = Channel.tag(channel.GRADIENT, self._number(piece, wire.value, wire.target), k)
                spec = self.specs[k][wire.value]
                tensors.append(kept.made[wire.value])
                incoming.append(pipe.channel.receive(spec, pipe.place(wire.target), tag, pipe.device))
        live = [(t, g) for t, g in zip(tensors, incoming, strict=True) if t.requires_grad]
        if live:
            torch.autograd.backward([t for t, _ in live], [g for _, g in live])
        for wire in stage.receives:
            if wire.value in reached.values:
                tag = Channel.tag(channel.GRADIENT, self._number(piece, wire.value, wire.target), k)
                x = kept.received[wire.value]
                grad = x.grad if x.grad is not None else torch.zeros_like(x)
                pipe.channel.send(grad, pipe.place(wire.source), tag)

    def _piece_of(self, flat: int, grad: Tensor, k: int) -> Tensor:
        given = self.pipe.given[flat]
        if given.kind != "shard":
            return grad
        assert given.cut is not None
        return take(grad, given.cut.dim, given.cut.rows[k])


class _Sums:
    """Gradients that several stages add to: who adds is known to all from the reach."""

    def __init__(self, run: Run) -> None:
        self.run, self.sources = run, set[tuple[str, int]]()

    def note(self, reached: Reach) -> None:
        place = self.run.pipe.place
        self.sources |= {(name, place(stage)) for name, stage in reached.sources}

    def weights(self) -> dict[str, Tensor | None]:
        """By node, of this rank's weights."""
        out: dict[str, Tensor | None] = {}
        for which, share in enumerate(self.run.pipe.local.shares):
            node = share.weight.node
            holders = self.run.pipe.holders[node]
            if not share.weight.requires_grad or self.run.pipe.channel.place not in holders:
                continue
            adders = sorted(p for name, p in self.sources if name == node)
            out[node] = self._total(self.run.weights[node], adders, holders, which)
        return out

    def inputs(self) -> list[Tensor | None]:
        """By leaf, on every rank."""
        run, out = self.run, list[Tensor | None]()
        names: dict[int, set[str]] = {}
        for piece in run.pipe.pieces:
            for name, source in piece.feeds.items():
                names.setdefault(source.leaf, set()).add(name)
        everywhere = tuple(range(run.pipe.channel.pp))
        for leaf, x in enumerate(run.leaves):
            if not isinstance(x, Tensor) or not x.requires_grad:
                out.append(None)
                continue
            mine = names.get(leaf, set())
            adders = sorted({p for name, p in self.sources if name in mine})
            out.append(self._total(x, adders, everywhere, len(run.pipe.local.shares) + leaf))
        return out

    def _total(
        self, x: Tensor, adders: Sequence[int], holders: Sequence[int], which: int
    ) -> Tensor | None:
        """The sum over `adders`, in their order, on all `holders`."""
        c, device = self.run.pipe.channel, self.run.pipe.device
        if not adders:
            return None
        own = x.grad if x.grad is not None else torch.zeros_like(x)
        spec = Spec(tuple(x.shape), x.dtype, False)
        root, tag, back = adders[0], Channel.tag(channel.SUM, which), Channel.tag(channel.TOTAL, which)
        if c.place == root:
            for place in adders[1:]:
                own = own + c.receive(spec, place, tag, device)
            for place in holders:
                if place != root:
                    c.send(own, place, back)
            return own
        if c.place in adders:
            c.send(own, root, tag)
        return c.receive(spec, root, back, device)


def _connect(run: Run) -> dict[int, Any]:
    """The outputs as results of one autograd node over this rank's weights and the inputs."""
    weights = [n for n, x in run.weights.items() if x.requires_grad]
    inputs = [i for i, x in enumerate(run.leaves) if isinstance(x, Tensor) and x.requires_grad]
    anchor = torch.zeros((), requires_grad=True)
    values = run.outputs()
    tensors = [i for i, x in values.items() if isinstance(x, Tensor)]
    outs = _Call.apply(
        run, weights, inputs, tensors, [values[i] for i in tensors], anchor,
        *(run.originals[n] for n in weights), *(run.given_leaves[i] for i in inputs),
    )  # fmt: skip
    return values | dict(zip(tensors, outs, strict=True))


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: Run, weights: list[str], inputs: list[int], tensors: list[int],
        values: list[Tensor], *leaves: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.run, ctx.weights, ctx.inputs, ctx.tensors = run, weights, inputs, tensors
        outs = tuple(v.view_as(v) for v in values)
        ctx.mark_non_differentiable(
            *(o for o, i in zip(outs, tensors, strict=True) if not run.differentiable(i))
        )
        ctx.set_materialize_grads(False)
        return outs

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        run: Run = ctx.run
        if run is None:
            raise BackwardTwice("backward was called twice for one forward of a compiled module")
        ctx.run = None
        given = {i: g for i, g in zip(ctx.tensors, grads, strict=True) if g is not None}
        with run.pipe.guard("backward"):
            run.backward(given)
            weights, inputs = run.sums.weights(), run.sums.inputs()
            run.pipe.channel.flush()
        return (
            None, None, None, None, None, None,
            *(weights[n] for n in ctx.weights), *(_at(inputs[i], run.given_leaves[i]) for i in ctx.inputs),
        )  # fmt: skip


def _at(grad: Tensor | None, x: Tensor) -> Tensor | None:
    return None if grad is None else grad.to(x.device)


class BackwardTwice(PlaitError, RuntimeError):
    """The values of a forward are let go with its backward."""


# -- making ----------------------------------------------------------------------------------------


def pipeline(
    pieces: Pieces,
    transport: Transport,
    line: Channel,
    guard: Any,
    device: torch.device,
    only_last: bool = False,
    holders: Mapping[str, tuple[int, ...]] | None = None,
) -> Pipeline:
    """This rank's stages of every micro-batch; `holders` by node, where weights are loaded."""
    staged = pieces.staged
    made = tuple(
        _piece(pieces, k, planned, transport, line, device)
        for k, planned in enumerate(pieces.planned)
    )
    first = made[0]
    return Pipeline(
        planned=pieces.planned[0],
        local=first.local,
        program=pieces.full,
        pieces=made,
        given=_given(pieces),
        channel=line,
        holders=holders or _holders(first, line.pp),
        patterns=patterns_of(pieces.full),
        guard=guard,
        device=device,
        only_last=only_last,
        schedule=staged.schedule,
    )


def _piece(
    pieces: Pieces, k: int, planned: Planned, transport: Transport, line: Channel, device: torch.device
) -> Piece:
    staged = pieces.staged
    local = partition(
        planned.program, planned.description, planned.strategies, planned.grads, transport.rank
    )
    light = frozenset(staged.light)
    stages = split(local, staged.firsts, light)
    algorithms = {p.name: p.algorithm for p in pieces.plan.collectives}
    root: dict[str, Any] = {name: value.to(device) for name, value in local.constants.items()}
    for name, site in local.sites.items():
        ways = (algorithms.get(n, "native") for n in (name, f"{name}.backward"))
        root[name] = MoveModule(site, transport, *ways)
    modules = {}
    for stage in stages:
        if stage.index % line.pp == line.place:
            place(stage.graph, device)
            modules[stage.index] = fx.GraphModule(root, stage.graph)
    placed = {n.name: s for n, s in stage_of(local, staged.firsts, light).items()}
    return Piece(local, stages, placed, modules, _feeds(pieces, planned.program))


def _feeds(pieces: Pieces, program: Program) -> dict[str, Feed]:
    at = {entry.path: leaf for leaf, entry in enumerate(pieces.full.inputs)}
    nodes = {n.name: n for n in pieces.full.graph.nodes if n.op == "placeholder"}
    out = {}
    for entry in program.inputs:
        if entry.node is None:
            continue
        path = entry.path.removesuffix(WHOLE_COPY)
        leaf, cut = at[path], None
        name = pieces.full.inputs[leaf].node
        assert name is not None
        if pieces.batch is not None and path == entry.path and nodes[name] in pieces.description.dims:
            dims = pieces.description.dims[nodes[name]][0]
            if pieces.batch.split.dim(dims) is not None:
                cut = Cut.of(dims, pieces.batch.split)
        out[entry.node] = Feed(leaf, cut)
    return out


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
            out.append(Given("shard", Cut.of(dims, layout.split)))
    return tuple(out)


def _holders(piece: Piece, pp: int) -> dict[str, tuple[int, ...]]:
    """A weight that no stage reads (a buffer that is only written) is held by the first."""
    reads: dict[str, set[int]] = {s.weight.node: set() for s in piece.local.shares}
    for stage in piece.stages:
        for node in stage.weights:
            reads[node].add(stage.index % pp)
    return {node: tuple(sorted(places)) or (0,) for node, places in reads.items()}
