"""Norms: the operators of a norm, and of the addition before it, found by what they compute.

    x -> fp32 -> square -> mean of the last dim -> + eps -> rsqrt -> * fp32 x -> x's dtype -> * weight

becomes one node, `ops.add_norm`, which a device may run as one kernel. Only operators count, never the
name of a module, and only over a last dim that this rank holds whole: a norm over a split dim has a
move in the middle and is left as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass

import torch
from torch import fx

from plait.passes import ops
from plait.passes.trace import Spec

aten = torch.ops.aten
Specs = Mapping[str, Spec]


@dataclass(frozen=True)
class Norm:
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    eps: float
    kind: str  # as runtime/kernels/norm.py names them
    last: fx.Node


def fuse(graph: fx.Graph, specs: MutableMapping[str, Spec]) -> None:
    """Every norm of `graph`, with the addition that it reads, as one `ops.add_norm`.

    `specs` learns those of the new nodes: the sum that one norm keeps is the residual of the next.
    """
    for node in list(graph.nodes):
        norm = match(node)
        if norm is not None and _plain(norm, specs):
            _replace(graph, norm, specs)
    drop_unread(graph)


def inside(graph: fx.Graph) -> dict[fx.Node, Norm]:
    """The operators that become part of a norm's one node, and of which."""
    out: dict[fx.Node, Norm] = {}
    for node in graph.nodes:
        norm = match(node)
        front = [node] if norm is not None else []
        while front and norm is not None:
            at = front.pop()
            out[at] = norm
            front += [i for i in at.all_input_nodes if i not in (norm.x, norm.weight, norm.bias)]
    return out


def match(node: fx.Node) -> Norm | None:
    """The norm that ends at `node`."""
    if node.target is aten.layer_norm.default:
        return _composite(node, "layer")
    if node.target is aten.rms_norm.default:
        return _composite(node, "rms")
    if node.target is aten.mul.Tensor:
        for weight, rows in _pairs(node):
            if weight.op == "placeholder" and (found := _root_mean_square(rows)) is not None:
                x, eps, rounded = found
                return Norm(x, weight, None, eps, "rms_rounded" if rounded else "rms", node)
    return None


def _composite(node: fx.Node, kind: str) -> Norm | None:
    x, dims, weight, *rest = (*node.args, None, None)
    if not isinstance(weight, fx.Node) or not isinstance(dims, (list, tuple)) or len(dims) != 1:
        return None
    bias = rest[0] if kind == "layer" else None
    eps = rest[1 if kind == "layer" else 0]
    eps = node.kwargs.get("eps", 1e-5 if eps is None and kind == "layer" else eps)
    if not isinstance(x, fx.Node) or not isinstance(eps, float):
        return None
    if kind == "layer" and not isinstance(bias, fx.Node):
        return None
    return Norm(x, weight, bias if isinstance(bias, fx.Node) else None, eps, kind, node)


def _root_mean_square(rows: fx.Node) -> tuple[fx.Node, float, bool] | None:
    """(x, eps, whether the rows are rounded to x's dtype) of x * rsqrt(mean(x * x) + eps)."""
    rounded = rows.target is aten._to_copy.default
    inner = rows.args[0] if rounded else rows
    if not isinstance(inner, fx.Node) or inner.target is not aten.mul.Tensor:
        return None
    for wide, scale in _pairs(inner):
        eps = _inverse_root(scale, wide)
        if eps is None:
            continue
        cast = wide.target is aten._to_copy.default and wide.kwargs.get("dtype") is torch.float32
        x = wide.args[0] if cast else wide
        if isinstance(x, fx.Node) and rounded == cast:
            return x, eps, rounded
    return None


def _inverse_root(scale: fx.Node, x: fx.Node) -> float | None:
    """eps, where `scale` is rsqrt(mean(x * x, last dim) + eps)."""
    if scale.target is not aten.rsqrt.default:
        return None
    added = scale.args[0]
    if not isinstance(added, fx.Node) or added.target not in (aten.add.Tensor, aten.add.Scalar):
        return None
    mean, eps = added.args[:2]
    if not isinstance(mean, fx.Node) or not isinstance(eps, float):
        return None
    if mean.target is not aten.mean.dim or list(mean.args[1]) != [-1] or mean.args[2:] != (True,):  # type: ignore[call-overload, arg-type]
        return None
    square = mean.args[0]
    assert isinstance(square, fx.Node)
    squared = (square.target is aten.pow.Tensor_Scalar and square.args == (x, 2)) or (
        square.target is aten.mul.Tensor and square.args == (x, x)
    )
    return eps if squared else None


def _plain(norm: Norm, specs: Specs) -> bool:
    """One dtype for rows in and out, one weight a column: what the kernels take."""
    x, out, weight = (specs.get(n.name) for n in (norm.x, norm.last, norm.weight))
    if x is None or out is None or weight is None or not x.shape:
        return False
    return x == out and weight.shape == x.shape[-1:] and x.dtype.is_floating_point


def _replace(graph: fx.Graph, norm: Norm, specs: MutableMapping[str, Spec]) -> None:
    """What a move brings is summed by whoever norms it, so the sum is an output of the norm too."""
    added = _addition(norm.x, specs)
    early = added is not None or norm.x.op == "call_module"
    with graph.inserting_after(norm.x) if early else graph.inserting_before(norm.last):
        x, residual = added or (norm.x, None)
        facts = (x, residual, norm.weight, norm.bias, norm.eps, norm.kind)
        both = graph.call_function(ops.add_norm, facts)
    with graph.inserting_after(both):
        rows = graph.call_function(operator.getitem, (both, 1))
        total = graph.call_function(operator.getitem, (both, 0)) if early else None
    specs[rows.name] = specs[norm.last.name]
    norm.last.replace_all_uses_with(rows)
    if total is not None:
        specs[total.name] = specs[norm.x.name]
        norm.x.replace_all_uses_with(total, delete_user_cb=lambda user: user is not both)


def _addition(node: fx.Node, specs: Specs) -> tuple[fx.Node, fx.Node] | None:
    """(term, residual) if `node` adds two values of its own shape and dtype; a moved one is the term."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return None
    residual, term = node.args
    if not isinstance(residual, fx.Node) or not isinstance(term, fx.Node) or residual is term:
        return None
    if not specs[node.name] == specs.get(residual.name) == specs.get(term.name):
        return None
    return (residual, term) if residual.op == "call_module" != term.op else (term, residual)


def _pairs(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    a, b = node.args[:2]
    if isinstance(a, fx.Node) and isinstance(b, fx.Node):
        yield a, b
        yield b, a


def drop_unread(graph: fx.Graph) -> None:
    """Calls of functions that nobody reads any more; moves stay, for other ranks take part in them."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
