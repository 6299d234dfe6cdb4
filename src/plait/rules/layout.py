"""Layouts of a value on one mesh axis, and the strategies of an operator read from its equation.

    layout         value on rank r             gradient on rank r
    whole          all of it                   all of it, equal on every rank
    copied         all of it                   one term of a sum
    partial(op)    one term of a reduction     all of it
    shard(split)   the rows of its share       the same rows

A strategy says which layout every operand must have and which the results get. Soundness (checked
here, for every strategy): a split never cuts two dims of one value or half of a fused run, never
meets a letter that is whole, and a reduced letter is never held twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.rules.describe import Access
from plait.rules.equation import Dims, Factor
from plait.rules.split import Split


@dataclass(frozen=True)
class Layout:
    kind: str  # whole | copied | partial | shard
    op: str = ""
    split: Split | None = None

    def __str__(self) -> str:
        if self.split is not None:
            return f"shard({self.split.name})"
        return f"partial({self.op})" if self.op else self.kind


WHOLE = Layout("whole")
COPIED = Layout("copied")
PARTIAL = Layout("partial", "sum")


def shard(split: Split) -> Layout:
    return Layout("shard", split=split)


@dataclass(frozen=True)
class Strategy:
    """`label` names it in a plan: `whole`, `copied`, `carry(0+1)`, `split(f3)`."""

    label: str
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    split: Split | None = None
    statistics: tuple[Factor, ...] = ()  # letters whose small reductions are written out


def strategies(access: Access, splits: Sequence[Split], grad: bool) -> list[Strategy]:
    """Every legal strategy of one operator; `grad`: gradients will flow through it."""
    n, m = len(access.operands), len(access.results)
    out = [Strategy("whole", (WHOLE,) * n, (WHOLE,) * m)]
    if grad:
        out.append(Strategy("copied", (COPIED,) * n, (COPIED,) * m))
    for group in access.carries:
        layouts = tuple(
            PARTIAL if i in group or o.added else COPIED for i, o in enumerate(access.operands)
        )
        label = f"carry({'+'.join(map(str, group))})"
        out.append(Strategy(label, layouts, (PARTIAL,) * m))
    for split in splits:
        strategy = split_strategy(access, split, grad)
        if strategy is not None:
            out.append(strategy)
    return out


def split_strategy(access: Access, split: Split, grad: bool) -> Strategy | None:
    """The operator with `split` laid along the axis, or None where that is not legal."""
    touched = [letter for letter in access.letters if split.touches(letter.factor)]
    kinds = {letter.property for letter in touched}
    if not touched or kinds & {"whole", "prefix"} or len(kinds - {"parallel"}) > 1:
        return None
    reduced = next(iter(kinds - {"parallel"}), None)
    if reduced is not None and "parallel" in kinds:
        return None
    if reduced in ("max", "min") and grad:
        return None
    values = [o.dims for o in access.operands] + list(access.results)
    if not all(split.splittable(dims) for dims in values):
        return None
    if reduced is not None and not all(split.disjoint(letter.factor) for letter in touched):
        return None
    if len(split.factors) > 1 and not _whole_run(access, split):
        return None
    statistics = tuple(x.factor for x in touched) if reduced == "stat" else ()
    results = tuple(_result(dims, split, reduced) for dims in access.results)
    partial = any(r.kind == "partial" for r in results)
    operands = tuple(
        PARTIAL if o.added and partial else _cut(o.dims, split) for o in access.operands
    )
    return Strategy(f"split({split.name})", operands, results, split, statistics)


def _cut(dims: Dims, split: Split) -> Layout:
    return shard(split) if split.dim(dims) is not None else COPIED


def _result(dims: Dims, split: Split, reduced: str | None) -> Layout:
    if split.dim(dims) is not None:
        return shard(split)
    if reduced in ("sum", "select"):
        return PARTIAL
    if reduced == "stat":  # a loss: computed by every rank from reduced statistics
        return WHOLE
    return Layout("partial", reduced) if reduced in ("max", "min") else COPIED


def _whole_run(access: Access, split: Split) -> bool:
    """Operands that hold only `g` may meet `(g r)` only in the operator that repeats them."""
    if access.fused is not None and access.fused[0].root() is split.factors[0]:
        return True
    cut = [f for o in access.operands for f in o.dims if split.touches(f)]
    cut += [f for dims in access.results for f in dims if split.touches(f)]
    return len({split.disjoint(f) for f in cut}) <= 1
