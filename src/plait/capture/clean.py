"""Take out of a graph what computes nothing, and give each thing one spelling.

Copies that only change strides go too: whoever runs a Program treats a `view` as a reshape.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from plait.program import may_learn

aten = torch.ops.aten


def clean(graph: fx.Graph, training: bool) -> None:
    gradient = _needs_gradient(graph) if training else set()
    casts: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in ASSERTIONS:
            graph.erase_node(node)
            continue
        if node.target in SPELLINGS:
            node.target = SPELLINGS[node.target]
        _expanded(node)
        same = _same(node, gradient) or _repeat(graph, node) or _cast_once(node, casts)
        if same is not None:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _expanded(node: fx.Node) -> None:
    """A result of broadcast_tensors is one of its operands, expanded (losses against a target)."""
    source = node.args[0] if node.target is operator.getitem else None
    if not isinstance(source, fx.Node) or source.target is not aten.broadcast_tensors.default:
        return
    operands: Any = source.args[0]
    x, sizes = operands[node.args[1]], node.meta["val"].shape
    if same_sizes(x.meta["val"].shape, sizes) or all(isinstance(n, int) for n in sizes):
        node.target, node.args = aten.expand.default, (x, list(sizes))


def _same(node: fx.Node, gradient: set[fx.Node]) -> fx.Node | None:
    """The operand that `node` equals."""
    rule = NO_OPS.get(node.target)
    if rule is None:
        return None
    source = rule(node)
    if source is None or (node.target is aten.detach.default and source in gradient):
        return None
    returned = any(u.op == "output" for u in node.users)
    if returned and source.op == "placeholder":
        return None  # the caller may write into what it was given
    return source


# -- what equals its operand -------------------------------------------------------------------------


def _always(node: fx.Node) -> fx.Node:
    return node.args[0]  # type: ignore[return-value]


def _if_same_type(node: fx.Node) -> fx.Node | None:
    x, y = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    return _always(node) if x.dtype == y.dtype and x.device == y.device else None


def _if_same_shape(node: fx.Node) -> fx.Node | None:
    x, y = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    return _always(node) if same_sizes(x.shape, y.shape) else None


def _copied(node: fx.Node) -> fx.Node | None:
    """copy(into, source): the values of `source`."""
    source = node.args[1]
    if not isinstance(source, fx.Node):
        return None
    x, y = source.meta["val"], node.meta["val"]
    return source if same_sizes(x.shape, y.shape) and x.dtype == y.dtype else None


def _dropout_of_nothing(node: fx.Node) -> fx.Node | None:
    """The result of a dropout with p = 0 or outside training."""
    source, index = node.args
    if not isinstance(source, fx.Node) or source.target is not aten.native_dropout.default or index:
        return None
    x, p, train = source.args
    return x if p == 0 or train is False else None  # type: ignore[return-value]


def _whole_slice(node: fx.Node) -> fx.Node | None:
    step = node.args[4] if len(node.args) > 4 else 1
    return _if_same_shape(node) if step == 1 else None


def _needs_gradient(graph: fx.Graph) -> set[fx.Node]:
    """Values that a gradient may flow into: detach means something there."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and not may_learn(value):
            continue
        if node.op == "placeholder":
            found |= {node} if isinstance(value, torch.Tensor) else set()
        elif node.target is not aten.detach.default and found.intersection(node.all_input_nodes):
            found.add(node)
    return found


# -- one spelling --------------------------------------------------------------------------------


def _repeat(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """view(expand(unsqueeze(x, p), r at p)) that merges p into p-1: every index of p-1, r times."""
    if node.target is not aten.view.default:
        return None
    expand = node.args[0]
    if not isinstance(expand, fx.Node) or expand.target is not aten.expand.default:
        return None
    unsqueeze = expand.args[0]
    if not isinstance(unsqueeze, fx.Node) or unsqueeze.target is not aten.unsqueeze.default:
        return None
    x, wide = unsqueeze.args[0], expand.meta["val"].shape
    sizes = x.meta["val"].shape  # type: ignore[union-attr]
    at = int(unsqueeze.args[1]) % len(wide)  # type: ignore[arg-type,call-overload]
    repeats = wide[at]
    if at == 0 or not isinstance(repeats, int) or repeats == 1:
        return None
    if not same_sizes(wide[:at] + wide[at + 1 :], sizes):
        return None
    merged = (*sizes[: at - 1], sizes[at - 1] * repeats, *sizes[at:])
    if not same_sizes(node.meta["val"].shape, merged):
        return None
    with graph.inserting_before(node):
        new = graph.call_function(aten.repeat_interleave.self_int, (x, repeats, at - 1))
    new.meta = dict(node.meta)
    return new


def _cast_once(node: fx.Node, casts: dict[Any, fx.Node]) -> fx.Node | None:
    """Autocast casts a weight at every use; once is enough."""
    if node.target is not aten._to_copy.default or node.args[0].op != "placeholder":  # type: ignore[union-attr]
        return None
    first = casts.setdefault((node.args, tuple(sorted(node.kwargs.items()))), node)
    return None if first is node else first


def same_sizes(a: Any, b: Any) -> bool:
    """Equal for every value of the symbols, without a new guard on any."""
    return len(a) == len(b) and all(_size_key(x) == _size_key(y) for x, y in zip(a, b, strict=True))


def _size_key(size: Any) -> Any:
    return size if isinstance(size, int) else size.node.expr


# -- the tables ----------------------------------------------------------------------------------

ASSERTIONS = {
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten._assert_async.msg,
    aten._assert_async.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
}
SPELLINGS: dict[Any, Any] = {
    aten._unsafe_view.default: aten.view.default,
    aten.reshape.default: aten.view.default,
    aten._conj.default: aten._conj_physical.default,  # not a bit of the tensor: what moves has lost it
    aten._neg_view.default: aten.neg.default,
}
NO_OPS: dict[Any, Callable[[fx.Node], fx.Node | None]] = {
    aten.alias.default: _always,
    aten.clone.default: _always,
    aten.lift_fresh_copy.default: _always,
    aten.detach.default: _always,
    aten._to_copy.default: _if_same_type,
    aten.expand.default: _if_same_shape,
    aten.view.default: _if_same_shape,
    aten.slice.Tensor: _whole_slice,
    aten.copy.default: _copied,
    operator.getitem: _dropout_of_nothing,
}
