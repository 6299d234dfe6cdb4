"""Moves: how a value goes from one layout to another, forward, and its gradient back.

    from -> to             forward            backward
    whole   -> copied      identity           all_reduce
    copied  -> whole       identity           mask
    whole   -> partial     mask               identity
    copied  -> partial     mask               mask
    partial -> whole       all_reduce         identity
    partial -> copied      all_reduce         all_reduce
    whole   -> shard       slice              gather (sum)
    copied  -> shard       slice              pad
    shard   -> whole       gather             slice (own)
    shard   -> copied      gather             reduce_scatter (own)
    partial -> shard       reduce_scatter     gather (sum)
    shard   -> partial     pad (own)          slice (own)

`fetch(t)` and `deliver(t)`: the rows of rank + t come here, and back go rows of rank + t to their
owner; the overlap pass writes gathers and reduce-scatters with them. `share` sums rows among their
holders (a weight that neighbours hold in part). `mask` keeps the value on the first rank and is
zero elsewhere. Where neighbours hold the same row, a *value* is read from its owner (own) and a
*gradient* is summed over its holders (sum). Every backward is the transpose of its forward under
the layouts of the gradients (rules/layout.py).

A `Cut` says which rows of one dim every rank holds and owns; without overlap, gathers move each row
once, with overlap they are a padded all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.rules.equation import Dims, Ranges
from plait.rules.layout import Layout
from plait.rules.split import Split, merged


@dataclass(frozen=True)
class Cut:
    """Rows of dim `dim` (of global size `size`) by rank."""

    dim: int
    size: int
    rows: tuple[Ranges, ...]
    own: tuple[Ranges, ...]

    @classmethod
    def of(cls, dims: Dims, split: Split) -> Cut:
        dim = split.dim(dims)
        assert dim is not None
        f, ranks = dims[dim], range(split.ranks)
        rows = tuple(split.ranges(f, r) for r in ranks)
        own = tuple(split.owned(f, r) for r in ranks) if not split.disjoint(f) else rows
        return cls(dim, f.size, rows, own)

    @property
    def disjoint(self) -> bool:
        return self.rows == self.own

    def counts(self) -> tuple[int, ...]:
        return tuple(count(r) for r in self.rows)

    def __str__(self) -> str:
        held = (", ".join(f"{lo}:{hi}" for lo, hi in ranges) for ranges in self.rows)
        return f"rows {' | '.join(held)} of dim {self.dim}"

    def within(self, ranks: Sequence[int]) -> Cut:
        """Of the rows that `ranks` hold together (no row twice), those of each, counted among them."""
        at, begins = 0, dict[int, int]()
        for lo, hi in sorted(part for r in ranks for part in self.rows[r]):
            begins[lo] = at
            at += hi - lo
        rows = tuple(
            merged([(begins[lo], begins[lo] + hi - lo) for lo, hi in self.rows[r]]) for r in ranks
        )
        return Cut(self.dim, at, rows, rows)

    def together(self, groups: Sequence[Sequence[int]]) -> Cut:
        """The rows that each group of ranks holds together."""
        rows = tuple(merged(sorted(p for r in g for p in self.rows[r])) for g in groups)
        return Cut(self.dim, self.size, rows, rows)


def count(ranges: Ranges) -> int:
    return sum(hi - lo for lo, hi in ranges)


def take(x: Tensor, dim: int, ranges: Ranges) -> Tensor:
    """The rows `ranges` of `x`, in order; a view where they are one range."""
    if len(ranges) == 1:
        lo, hi = ranges[0]
        return x if hi - lo == x.shape[dim] else x.narrow(dim, lo, hi - lo)
    if not ranges:
        return x.narrow(dim, 0, 0)
    return torch.cat([x.narrow(dim, lo, hi - lo) for lo, hi in ranges], dim)


def put(out: Tensor, x: Tensor, dim: int, ranges: Ranges) -> None:
    """Write the rows of `x` to the rows `ranges` of `out`."""
    at = 0
    for lo, hi in ranges:
        out.narrow(dim, lo, hi - lo).copy_(x.narrow(dim, at, hi - lo))
        at += hi - lo


def widen(x: Tensor, cut: Cut, rows: Ranges, keep: Ranges) -> Tensor:
    """`x` holds `rows`; the whole value with rows `keep` of it, zero elsewhere."""
    shape = list(x.shape)
    shape[cut.dim] = cut.size
    out = x.new_zeros(shape)
    put(out, x, cut.dim, rows)
    if keep != rows:
        kept = x.new_zeros(shape)
        for lo, hi in keep:
            kept.narrow(cut.dim, lo, hi - lo).copy_(out.narrow(cut.dim, lo, hi - lo))
        out = kept
    return out


def only_own(x: Tensor, cut: Cut, rank: int) -> Tensor:
    """Rows of `x` that a lower rank owns become zero."""
    if cut.disjoint:
        return x
    return take(widen(x, cut, cut.rows[rank], cut.own[rank]), cut.dim, cut.rows[rank])


@dataclass(frozen=True)
class Step:
    """One direction of a move: an action by name, and the collective behind it, if any."""

    action: str  # identity | mask | all_reduce | slice | slice_own | pad | pad_own | gather | ...
    op: str = "sum"
    by: int = 0  # fetch, deliver: how many ranks on

    @property
    def collective(self) -> str | None:
        return _COLLECTIVE_OF.get(self.action)


@dataclass(frozen=True)
class Conversion:
    """A pair of steps; `cut` is of the sharded side."""

    forward: Step
    backward: Step
    cut: Cut | None = None

    def __str__(self) -> str:
        return f"{self.forward.action}/{self.backward.action}"


def conversion(a: Layout, b: Layout, dims: Dims) -> tuple[Conversion, ...]:
    """The moves from layout `a` to layout `b` of a value with `dims`, in order."""
    if a == b:
        return ()
    if a.kind == b.kind == "shard":
        return (*conversion(a, Layout("copied"), dims), *conversion(Layout("copied"), b, dims))
    forward, backward = _MOVES[a.kind, b.kind]
    split = a.split or b.split
    cut = Cut.of(dims, split) if split is not None else None
    return (Conversion(Step(forward, a.op or "sum"), Step(backward), cut),)


# -- what a step needs from the ranks ------------------------------------------------------------


def local(step: Step, x: Tensor, cut: Cut | None, rank: int) -> Tensor:
    """A step without communication."""
    match step.action:
        case "identity":
            return x
        case "mask":
            return x if rank == 0 else torch.zeros_like(x)
    assert cut is not None
    match step.action:
        case "slice":
            return take(x, cut.dim, cut.rows[rank])
        case "slice_own":
            return only_own(take(x, cut.dim, cut.rows[rank]), cut, rank)
        case "pad":
            return widen(x, cut, cut.rows[rank], cut.rows[rank])
        case "pad_own":
            return widen(x, cut, cut.rows[rank], cut.own[rank])
    raise AssertionError(step.action)


def assemble(parts: Sequence[Tensor], cut: Cut) -> Tensor:
    """The whole value from every rank's rows, where they are disjoint."""
    runs = [(lo, hi, r) for r, ranges in enumerate(cut.rows) for lo, hi in ranges]
    if runs == sorted(runs):
        return torch.cat(list(parts), cut.dim)
    shape = list(parts[0].shape)
    shape[cut.dim] = cut.size
    out = parts[0].new_empty(shape)
    for part, rows in zip(parts, cut.rows, strict=True):
        put(out, part, cut.dim, rows)
    return out


