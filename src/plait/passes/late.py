"""Late: the gradients of weights taken out of a stage's backward, to be computed when there is time.

An operator in which weights meet data becomes a `Late`. On the way back it gives the
gradients of the data at once, so that the stage before can go on, and leaves those of the weights
in a queue:

    y = linear(x, w)      B: dx, dw        I: dx; queue (y, dy, w)        W: dw, then what made w

Operators on weights alone (a transpose, a sum of two weights, their moves between ranks) wait with
them, also where what they make leaves the stage. Each half computes only its own products: nothing is computed twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

QUEUE = "plait_late"


def defer(graph: fx.Graph, weights: Collection[str]) -> dict[str, Late]:
    """Rewrite a stage's graph in place; `weights`: placeholders that are trained.

    Returns the modules that the graph calls now. It gets one more placeholder, the last: the
    `Queue` of a micro-batch.
    """
    places = [n for n in graph.nodes if n.op == "placeholder"]
    alone = {n for n in places if n.name in weights}
    with graph.inserting_after(places[-1] if places else graph._root):
        queue = graph.placeholder(QUEUE)
    modules: dict[str, Late] = {}
    for node in list(graph.nodes):
        sources = [i for i in node.all_input_nodes if i.op != "get_attr"]
        if node.op not in ("call_function", "call_module") or not alone.intersection(sources):
            continue
        if alone.issuperset(sources):
            alone.add(node)
        else:
            modules[f"late_{node.name}"] = postpone(graph, node, queue, alone)
    for node in (n for n in graph.output_node().all_input_nodes if n in alone.difference(places)):
        with graph.inserting_before(graph.output_node()):
            end = graph.call_function(torch.ops.aten.alias.default, (node,))
        graph.output_node().replace_input_with(node, end)
        modules[f"late_{end.name}"] = postpone(graph, end, queue, alone)
    return modules


def postpone(graph: fx.Graph, node: fx.Node, queue: fx.Node, alone: Collection[fx.Node]) -> Late:
    """The module that stands for `node` now; `alone`: weights, and what is made of these alone."""
    flat, _ = pytree.tree_flatten((node.args, node.kwargs))
    which = tuple(i for i, x in enumerate(flat) if x in alone)
    with graph.inserting_before(node):
        new = graph.call_module(f"late_{node.name}", (queue, *node.args), node.kwargs)
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return Late(node.target, which)


@dataclass(frozen=True)
class _Owed:
    """Gradients `given` of an operator's `outs`; owed to `inner`, which stand for `weights`. `kept`: there may be
    another way back."""

    outs: tuple[Tensor, ...]
    given: tuple[Tensor, ...]
    inner: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    kept: bool

    def gradients(self) -> tuple[Tensor | None, ...]:
        """In the order of `weights`."""
        return torch.autograd.grad(self.outs, self.inner, self.given, retain_graph=self.kept, allow_unused=True)


@dataclass
class Queue:
    """What one micro-batch owes to the weights of a stage."""

    anchor: Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))
    owed: list[_Owed] = field(default_factory=list)

    def pay(self) -> None:
        """Every weight's gradient is added to its `.grad`: at once where nothing else adds to it, so that no
        more than one operator's gradients are held; once for all operators, where several do."""
        uses = Counter(id(w) for o in self.owed for w in o.weights)
        made: list[tuple[Tensor, Tensor]] = []
        while self.owed:
            made += _paid(self.owed.pop(0), uses)
        _add(made)


def _paid(owed: _Owed, uses: Mapping[int, int]) -> list[tuple[Tensor, Tensor]]:
    """What is left to be added. What was is freed with this call: the next gradients get the same memory."""
    found = [(w, g) for w, g in zip(owed.weights, owed.gradients(), strict=True) if g is not None]
    _add([(w, g) for w, g in found if _alone(w, uses)])
    return [(w, g) for w, g in found if not _alone(w, uses)]


def _alone(weight: Tensor, uses: Mapping[int, int]) -> bool:
    """Whether this is a parameter itself, not made of any, and of one operator."""
    return weight.is_leaf and uses[id(weight)] == 1


def _add(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    if pairs:
        torch.autograd.backward([w for w, _ in pairs], [g for _, g in pairs])


class Late(nn.Module):
    """An operator; `which` of its flat arguments are weights, or made of these alone."""

    def __init__(self, target: Any, which: Sequence[int]) -> None:
        super().__init__()
        self.target, self.which = target, tuple(which)

    def forward(self, queue: Queue | None, *args: Any, **kwargs: Any) -> Any:
        """Without a queue it is the operator as it was."""
        flat, spec = pytree.tree_flatten((args, kwargs))
        weights = {i: flat[i] for i in self.which if flat[i].requires_grad}
        if queue is None or not torch.is_grad_enabled() or not weights:
            return self.target(*args, **kwargs)
        data = {i: x for i, x in enumerate(flat) if isinstance(x, Tensor) and i not in weights}
        call = _Call(queue, self.target, flat, spec, weights, tuple(data))
        outs = _Late.apply(call, queue.anchor, *data.values())
        return outs if call.many else outs[0]

    def extra_repr(self) -> str:
        return f"{self.target}, weights {self.which}"


@dataclass
class _Call:
    queue: Queue
    target: Any
    flat: list[Any]
    spec: pytree.TreeSpec
    weights: dict[int, Tensor]
    data: tuple[int, ...]
    many: bool = False

    def run(self, data: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor], list[Tensor]]:
        """The outputs, with a graph of this operator alone; its leaves: data, weights."""
        xs = [x.detach().requires_grad_(x.requires_grad) for x in data]
        ws = [w.detach().requires_grad_() for w in self.weights.values()]
        flat = list(self.flat)
        for i, x in zip((*self.data, *self.weights), (*xs, *ws), strict=True):
            flat[i] = x
        self.flat = []
        args, kwargs = pytree.tree_unflatten(flat, self.spec)
        with torch.enable_grad():
            outs = self.target(*args, **kwargs)
        self.many = isinstance(outs, (tuple, list))
        return tuple(outs) if self.many else (outs,), xs, ws


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor, *data: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.outs, ctx.data, ctx.weights = call.run(data)
        outs = tuple(o.detach() for o in ctx.outs)
        ctx.mark_non_differentiable(
            *(o for o, own in zip(outs, ctx.outs, strict=True) if not own.requires_grad)
        )
        return outs

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        pairs = [(o, g) for o, g in zip(ctx.outs, grads, strict=True) if g is not None]
        outs, given = tuple(o for o, _ in pairs), tuple(g for _, g in pairs)
        asked = [x for x in ctx.data if x.requires_grad]
        found = iter(
            torch.autograd.grad(outs, asked, given, retain_graph=True, allow_unused=True)
            if pairs and asked
            else [None] * len(asked)
        )
        call: _Call = ctx.call
        kept = torch._C._autograd._get_current_graph_task_keep_graph()
        if pairs:
            owed = _Owed(outs, given, tuple(ctx.weights), tuple(call.weights.values()), kept)
            call.queue.owed.append(owed)
        back = [next(found) if x.requires_grad else None for x in ctx.data]
        if not kept:
            del ctx.outs, ctx.data, ctx.weights
        return None, None, *back
