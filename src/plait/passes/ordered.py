"""Ordered: rows of a micro-batch that are sorted by a key, worked on group by group, and put back.

    order = argsort(keys)                 order      of the keys of this piece
    x[order], x[order // k]               sorted     its rows in that order
    what works row by row                 sorted
    cumsum(histc(keys, e, 0, e - 1))      ends       of the rows of every key among them
    grouped_mm(x, w, ends)                sorted     a row meets the weight of its own key
    y[inverse of order]                   rows       in their places again

What becomes of a row depends on itself and its key: pieces that each sort their own rows make what the whole
batch does (mixtures of experts). Whoever else reads such a value would see another order, or other counts,
than those of the whole batch: there nothing is cut.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from plait.passes.expand import is_random
from plait.rules.aten import grouped
from plait.rules.describe import Access, bind
from plait.rules.equation import Factor
from plait.rules.layout import Layout, Strategy, shard
from plait.rules.split import Split

aten = torch.ops.aten
LABEL = "ordered"
OUTER = "order // k"
KINDS = ("order", OUTER, "inverse", "counts", "ends", "unread")


def is_ordered(layout: Layout) -> bool:
    """Whether a value is of an order of the piece's own."""
    return layout.kind in KINDS or (layout.kind == "shard" and bool(layout.op))


@dataclass(frozen=True)
class Ordered:
    """How a batch is cut so far; `plain`: the strategy of an operator by its equation alone."""

    split: Split
    layouts: Mapping[fx.Node, Layout]
    strategies: Mapping[fx.Node, Strategy]
    constants: Mapping[str, Tensor]
    plain: Callable[[fx.Node, Access, Split, Sequence[Layout]], Strategy | None]

    def lay(self, node: fx.Node, access: Access, have: Sequence[Layout]) -> Strategy | None:
        """The strategy of an operator that makes or reads an order, or what is in one."""
        rule = Ordered._by_group if node.target in grouped() else RULES.get(node.target)
        if rule is not None:
            results = rule(self, node, access, have)
            if results is not None:
                return Strategy(LABEL, tuple(have), results)
        return self._row_by_row(node, access, have)

    def _row_by_row(self, node: fx.Node, access: Access, have: Sequence[Layout]) -> Strategy | None:
        """The order stays: only what is parallel along the one dim of rows, and whole beside it."""
        orders = {h.op for h in have if h.kind == "shard"}
        if len(orders) != 1 or "" in orders or not all(h.kind in ("shard", "whole", "copied") for h in have):
            return None
        dims = [f for o in access.operands for f in o.dims] + [f for r in access.results for f in r]
        rows = {f.root() for f in dims if self.split.touches(f)}
        constants = [f for o in access.operands if o.node.op == "get_attr" for f in o.dims]
        if len(rows) != 1 or is_random(node) or any(map(self.split.touches, constants)):
            return None
        found = self.plain(node, access, self.split, [shard(self.split) if h.op else h for h in have])
        if found is None:
            return None
        (order,) = orders
        results = (Layout("shard", order, self.split) if r.kind == "shard" else r for r in found.results)
        return Strategy(found.label, found.operands, tuple(results), found.split)

    # -- what makes an order, and what undoes it -------------------------------------------------------

    def _sort(self, node: fx.Node, access: Access, have: Sequence[Layout]) -> tuple[Layout, ...] | None:
        (h,), one = have, len(access.results) == 1
        if bind(node).get("descending") or len(access.operands[0].dims) != 1:
            return None
        if h.kind == "order":
            inverse = Layout("inverse", h.op, self.split)
            return (inverse,) if one else (Layout("unread", "", self.split), inverse)
        if h != shard(self.split):
            return None
        name = f"{self._keys(bind(node)['self']).name} {node.name}"
        order = Layout("order", name, self.split)
        return (order,) if one else (Layout("shard", name, self.split), order)

    def _part(self, node: fx.Node, access: Access, have: Sequence[Layout]) -> tuple[Layout, ...] | None:
        source, index = node.args
        found = self.strategies.get(source)  # type: ignore[arg-type]
        return (found.results[index],) if found is not None and found.label == LABEL else None  # type: ignore[index]

    def _outer(self, node: fx.Node, access: Access, have: Sequence[Layout]) -> tuple[Layout, ...] | None:
        """`order // k`: of (t k) rows, the t that each is of."""
        k, floor = bind(node).get("other"), bind(node).get("rounding_mode", "floor") == "floor"
        if have[0].kind != "order" or not floor or not isinstance(k, int):
            return None
        return (Layout(OUTER, f"{have[0].op} {k}", self.split),)

    def _pick(self, node: fx.Node, access: Access, have: Sequence[Layout]) -> tuple[Layout, ...] | None:
        if len(have) != 2 or bind(node)["indices"][0] is not access.operands[1].node:
            return None
        x, by = have
        rows, places = access.operands[0].dims[0], access.operands[1].dims
        if len(places) != 1 or not self.split.touches(rows):
            return None
        order, k = by.op.rsplit(" ", 1) if by.kind == OUTER else (by.op, "1")
        if by.kind in ("order", OUTER) and x == shard(self.split) and self._merged(places[0], rows, int(k)):
            return (Layout("shard", order, self.split),)
        back = by.kind == "inverse" and x == Layout("shard", by.op, self.split) and self._merged(places[0], rows)
        return (shard(self.split),) if back else None

    def _inverse(self, node: fx.Node, access: Access, have: Sequence[Layout]) -> tuple[Layout, ...] | None:
        """`x[order] = arange(s)`, or what is in that order: all of x is written."""
        (rows, *rest), (_, places, values) = access.operands[0].dims, access.operands[:3]
        if len(have) != 3 or bind(node)["accumulate"] or have[1].kind != "order" or bind(node)["indices"][0] is None:
            return None
        if have[2] == Layout("shard", have[1].op, self.split) and have[0] == shard(self.split):
            same = self._merged(rows, places.dims[0]) and self._merged(rows, values.dims[0])
            return (shard(self.split),) if same and len(values.dims) == len(rest) + 1 else None
        if rest or values.node.op != "get_attr":
            return None
        value = self.constants[str(values.node.target)]
        counts = value.shape == (rows.size,) and torch.equal(value, torch.arange(rows.size).to(value))
        return (Layout("inverse", have[1].op, self.split),) if counts else None

    def _memory(self, node: fx.Node, access: Access, have: Sequence[Layout]) -> tuple[Layout, ...] | None:
        """The sizes of what is ordered, and none of its values."""
        touched = have[0].kind in ("order", "shard") and self.split.dim(access.result) is not None
        return (shard(self.split),) if touched else None

    # -- groups ----------------------------------------------------------------------------------------

    def _count(self, node: fx.Node, access: Access, have: Sequence[Layout]) -> tuple[Layout, ...] | None:
        """A bin a key, from nought."""
        bound = bind(node)
        keys = self._keys(bound["self"])
        each = bound["min"] == 0 and bound["max"] == bound["bins"] - 1 and _chosen(keys)
        of_rows = len(access.operands[0].dims) == 1 and have[0].kind == "shard"
        return (Layout("counts", keys.name),) if each and of_rows else None

    def _end(self, node: fx.Node, access: Access, have: Sequence[Layout]) -> tuple[Layout, ...] | None:
        return (Layout("ends", have[0].op),) if have[0].kind == "counts" else None

    def _cast(self, node: fx.Node, access: Access, have: Sequence[Layout]) -> tuple[Layout, ...] | None:
        exact = node.meta["val"].dtype in EXACT and have[0].kind in KINDS
        return (have[0],) if exact else None

    def _by_group(self, node: fx.Node, access: Access, have: Sequence[Layout]) -> tuple[Layout, ...] | None:
        if len(have) != 3 or self.split.dim(access.result) != 0:
            return None
        x, w, ends = have
        fits = x.kind == "shard" and w.kind in ("whole", "copied") and ends.kind == "ends"
        return (x,) if fits and x.op.split(" ")[0] == ends.op else None

    def _merged(self, whole: Factor, outer: Factor, k: int = 1) -> bool:
        """Whether every piece has of `whole` k rows for each that it has of `outer`."""
        pieces = range(self.split.ranks)
        wide = [tuple((lo * k, hi * k) for lo, hi in self.split.ranges(outer, r)) for r in pieces]
        return wide == [self.split.ranges(whole, r) for r in pieces]

    def _keys(self, x: fx.Node) -> fx.Node:
        """What is sorted or counted, before it was cast, laid otherwise or put in an order."""
        while (source := self._relaid(x)) is not None:
            x = source
        return x

    def _relaid(self, x: fx.Node) -> fx.Node | None:
        """What `x` has the numbers of, each as often."""
        source, *more = x.args or (None,)
        if not isinstance(source, fx.Node):
            return None
        if x.target in RELAID or (x.target is aten._to_copy.default and x.meta["val"].dtype in EXACT):
            return source
        if x.target is operator.getitem and source.target in SORTS and more == [0]:
            return source.all_input_nodes[0]
        if x.target is aten.index.Tensor and len(x.all_input_nodes) == 2:
            by = self.layouts.get(x.all_input_nodes[1])
            return source if by is not None and by.kind == "order" else None
        return None


