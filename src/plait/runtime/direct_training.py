"""Direct moves of a training program: each with the matmuls around it, there and back.

    gather, matmuls     y = x W'    back: x travels again, beside dx = sum of dy W; its terms beside dW = dy' x
    matmul, scatter     y = x W'    back: dy travels beside dx = dy W of the own rows; then dW = dy' x

The way there is as in inference (pieces.py), but for norms, which autograd has to see: no kernel of theirs moves
rows. Of what is gathered only the own rows are kept, and on the way back the gradients of weights wait until the
rows are on their way, so that a transfer has a matmul beside it that needs nothing from it. Where a scatter's own
rows are too few for that, it computes gradients that the gather behind it owes (`Loan`):

    scatter  ── norm ── gather, matmuls ──         back: scatter  |= dW owed =|= dx =|= dW =|
       └─────── weights ───┘                                      |== dy ==|
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
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
from plait.runtime.direct import AGAIN, Routes, own_shape
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
        turns = Turns(ring, [ring.again(workspace) for _ in range(AGAIN)], workspace, backward)
        workspace.on_reset(turns.reset)
        loan: fx.Node | None = None
        for event, after in zip(mine, [*mine[1:], None], strict=True):
            way = Way(turns, chosen[event.site.name])
            target = f"{event.site.name}_ring"
            if event.kind == "gather":
                made[target] = _gather(local.graph, event, target, way, loan)
                loan = None
            else:
                made[target], loan = _scatter(local.graph, event, target, way, _lent(after, chosen))
        end = f"{mine[0].site.name}_close"
        made[end] = _Close(turns)
        with local.graph.inserting_before(local.graph.find_nodes(op="output")[0]):
            local.graph.call_module(end)
    workspace.ready()
    return made


def _lent(gather: Event | None, chosen: Routes) -> list[Any]:
    """The weights of a gather, or lists of packed ones, whose gradients the scatter before it computes."""
    if gather is None or gather.kind != "gather":
        return []
    kept = len(gather.matmuls) - chosen[gather.site.name].late
    return [matmul.args[1] for matmul in gather.matmuls[kept:]]


def _gather(graph: fx.Graph, event: Event, target: str, way: Way, loan: fx.Node | None) -> nn.Module:
    facts = (tuple(m.args[1:]) for m in event.matmuls)
    with graph.inserting_before(event.node):
        new = graph.call_module(target, (event.node.args[0], *facts), {"loan": loan})
        for i, matmul in enumerate(event.matmuls):
            part = graph.call_function(operator.getitem, (new, i))
            part.meta.update(matmul.meta)
            matmul.replace_all_uses_with(part)
    for node in (*event.matmuls, event.node):
        graph.erase_node(node)
    return GatherMatmuls(way, event.site.shape)


def _scatter(
    graph: fx.Graph, event: Event, target: str, way: Way, lent: Sequence[Any]
) -> tuple[nn.Module, fx.Node | None]:
    """With the node of the `Loan` of what is `lent`."""
    (matmul,) = event.matmuls
    with graph.inserting_before(event.node):
        new = graph.call_module(target, matmul.args, {"lent": tuple(lent)})
        rows, loan = (graph.call_function(operator.getitem, (new, i)) for i in range(2))
    rows.meta.update(event.node.meta)
    event.node.replace_all_uses_with(rows)
    for node in (event.node, matmul):
        graph.erase_node(node)
    if not lent:
        graph.erase_node(loan)
    return MatmulScatter(way, own_shape(event.site, way.turns.ring.rows.rank)), loan if lent else None


# -- turns ------------------------------------------------------------------------------------------


@dataclass
class Turns:
    """The moves of a ring, in the order in which they come: on the way back that is autograd's.

        gather     rows of the ring      after a scatter: whoever sends terms has read the rows of the gather before
        scatter    terms of the ring     after a gather: whoever hands on rows has summed the terms before
        again      rows of their own     two gathers later: what is owed (`Owed`) of them is computed in the first,
                                         behind the rows that it hands on, and before those of the second

    Otherwise the ring is closed and opened before the move, as it is for a call and for a way back.
    """

    ring: Ring
    spare: Sequence[Ring]  # for rows that come again, in turn
    workspace: Workspace
    backward: Guard
    _open: bool = False
    _last: str = ""  # gather or scatter
    _gathers: int = 0
    # of the last rows that came again: how many gathers there had been, and what is owed of them
    _again: list[tuple[int, list[Owed]]] = field(default_factory=list)
    _pass: int = -1  # of autograd, that will close the ring
    _captured: bool = False  # into a graph, and not run

    @property
    def lane(self) -> Lane:
        return Lane.current(self.ring.rows.own.device)

    def take(self, kind: str) -> Lane:
        """The lane to compute on, with the ring ready for a gather or a scatter."""
        self._enter()
        if kind == self._last:
            self.close()
            self._enter()
        self._last = kind
        self._gathers += kind == "gather"
        return self.lane

    def take_again(self) -> tuple[Lane, Ring]:
        """The lane, and a ring for rows that come again."""
        self._enter()
        if len(self._again) == AGAIN:
            used, owed = self._again.pop(0)
            for debt in owed:
                debt.settle()  # whoever should have has not come
            if self._gathers - used < 2:
                self.close()
                self._enter()
        self._again.append((self._gathers, []))
        self.spare = [*self.spare[1:], self.spare[0]]
        return self.lane, self.spare[-1]

    def owe(self, debt: Owed) -> None:
        """Of the rows that came again last."""
        self._again[-1][1].append(debt)

    def _enter(self) -> None:
        captured = self.ring.rows.own.is_cuda and torch.cuda.is_current_stream_capturing()
        if captured != self._captured:  # what a capture that failed has opened is not open
            self.reset()
            self._captured = captured
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._pass):
            self._pass = task
            self.workspace.left(broken=True)  # by a way back that does not end
            Variable._execution_engine.queue_callback(self._end)  # type: ignore[no-untyped-call]
        if not self._open:
            self.ring.open(self.lane)
            self._open = True

    def close(self) -> None:
        """All has been read."""
        for debt in (debt for _, owed in self._again for debt in owed):
            debt.settle()
        if self._open:
            self.ring.close(self.lane)
        self.reset()

    def _end(self) -> None:
        self.close()
        self._pass = -1
        self.workspace.left(broken=False)

    def reset(self) -> None:
        self._open, self._last, self._gathers, self._again = False, "", 0, []


class _Close(nn.Module):
    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self.turns = turns

    def forward(self) -> None:
        self.turns.close()


@dataclass(frozen=True)
class Way:
    """A move on the ring of `turns`."""

    turns: Turns
    route: Route

    def gather(
        self, own: Tensor, linears: Sequence[Linear], keep: bool = False, beside: Sequence[Owed] = ()
    ) -> Tensor:
        """`linears` of all rows, of which these are the own ones, and what is owed before.

        Returns all rows, if it is to `keep` them: until the next gather.
        """
        lane, ring = self.turns.take("gather"), self.turns.ring
        route = COPIED if beside else self.route
        coming, handed = _hand_on(ring, lane, own, route, keep)
        for debt in beside:
            debt.settle()
        pieces.gather_matmul(ring, linears, lane, coming, route, own)
        lane.after(handed)  # `own` may go
        return ring.rows.buffer.local

    def again(self, own: Tensor) -> Callable[[], Tensor]:
        """Own rows on their way to all others once more; call it, once, for those of all ranks."""
        lane, ring = self.turns.take_again()
        coming, handed = _hand_on(ring, lane, own, COPIED, True)

        def arrived() -> Tensor:
            lane.after(handed)
            return pieces.gathered(ring, coming)

        return arrived

    def summed(self, coming: Coming) -> Tensor:
        """The own rows of a sum whose terms are on their way."""
        ring, lane = self.turns.ring, self.turns.lane
        out = torch.empty_like(ring.rows.own)
        facts: dict[str, Any] = {"eps": 0.0, "kind": "none"}
        pieces.finish(ring, None, None, None, lane, coming, rows_out=out, **facts)
        return out


def _hand_on(ring: Ring, lane: Lane, own: Tensor, route: Route, keep: bool) -> tuple[Coming, Any]:
    """What comes, and when all is handed on; `keep`: the own rows go into the ring too, behind the others."""
    coming = ring.hand_on(lane, route, own)
    if keep:
        with ring.copies():
            ring.rows.own.copy_(own)
    return coming, ring.copies.mark()


# -- what is owed -----------------------------------------------------------------------------------


@dataclass
class Owed:
    """The gradient of the weights of one matmul, `sizes` rows of each: of `dy` and the rows that it multiplied."""

    first: int  # of the weights that are lent
    sizes: Sequence[int]
    dy: Tensor | None
    rows: Tensor | None
    found: Tensor | None = None

    def settle(self) -> None:
        if self.dy is not None and self.rows is not None:
            self.found = self.dy.t().mm(self.rows)
        self.dy = self.rows = None


@dataclass(frozen=True)
class Loan:
    """Weights of a gather's last matmuls, that came through the scatter before it, and what is owed to them.

    `anchor` is empty; it ties the two together for autograd, which comes to the scatter when the gather is done.
    """

    weights: Sequence[Sequence[Tensor]]  # of each of the matmuls
    anchor: Tensor
    owed: list[Owed]


# -- a gather and its matmuls -----------------------------------------------------------------------


class GatherMatmuls(nn.Module):
    def __init__(self, way: Way, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.way, self.shape = way, shape

    def forward(self, x: Tensor, *facts: Sequence[Any], loan: Loan | None = None) -> tuple[Any, ...]:
        """`facts`: what the matmuls multiply `x` by, and add; packed ones a list of each."""
        through = [] if loan is None else list(loan.weights)
        lent: list[Sequence[Tensor]] = [()] * (len(facts) - len(through)) + through
        products, at = list[_Product](), 0
        for (weight, *rest), mine in zip(facts, lent, strict=True):
            weights = list(mine) or ([weight] if isinstance(weight, Tensor) else list(weight))
            biases = rest[0] if rest else None
            biases = [] if biases is None else [biases] if isinstance(biases, Tensor) else list(biases)
            products.append(_Product.of(weights, biases, at if mine else None, isinstance(weight, Tensor)))
            at += len(mine)
        late = [place for p in products for place in p.late]
        owed, anchor = (loan.owed, loan.anchor) if loan is not None else (None, None)
        pairs = [t for p in products for pair in p.pairs for t in pair]
        outs = iter(_Gather.apply(self.way, owed, late, anchor, x, *pairs))  # type: ignore[no-untyped-call]
        return tuple(p.apart([next(outs).view(*self.shape[:-1], -1) for _ in p.pairs]) for p in products)


Late = tuple[int, Sequence[int]] | None  # the first of the lent weights, and the rows of each


@dataclass(frozen=True)
class _Product:
    """One operator of the program: its matmuls, as (weight, bias); what of it is `late`; how its results come."""

    pairs: Sequence[tuple[Tensor, Tensor | None]]
    late: Sequence[Late]
    together: ops.Packed | None
    alone: bool

    @classmethod
    def of(cls, weights: Sequence[Tensor], biases: Sequence[Tensor], at: int | None, alone: bool) -> _Product:
        together = None if alone else ops.packed(weights, biases)
        if together is not None:
            late: list[Late] = [None if at is None else (at, together.sizes)]
            return cls([(together.weight, together.bias)], late, together, False)
        shifts: Sequence[Tensor | None] = biases or [None] * len(weights)
        late = [None if at is None else (at + i, [w.shape[0]]) for i, w in enumerate(weights)]
        return cls(list(zip(weights, shifts, strict=True)), late, None, alone)

    def apart(self, outs: list[Tensor]) -> Any:
        if self.together is not None:
            return self.together.apart(outs[0])
        return outs[0] if self.alone else tuple(outs)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, way: Way, owed: list[Owed] | None, late: Sequence[Late], anchor: Tensor | None, x: Tensor,
        *pairs: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
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
        ctx.way, ctx.shape, ctx.owed, ctx.late = way, x.shape, owed, late
        ctx.anchor = None if anchor is None else anchor.new_empty(0)
        ctx.save_for_backward(own if any(ctx.needs_input_grad[5::2]) else None, *weights)
        return tuple(linear.out for linear in linears)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        way: Way = ctx.way
        own, *weights = ctx.saved_tensors
        ring, dx, coming = way.turns.ring, None, None
        if ctx.owed is not None:
            ctx.owed.clear()  # of a way back that did not end
        with way.turns.backward():
            arrived = way.again(own) if own is not None else None
            if ctx.needs_input_grad[4]:
                lane, terms = way.turns.take("scatter"), ring.terms.partials.buffer.local
                known = [(g, w) for g, w in zip(grads, weights, strict=True) if g is not None]
                for i, (dy, w) in enumerate(known):
                    torch.mm(dy, w, out=terms) if i == 0 else terms.addmm_(dy, w)
                coming = pieces.sent(ring, lane)
            whole = arrived() if arrived is not None else None
            back: list[Tensor | None] = []
            for i, (g, late) in enumerate(zip(grads, ctx.late, strict=True)):
                learns, shifts = ctx.needs_input_grad[5 + 2 * i : 7 + 2 * i]
                back.append(_weight(ctx, g, whole, late) if g is not None and learns else None)
                back.append(g.sum(0) if g is not None and shifts else None)
            if coming is not None:
                dx = way.summed(coming).view(ctx.shape)
        return None, None, None, ctx.anchor, dx, *back


def _weight(ctx: Any, dy: Tensor, whole: Tensor | None, late: Late) -> Tensor | None:
    """The gradient of a weight; None where it is owed."""
    assert whole is not None
    if late is None:
        return dy.t().mm(whole)
    debt = Owed(*late, dy, whole)
    ctx.owed.append(debt)
    ctx.way.turns.owe(debt)
    return None


# -- a matmul and its scatter -----------------------------------------------------------------------


class MatmulScatter(nn.Module):
    def __init__(self, way: Way, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.way, self.shape = way, shape

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, lent: Sequence[Any] = ()
    ) -> tuple[Tensor, Loan | None]:
        """This rank's rows of the sum of all ranks' products, and a loan of the weights that are `lent`."""
        groups = [[w] if isinstance(w, Tensor) else list(w) for w in lent]
        every, owed = [w for group in groups for w in group], list[Owed]()
        out, anchor, *through = _Scatter.apply(self.way, owed, flat(x), weight, bias, *every)  # type: ignore[no-untyped-call]
        loan = None
        if anchor.requires_grad and every:
            parts = iter(through)
            loan = Loan([[next(parts) for _ in group] for group in groups], anchor, owed)
        return out.view(self.shape), loan


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, way: Way, owed: list[Owed], x: Tensor, weight: Tensor, bias: Tensor | None, *lent: Tensor
    ) -> tuple[Tensor, ...]:
        lane = way.turns.take("scatter")
        coming = pieces.matmul_scatter(way.turns.ring, x, weight, lane, way.route, bias=bias)
        ctx.set_materialize_grads(False)
        ctx.way, ctx.owed = way, owed
        ctx.save_for_backward(x, weight)
        return way.summed(coming), x.new_empty(0), *(w.view_as(w) for w in lent)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor | None, anchor: Tensor | None, *lent: Tensor | None) -> tuple[Any, ...]:
        way: Way = ctx.way
        x, weight = ctx.saved_tensors
        _, _, asked, learns, shifts, *_ = ctx.needs_input_grad
        dx = dw = db = None
        owed = list(ctx.owed)
        ctx.owed.clear()
        with way.turns.backward():
            if grad is not None:
                dx = torch.empty_like(x, memory_format=torch.contiguous_format) if asked else None
                linears = [Linear(weight.t(), dx)] if dx is not None else []
                whole = way.gather(flat(grad).contiguous(), linears, keep=learns or shifts, beside=owed)
                dw = whole.t().mm(x) if learns else None
                db = whole.sum(0) if shifts else None
        return None, None, dx, dw, db, *_paid(owed, lent)


def _paid(owed: Sequence[Owed], lent: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients of the weights that were lent."""
    found = list(lent)
    for debt in owed:
        debt.settle()
        assert debt.found is not None
        for i, part in enumerate(debt.found.split(list(debt.sizes))):
            found[debt.first + i] = part
    return found
