"""Expand: operators whose local form needs more than smaller arguments.

    mean            local mean times its share of the rows             -> partial
    embedding       foreign ids give zeros                             -> partial
    slice, select   of few rows: foreign ones give zeros               -> partial
    repeat          the rank's rows are gathered                       (shares of `(g r)`)
    counted rows    `x[arange(b), i]`: the rank's own are counted
    grouped matmul  widths padded to what its kernel takes
    attention       a chunk's queries are the last of the keys so far
    softmax         max, then sum, across the ranks
    layer_norm      two means across the ranks
    cross_entropy   max, sum of exponentials and the target's logit across the ranks
    dropout         drawn by global element index
    random          whole, by a generator that is seeded alike on every rank

Each is a function (emitter, node, operands) -> the new node; `EXPANSIONS` says when it applies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from plait.passes import ops
from plait.rules.describe import Access, bind
from plait.rules.equation import Factor
from plait.rules.layout import COPIED, PARTIAL, WHOLE, Layout, Strategy
from plait.rules.split import Split

if TYPE_CHECKING:
    from plait.passes.partition import Emitter

aten = torch.ops.aten
Expansion = Callable[["Emitter", fx.Node, Access, Strategy, list[fx.Node]], fx.Node]


def _split(strategy: Strategy) -> Split:
    assert strategy.split is not None
    return strategy.split


def mean(
    e: Emitter, node: fx.Node, access: Access, strategy: Strategy, xs: list[fx.Node]
) -> fx.Node:
    split = _split(strategy)
    share = 1.0
    for letter in access.letters:
        if letter.property == "sum" and split.touches(letter.factor):
            share *= split.size(letter.factor, e.rank) / letter.factor.size
    return e.call(aten.mul.Tensor, e.copy(node, xs), share)


def embedding(
    e: Emitter, node: fx.Node, access: Access, strategy: Strategy, xs: list[fx.Node]
) -> fx.Node:
    bound = bind(node)
    v = access.operands[0].dims[0]
    rows = _split(strategy).ranges(v, e.rank)
    return e.call(ops.embedding_rows, xs[0], xs[1], bound["padding_idx"], v.size, rows)


def some_rows(
    e: Emitter, node: fx.Node, access: Access, strategy: Strategy, xs: list[fx.Node]
) -> fx.Node:
    bound, dims = bind(node), access.operands[0].dims
    dim = bound["dim"] % len(dims)
    size, alone = dims[dim].size, "index" in bound
    start = (bound["index"] if alone else bound["start"] or 0) % size
    end = start + (1 if alone else access.result[dim].size)
    rows = e.call(ops.some_rows, xs[0], dim, start, end, _split(strategy).ranges(dims[dim], e.rank))
    return e.call(aten.squeeze.dim, rows, dim) if alone else rows


def repeat(
    e: Emitter, node: fx.Node, access: Access, strategy: Strategy, xs: list[fx.Node]
) -> fx.Node:
    """The rank's rows of `(g r)`, each from the row of `g` it repeats; one form for all ranks."""
    split, bound = _split(strategy), bind(node)
    dims = access.operands[0].dims
    dim, r = bound["dim"] % len(dims), bound["repeats"]
    if not split.touches(access.result[dim]):
        return e.copy(node, xs)
    rows = [_repeated(split, dims[dim], access.result[dim], r, k) for k in range(split.ranks)]
    held = [split.size(dims[dim], k) for k in range(split.ranks)]
    if all(rows[k] == [i for i in range(held[k]) for _ in range(r)] for k in range(split.ranks)):
        return e.copy(node, xs)
    at = e.constant(torch.tensor(rows[e.rank]), "rows")
    return e.call(aten.index_select.default, xs[0], dim, at)


