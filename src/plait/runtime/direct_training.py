"""Direct moves of a training program: each with the matmuls around it, there and back.

    gather, matmuls     y = x W'    back: x travels again, beside dx = sum of dy W; its terms beside dW = dy' x
    matmul, scatter     y = x W'    back: dy travels beside dx = dy W of the own rows; then dW = dy' x

The way there is as in inference (pieces.py), but for norms, which autograd has to see: no kernel of theirs moves
rows. Of what is gathered only the own rows are kept, and on the way back the gradients of weights wait until the
rows are on their way, so that a transfer has a matmul beside it that needs nothing from it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd import Variable
from torch.autograd.function import once_differentiable

from plait.passes import ops
from plait.passes.partition import Local
from plait.passes.rings import Event, Found, Route
from plait.runtime import pieces
from plait.runtime.copy_engine import Lane
from plait.runtime.direct import Routes, own_shape
from plait.runtime.direct_calls import flat
from plait.runtime.pieces import COPIED, Coming, Linear, Ring
from plait.runtime.symmetric import Workspace

Guard = Callable[[], AbstractContextManager[None]]


def lower(
    local: Local, found: Found, chosen: Routes, workspace: Workspace, backward: Guard
) -> dict[str, nn.Module]:
    """Rewrite the graph of `local`; the modules that it calls instead of the `chosen` sites. `backward`: around
    the parts of a way back that wait for other ranks."""
    made: dict[str, nn.Module] = {}
    for shape, events in found.rings.items():
        mine = [e for e in events if e.site.name in chosen]
        if not mine:
            continue
        ring = Ring.of(workspace, shape.bounds, shape.width, shape.dtype)
        turns = Turns(ring, ring.again(workspace), workspace, backward)
        workspace.on_reset(turns.reset)
        for event in mine:
            made[f"{event.site.name}_ring"] = _replace(local.graph, event, turns, chosen[event.site.name])
        end = f"{mine[0].site.name}_close"
        made[end] = _Close(turns)
        with local.graph.inserting_before(local.graph.find_nodes(op="output")[0]):
            local.graph.call_module(end)
    workspace.ready()
    return made


def _replace(graph: fx.Graph, event: Event, turns: Turns, route: Route) -> nn.Module:
    target = f"{event.site.name}_ring"
    with graph.inserting_before(event.node):
        if event.kind == "gather":
            args: list[Any] = [event.node.args[0], *(tuple(m.args[1:]) for m in event.matmuls)]
            new = graph.call_module(target, tuple(args))
            for i, matmul in enumerate(event.matmuls):
                part = graph.call_function(operator.getitem, (new, i))
                part.meta.update(matmul.meta)
                matmul.replace_all_uses_with(part)
        else:
            new = graph.call_module(target, event.matmuls[0].args)
            new.meta.update(event.node.meta)
            event.node.replace_all_uses_with(new)
    gone = (event.node, *event.matmuls) if event.kind == "scatter" else (*event.matmuls, event.node)
    for node in gone:
        graph.erase_node(node)
    if event.kind == "gather":
        return GatherMatmuls(turns, route, event.site.shape)
    return MatmulScatter(turns, route, own_shape(event.site, turns.ring.rows.rank))


@dataclass
class Turns:
    """The moves of a ring, in the order in which they come: on the way back that is autograd's.

        gather     rows of the ring      after a scatter: whoever sends terms has read the rows of the gather before
        scatter    terms of the ring     after a gather: whoever hands on rows has summed the terms before
        again      rows of their own     after a gather: whoever hands on rows has read those that came again

    Otherwise the ring is closed and opened before the move, as it is for a call and for a way back.
    """

    ring: Ring
    second: Ring
    workspace: Workspace
    backward: Guard
    _open: bool = False
    _barred: frozenset[str] = frozenset()  # kinds that cannot be next as it is
    _pass: int = -1  # of autograd, that will close the ring

    @property
    def lane(self) -> Lane:
        return Lane.current(self.ring.rows.own.device)

    def take(self, kind: str) -> Lane:
        """The lane to compute on, with the ring ready for a move."""
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._pass):
            self._pass = task
            self.workspace.left(broken=True)  # by a way back that does not end
            Variable._execution_engine.queue_callback(self._end)  # type: ignore[no-untyped-call]
        if kind in self._barred:
            self.close()
        if not self._open:
            self.ring.open(self.lane)
            self._open = True
        self._barred = self._barred - FREES[kind] | {kind}
        return self.lane

    def close(self) -> None:
        if self._open:
            self.ring.close(self.lane)
        self._open, self._barred = False, frozenset()

    def _end(self) -> None:
        self.close()
        self.workspace.left(broken=False)

    def reset(self) -> None:
        self._open, self._barred, self._pass = False, frozenset(), -1


FREES: dict[str, set[str]] = {"gather": {"scatter", "again"}, "scatter": {"gather"}, "again": set()}


class _Close(nn.Module):
    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self.turns = turns

    def forward(self) -> None:
        self.turns.close()


@dataclass(frozen=True)
class _Way:
    """A move on the ring of `turns`."""

    turns: Turns
    route: Route

    def gather(self, own: Tensor, linears: Sequence[Linear], keep: bool = False) -> None:
        """`linears` of all rows, of which these are the own ones."""
        lane, ring = self.turns.take("gather"), self.turns.ring
        coming, handed = self._hand_on(ring, lane, own, keep)
        pieces.gather_matmul(ring, linears, lane, coming, self.route, own)
        lane.after(handed)  # `own` may go

    def again(self, own: Tensor) -> Callable[[], Tensor]:
        """Own rows on their way to all others once more; call it for those of all ranks."""
        lane, ring = self.turns.take("again"), self.turns.second
        coming, handed = self._hand_on(ring, lane, own, keep=True)

        def arrived() -> Tensor:
            lane.after(handed)
            return pieces.gathered(ring, coming)

        return arrived

    def gathered(self) -> Tensor:
        """All rows of the last `gather` that was to `keep` them, until the next one."""
        return self.turns.ring.rows.buffer.local

    def _hand_on(self, ring: Ring, lane: Lane, own: Tensor, keep: bool = False) -> tuple[Coming, Any]:
        """What comes, and when all is handed on; `keep`: the own rows go into the ring too, behind the others."""
        coming = ring.hand_on(lane, COPIED if ring is self.turns.second else self.route, own)
        if keep:
            with ring.copies():
                ring.rows.own.copy_(own)
        return coming, ring.copies.mark()

    def summed(self, coming: Coming) -> Tensor:
        """The own rows of a sum whose terms are on their way."""
        ring, lane = self.turns.ring, self.turns.lane
        out = torch.empty_like(ring.rows.own)
        facts: dict[str, Any] = {"eps": 0.0, "kind": "none"}
        pieces.finish(ring, None, None, None, lane, coming, rows_out=out, **facts)
        return out


class GatherMatmuls(nn.Module):
    def __init__(self, turns: Turns, route: Route, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.way, self.shape = _Way(turns, route), shape

    def forward(self, x: Tensor, *facts: Sequence[Any]) -> tuple[Any, ...]:
        """`facts`: what the matmuls multiply `x` by, and add; packed ones a list of each."""
        pairs, packs = list[Any](), list[tuple[int, ops.Packed | None]]()
        for weight, *rest in facts:
            if isinstance(weight, Tensor):
                packs.append((1, None))
                pairs += [weight, rest[0] if rest else None]
                continue
            biases = rest[0] if rest else ()
            together = ops.packed(weight, biases)
            apart = list(zip(weight, biases or [None] * len(weight), strict=True))
            mine = apart if together is None else [(together.weight, together.bias)]
            packs.append((len(mine), together))
            pairs += [x for pair in mine for x in pair]
        outs = iter(_Gather.apply(self.way, x, *pairs))  # type: ignore[no-untyped-call]
        made: list[Any] = []
        for (weight, *_), (count, together) in zip(facts, packs, strict=True):
            products = [next(outs).view(*self.shape[:-1], -1) for _ in range(count)]
            if together is not None:
                made.append(together.apart(products[0]))
            else:
                made.append(products[0] if isinstance(weight, Tensor) else tuple(products))
        return tuple(made)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, way: _Way, x: Tensor, *pairs: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = pairs[::2], pairs[1::2]
        rows = way.turns.ring.rows.buffer.local.shape[0]
        linears = [
            Linear(w, w.new_empty(rows, w.shape[0]), b)
            for w, b in zip(weights, biases, strict=True)
            if w is not None
        ]
        own = flat(x).contiguous()
        way.gather(own, linears)
        ctx.set_materialize_grads(False)
        ctx.way, ctx.shape = way, x.shape
        ctx.save_for_backward(own if any(ctx.needs_input_grad[2::2]) else None, *weights)
        return tuple(linear.out for linear in linears)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        way: _Way = ctx.way
        own, *weights = ctx.saved_tensors
        ring, dx, coming = way.turns.ring, None, None
        with way.turns.backward():
            known = [(g, w) for g, w in zip(grads, weights, strict=True) if g is not None]
            arrived = way.again(own) if own is not None else None
            if ctx.needs_input_grad[1] and known:
                lane, terms = way.turns.take("scatter"), ring.terms.partials.buffer.local
                for i, (dy, w) in enumerate(known):
                    torch.mm(dy, w, out=terms) if i == 0 else terms.addmm_(dy, w)
                coming = pieces.sent(ring, lane)
            whole = arrived() if arrived is not None else None
            back: list[Tensor | None] = []
            for i, g in enumerate(grads):
                back.append(g.t().mm(whole) if g is not None and ctx.needs_input_grad[2 + 2 * i] else None)  # type: ignore[arg-type]
                back.append(g.sum(0) if g is not None and ctx.needs_input_grad[3 + 2 * i] else None)
            if coming is not None:
                dx = way.summed(coming).view(ctx.shape)
        return None, dx, *back


class MatmulScatter(nn.Module):
    def __init__(self, turns: Turns, route: Route, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.way, self.shape = _Way(turns, route), shape

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """This rank's rows of the sum of all ranks' products."""
        return _Scatter.apply(self.way, flat(x), weight, bias).view(self.shape)  # type: ignore[no-any-return, no-untyped-call]


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, way: _Way, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        lane = way.turns.take("scatter")
        coming = pieces.matmul_scatter(way.turns.ring, x, weight, lane, way.route, bias=bias)
        ctx.way = way
        ctx.save_for_backward(x, weight)
        return way.summed(coming)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        way: _Way = ctx.way
        x, weight = ctx.saved_tensors
        _, asked, learns, shifts = ctx.needs_input_grad
        with way.turns.backward():
            dx = torch.empty_like(x, memory_format=torch.contiguous_format)
            linears = [Linear(weight.t(), dx)] if asked else []
            way.gather(flat(grad).contiguous(), linears, keep=learns or shifts)
            whole = way.gathered()
            dw = whole.t().mm(x) if learns else None
            db = whole.sum(0) if shifts else None
        return None, dx if asked else None, dw, db