def together(step: Step, xs: Sequence[Tensor], cut: Cut | None) -> list[Tensor]:
    """A step of all ranks at once, in one process: the reference for every transport."""
    ranks = range(len(xs))
    match step.action:
        case "all_reduce":
            return [_reduce(xs, step.op)] * len(xs)
        case "share":
            assert cut is not None
            whole = _reduce(
                [widen(x, cut, rows, rows) for x, rows in zip(xs, cut.rows, strict=True)], "sum"
            )
            return [take(whole, cut.dim, rows) for rows in cut.rows]
        case "gather" | "gather_sum":
            assert cut is not None
            keep = cut.own if step.action == "gather" else cut.rows
            whole = _reduce([widen(xs[r], cut, cut.rows[r], keep[r]) for r in ranks], "sum")
            return [whole] * len(xs)
        case "reduce_scatter" | "reduce_scatter_own":
            assert cut is not None
            whole = _reduce(xs, "sum")
            mine = [take(whole, cut.dim, cut.rows[r]) for r in ranks]
            own = step.action == "reduce_scatter_own"
            return [only_own(m, cut, r) if own else m for r, m in enumerate(mine)]
        case "fetch":
            return [xs[(r + step.by) % len(xs)] for r in ranks]
        case "deliver":
            return [xs[(r - step.by) % len(xs)] for r in ranks]
    return [local(step, x, cut, r) for r, x in enumerate(xs)]


def _reduce(xs: Sequence[Tensor], op: str) -> Tensor:
    out = xs[0]
    for x in xs[1:]:
        out = out + x if op == "sum" else _EXTREME[op](out, x)
    return out


_EXTREME: dict[str, Any] = {"max": torch.maximum, "min": torch.minimum}

_COLLECTIVE_OF = {
    "all_reduce": "all_reduce",
    "share": "all_reduce",
    "gather": "all_gather",
    "gather_sum": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_own": "reduce_scatter",
    "fetch": "exchange",
    "deliver": "exchange",
}

_MOVES: dict[tuple[str, str], tuple[str, str]] = {
    ("whole", "copied"): ("identity", "all_reduce"),
    ("copied", "whole"): ("identity", "mask"),
    ("whole", "partial"): ("mask", "identity"),
    ("copied", "partial"): ("mask", "mask"),
    ("partial", "whole"): ("all_reduce", "identity"),
    ("partial", "copied"): ("all_reduce", "all_reduce"),
    ("whole", "shard"): ("slice", "gather_sum"),
    ("copied", "shard"): ("slice", "pad"),
    ("shard", "whole"): ("gather", "slice_own"),
    ("shard", "copied"): ("gather", "reduce_scatter_own"),
    ("partial", "shard"): ("reduce_scatter", "gather_sum"),
    ("shard", "partial"): ("pad_own", "slice_own"),
}


def _collectives() -> dict[tuple[str, str], tuple[str | None, str | None]]:
    """(from, to) -> the collectives of both directions, with layouts as the planner spells them."""
    out = {}
    for (a, b), (forward, backward) in _MOVES.items():
        spelled = tuple("partial(sum)" if kind == "partial" else kind for kind in (a, b))
        out[spelled[0], spelled[1]] = (_COLLECTIVE_OF.get(forward), _COLLECTIVE_OF.get(backward))
    for op in ("max", "min"):
        out[f"partial({op})", "whole"] = out[f"partial({op})", "copied"] = ("all_reduce", None)
    out["shard", "shard"] = ("all_gather", "reduce_scatter")
    return out


COLLECTIVES = _collectives()