def _chosen(keys: fx.Node) -> bool:
    """Places in a dim, which are never negative."""
    source = keys.args[0] if keys.target is operator.getitem else None
    second = isinstance(source, fx.Node) and source.target in CHOICES and keys.args[1] == 1
    return bool(second) or keys.target in PLACES


EXACT = (torch.int32, torch.int64, torch.float32, torch.float64)  # that hold the number of any expert or row
SORTS = (aten.sort.default, aten.sort.stable)
CHOICES = (*SORTS, aten.topk.default, aten.max.dim, aten.min.dim)
PLACES = (aten.argmax.default, aten.argmin.default, aten.argsort.default)
RELAID = (aten.view.default, aten.unsqueeze.default, aten.squeeze.dims, aten.alias.default)
RULES: dict[Any, Callable[..., tuple[Layout, ...] | None]] = {
    **dict.fromkeys((*SORTS, aten.argsort.default), Ordered._sort),
    **dict.fromkeys((aten.floor_divide.default, aten.div.Tensor_mode), Ordered._outer),
    **dict.fromkeys((aten.empty_like.default, aten.zeros_like.default), Ordered._memory),
    operator.getitem: Ordered._part,
    aten.index.Tensor: Ordered._pick,
    aten.index_put.default: Ordered._inverse,
    aten.histc.default: Ordered._count,
    aten.cumsum.default: Ordered._end,
    aten._to_copy.default: Ordered._cast,
}