def counted(
    e: Emitter, node: fx.Node, access: Access, strategy: Strategy, xs: list[fx.Node]
) -> fx.Node:
    """What counts the rows of a dim counts those that the rank has."""
    split, at = _split(strategy), 0
    xs = list(xs)
    for pick, f in zip(bind(node)["indices"], access.operands[0].dims, strict=False):
        at += pick is not None
        if pick is not None and split.touches(f):
            sizes = [split.size(f, e.rank) if n == f.size else 1 for n in pick.meta["val"].shape]
            xs[at] = e.constant(torch.arange(split.size(f, e.rank)).view(sizes), "rows")
    return e.copy(node, xs)


def grouped_matmul(
    e: Emitter, node: fx.Node, access: Access, strategy: Strategy, xs: list[fx.Node]
) -> fx.Node:
    return e.call(ops.grouped_matmul, *xs)


def _repeated(split: Split, g: Factor, merged: Factor, r: int, rank: int) -> list[int]:
    """For each row of the rank's `(g r)`: the position of its row of `g` among those it holds."""
    held = [i for lo, hi in split.ranges(g, rank) for i in range(lo, hi)]
    return [held.index(i // r) for lo, hi in split.ranges(merged, rank) for i in range(lo, hi)]


def attention(
    e: Emitter, node: fx.Node, access: Access, strategy: Strategy, xs: list[fx.Node]
) -> fx.Node:
    """`is_causal` counts from the first key, a chunk's queries from its last."""
    new = e.copy(node, xs)
    if any(dim == len(access.result) - 2 for dim, *_ in e.rows(access.result)):
        new.target = ops.causal_attention
    return new


def softmax(
    e: Emitter, node: fx.Node, access: Access, strategy: Strategy, xs: list[fx.Node]
) -> fx.Node:
    bound = bind(node)
    x, dim = xs[0], bound["dim"]
    dtype = bound.get("dtype")
    if dtype is not None:
        x = e.call(aten._to_copy.default, x, dtype=dtype)
    shifted = e.call(aten.sub.Tensor, x, _across_max(e, node, x, dim))
    exp = e.call(aten.exp.default, shifted)
    total = _across_sum(e, node, exp, dim)
    if "log_softmax" in str(node.target):
        return e.call(aten.sub.Tensor, shifted, e.call(aten.log.default, total))
    return e.call(aten.div.Tensor, exp, total)


def _across_max(e: Emitter, node: fx.Node, x: fx.Node, dim: int) -> fx.Node:
    """The maximum over a split dim, without gradient: it only keeps exponentials finite."""
    top = e.call(aten.amax.default, e.call(aten.detach.default, x), [dim], True)
    return e.move(top, Layout("partial", "max"), COPIED, (), node, grad=False)


def _across_sum(e: Emitter, node: fx.Node, x: fx.Node, dim: int) -> fx.Node:
    part = e.call(aten.sum.dim_IntList, x, [dim], True)
    return e.move(part, PARTIAL, COPIED, (), node)


def layer_norm(
    e: Emitter, node: fx.Node, access: Access, strategy: Strategy, xs: list[fx.Node]
) -> fx.Node:
    """In fp32 where the input is narrower, as the fused operator does."""
    bound = bind(node)
    size = float(access.operands[0].dims[-1].size)
    dtype = node.meta["val"].dtype
    x = xs[0]
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    if wide != dtype:
        x = e.call(aten._to_copy.default, x, dtype=wide)
    mean_ = e.call(aten.div.Tensor, _across_sum(e, node, x, -1), size)
    centred = e.call(aten.sub.Tensor, x, mean_)
    square = e.call(aten.mul.Tensor, centred, centred)
    variance = e.call(aten.div.Tensor, _across_sum(e, node, square, -1), size)
    scale = e.call(aten.rsqrt.default, e.call(aten.add.Tensor, variance, bound["eps"]))
    out = e.call(aten.mul.Tensor, centred, scale)
    rest = iter(xs[1:])
    for name, op in (("weight", aten.mul.Tensor), ("bias", aten.add.Tensor)):
        if bound.get(name) is not None:
            out = e.call(op, out, next(rest))
    return e.call(aten._to_copy.default, out, dtype=dtype) if wide != dtype else out


def cross_entropy(
    e: Emitter, node: fx.Node, access: Access, strategy: Strategy, xs: list[fx.Node]
) -> fx.Node:
    bound = bind(node)
    x, target = xs
    v = access.operands[0].dims[1]
    rows = _split(strategy).ranges(v, e.rank)
    top = _across_max(e, node, x, 1)
    exp = e.call(aten.exp.default, e.call(aten.sub.Tensor, x, top))
    total = e.move(e.call(aten.sum.dim_IntList, exp, [1], True), PARTIAL, WHOLE, (), node)
    whole_top = e.call(aten.squeeze.dim, top, 1)
    lse = e.call(aten.squeeze.dim, e.call(aten.log.default, total), 1)
    lse = e.call(aten.add.Tensor, lse, whole_top)
    picked = e.call(ops.picked_rows, x, target, bound["ignore_index"], v.size, rows)
    picked = e.move(picked, PARTIAL, WHOLE, (), node)
    smoothing = bound.get("label_smoothing", 0.0)
    mean_ = None
    if smoothing:
        part = e.call(aten.sum.dim_IntList, x, [1])
        mean_ = e.move(e.call(aten.div.Tensor, part, float(v.size)), PARTIAL, WHOLE, (), node)
    options = f"{bound['reduction']} {bound['ignore_index']} {smoothing}"
    return e.call(ops.nll, lse, picked, mean_, target, options)


def dropout(
    e: Emitter, node: fx.Node, access: Access, strategy: Strategy, xs: list[fx.Node]
) -> fx.Node:
    bound = bind(node)
    rows: list[tuple[int, int, Any]] = e.rows(access.result)
    if strategy.split is not None:
        split = strategy.split
        dim = split.dim(access.result)
        if dim is not None:
            f = access.result[dim]
            rows.append((dim, f.size, split.ranges(f, e.rank)))
    p = 0.0 if bound.get("train") is False else bound["p"]
    pair = node.target is aten.native_dropout.default
    target = ops.native_dropout if pair else ops.dropout
    return e.call(target, xs[0], p, e.seed(), e.salt(), tuple(rows))


def drawn(
    e: Emitter, node: fx.Node, access: Access, strategy: Strategy, xs: list[fx.Node]
) -> fx.Node:
    """Any other operator that draws: it stands in no line of the table, so it runs whole."""
    plain = e.copy(node, xs)
    args, kwargs = plain.args, plain.kwargs
    e.graph.erase_node(plain)
    return e.call(ops.drawn, str(node.target), e.seed(), e.salt(), *args, **kwargs)


def is_random(node: fx.Node) -> bool:
    """Operators that draw: also whole ones are drawn by plait, so that all ranks agree."""
    if not _may_draw(node.target):
        return False
    return node.target in _DROPOUT or bind(node).get("dropout_p") != 0  # attention draws for its dropout alone


@cache
def _may_draw(target: Any) -> bool:
    return target in _DROPOUT or torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


_DROPOUT = (aten.native_dropout.default, aten.dropout.default)


def expansion(node: fx.Node, access: Access, strategy: Strategy) -> Expansion | None:
    """The expansion that a node needs under its strategy, if any."""
    if is_random(node):
        return dropout if node.target in _DROPOUT else drawn
    if access.so_far and bind(node)["is_causal"]:
        return attention
    if node.target is aten._grouped_mm.default:
        return grouped_matmul
    if strategy.split is None:
        return None
    split = strategy.split
    touched = {x.property for x in access.letters if split.touches(x.factor)}
    if access.fused is not None and split.dim(access.result) is not None:
        return repeat
    if any(map(split.touches, access.counts)):
        return counted
    if "stat" in touched:
        return STATISTICS[str(node.target).split(".")[1].strip("_")]
    if "select" in touched:
        return embedding if node.target is aten.embedding.default else some_rows
    if "sum" in touched and node.target in (aten.mean.default, aten.mean.dim):
        return mean
    return None


STATISTICS: dict[str, Expansion] = {
    "softmax": softmax,
    "log_softmax": softmax,
    "layer_norm": layer_norm,
    "cross_entropy_loss": cross_entropy,
}
