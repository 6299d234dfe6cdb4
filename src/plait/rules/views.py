"""Rules of the operators that move, merge, split, join or repeat dims and compute nothing.

These are the operators from which the structure of a dim is learned: a view merges and splits
factors, cat and slice join and part segments, repeat_interleave makes `g` into `(g r)`. A few rows
out of many are selected instead (`s selected`): a segment of one row would be held by every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from plait.rules.describe import Access, Describer, Letter, Localize, Operand, bind, rebind, resize
from plait.rules.equation import ONE, Dims, Factor, product, total
from plait.rules.rule import Binder
from plait.rules.split import Split

PARTIAL = ((0,),)  # a move of a partial sum is a partial sum
CUT = "cut"  # in the meta of an alias: the dims whose rows it takes for others
FEW = 16  # one row of so many is not a segment of its own, by which all others would be told apart


def moved(
    d: Describer,
    node: fx.Node,
    result: Dims,
    *,
    letters: Sequence[Letter] | None = None,
    local: Localize | None = None,
    fused: tuple[Factor, Factor] | None = None,
) -> Access:
    """A move of one operand: every factor of it parallel unless `letters` says otherwise."""
    operand = d.operand(bind(node)["self"])
    if letters is None:
        letters = [Letter(f, "parallel") for f in operand.dims if f.size > 1]
        seen = [f.root() for f in operand.dims]
        letters += [Letter(f, "parallel") for f in result if f.size > 1 and f.root() not in seen]
    return Access((operand,), (result,), tuple(letters), PARTIAL, local, fused)


def source(d: Describer, node: fx.Node) -> Dims:
    return d.operand(bind(node)["self"]).dims


# -- merges and splits -------------------------------------------------------------------------


def view(d: Describer, node: fx.Node) -> Access:
    """Groups of dims with equal products hold the same factors, outermost first."""
    operand = d.operand(bind(node)["self"])
    out = d.fresh_dims(node)
    letters: list[Letter] = []
    for before, after in groups(operand.dims, out):
        conflict = d.tie(node, product(before), product(after))
        if conflict is None:
            letters.append(Letter(product(before), "parallel"))
        else:
            letters += [Letter(f, "whole", str(conflict)) for f in (*before, *after)]
    size = "size" if "size" in bind(node) else "shape"

    def local(node: fx.Node, split: Split, rank: int) -> Any:
        return rebind(node, **{size: resize(bind(node)[size], out, split, rank)})

    return Access((operand,), (out,), tuple(letters), PARTIAL, local)


def groups(before: Dims, after: Dims) -> list[tuple[list[Factor], list[Factor]]]:
    """The least runs of dims on both sides with equal products; size-1 dims belong to none."""
    a = [f for f in before if f.size != 1]
    b = [f for f in after if f.size != 1]
    out: list[tuple[list[Factor], list[Factor]]] = []
    i = j = 0
    while i < len(a) or j < len(b):
        i0, j0 = i, j
        left, right = 1, 1
        while left != right or i == i0:
            if left <= right and i < len(a):
                left, i = left * a[i].size, i + 1
            elif j < len(b):
                right, j = right * b[j].size, j + 1
            else:
                return [*out, (a[i0:], b[j0:])]
        out.append((a[i0:i], b[j0:j]))
    return out


def expand(d: Describer, node: fx.Node) -> Access:
    """`* 1 -> * n`: what is repeated is new; every dim parallel."""
    dims = source(d, node)
    sizes = d.sizes(node)
    lead = len(sizes) - len(dims)
    result = tuple(
        d.fresh(s) if i < lead or dims[i - lead].size != s else dims[i - lead]
        for i, s in enumerate(sizes)
    )

    def local(node: fx.Node, split: Split, rank: int) -> Any:
        return rebind(node, size=resize(bind(node)["size"], result, split, rank))

    return moved(d, node, result, local=local)


def repeat(d: Describer, node: fx.Node) -> Access:
    """f -> (n f): the copies are outermost."""
    dims = source(d, node)
    counts = bind(node)["repeats"]
    sizes = d.sizes(node)
    lead = len(counts) - len(dims)
    dims = (ONE,) * lead + dims
    result = tuple(
        f if s == f.size else product((d.fresh(s // f.size), f))
        for f, s in zip(dims, sizes, strict=True)
    )

    def local(node: fx.Node, split: Split, rank: int) -> Any:
        def count(f: Factor, out: Factor, n: Any) -> Any:
            inside = split.size(f, rank)
            return split.size(out, rank) // inside if split.touches(out) and inside else n

        return rebind(node, repeats=[count(*t) for t in zip(dims, result, counts, strict=True)])

    return moved(d, node, result, local=local)


def repeat_interleave(d: Describer, node: fx.Node) -> Access:
    """f -> (f n): GQA's key/value heads `g` become `(g r)`. Partition gathers the rank's rows."""
    bound = bind(node)
    dims = source(d, node)
    if bound["dim"] is None or not isinstance(bound["repeats"], int):
        return d.whole(node, "repeats of a flattened or counted dim")
    dim = bound["dim"] % len(dims)
    r = d.fresh(bound["repeats"])
    merged = product((dims[dim], r))
    result = (*dims[:dim], merged, *dims[dim + 1 :])
    fused = (dims[dim], r) if dims[dim].size > 1 and r.size > 1 else None
    letters = [Letter(f, "parallel") for f in result if f.size > 1]

    def local(node: fx.Node, split: Split, rank: int) -> Any:
        alone = split.touches(r) and not split.touches(dims[dim])  # copies split, not what is copied
        repeats = split.size(r, rank) if alone else bound["repeats"]
        return rebind(node, repeats=repeats, output_size=None)

    return moved(d, node, result, letters=letters, local=local, fused=fused)


# -- order and count of dims -------------------------------------------------------------------


def transpose(d: Describer, node: fx.Node) -> Access:
    """`* i j -> * j i`"""
    dims = list(source(d, node))
    bound = bind(node)
    i, j = bound.get("dim0", 0), bound.get("dim1", 1)  # aten.t has no dims
    if dims:
        dims[i], dims[j] = dims[j], dims[i]
    return moved(d, node, tuple(dims))


def permute(d: Describer, node: fx.Node) -> Access:
    """`i j k -> k i j`: any order."""
    dims = source(d, node)
    return moved(d, node, tuple(dims[i] for i in bind(node)["dims"]))


def unsqueeze(d: Describer, node: fx.Node) -> Access:
    """`* -> * 1`"""
    dims = list(source(d, node))
    dims.insert(bind(node)["dim"] % (len(dims) + 1), ONE)
    return moved(d, node, tuple(dims))


def squeeze(d: Describer, node: fx.Node) -> Access:
    """`* 1 -> *`"""
    dims = source(d, node)
    which = bind(node).get("dim", range(len(dims)))
    gone = {i % max(1, len(dims)) for i in ([which] if isinstance(which, int) else which)}
    return moved(d, node, tuple(f for i, f in enumerate(dims) if i not in gone or f.size != 1))


def same(d: Describer, node: fx.Node) -> Access:
    """`* -> *`; a partial sum passes."""
    return moved(d, node, source(d, node))


def alias(d: Describer, node: fx.Node) -> Access:
    """`* -> *`; where a tie is cut, some dims come out new (capture/square.py)."""
    apart, dims = node.meta.get(CUT, ()), source(d, node)
    result = tuple(d.fresh(f.size) if i in apart else f for i, f in enumerate(dims))
    letters = [Letter(f, "parallel") for i, f in enumerate(dims) if i not in apart and f.size > 1]
    letters += [Letter(x[i], "whole", "a square weight's") for x in (dims, result) for i in apart]
    return moved(d, node, result, letters=letters)


# -- segments ----------------------------------------------------------------------------------


def cut(d: Describer, node: fx.Node, f: Factor, sizes: Sequence[int]) -> list[Factor] | str:
    """The segments of `f` with the given sizes, or why they cannot be told apart."""
    parts = [d.fresh(s) if s else Factor(0) for s in sizes]
    conflict = d.tie(node, f, total(parts))
    return str(conflict) if conflict else parts


def slice_(d: Describer, node: fx.Node) -> Access:
    """`* (a + b + c) -> * b`: the dim is a sum of segments."""
    bound = bind(node)
    dims = source(d, node)
    dim = bound["dim"] % len(dims)
    f = dims[dim]
    out = d.sizes(node)[dim]
    if out == f.size:
        return moved(d, node, dims, local=_full_slice)
    start, step = bound["start"] or 0, bound["step"]
    if not isinstance(start, int) or d.is_symbolic(f) or d.is_symbolic(Factor(out)):
        return _relaid(d, node, dims, dim, "a slice of symbolic length")
    start = max(0, start + f.size) if start < 0 else start
    if step != 1:
        return _strided(d, node, dims, dim, start, step, out)
    if _few(bound["self"], f, out):
        return _selected(d, node, dims, dim, d.fresh(out))
    parts = cut(d, node, f, (start, out, f.size - start - out))
    if isinstance(parts, str):
        return _relaid(d, node, dims, dim, parts)
    before, middle, _ = parts

    def local(node: fx.Node, split: Split, rank: int) -> Any:
        lo = split.size(before, rank)
        return rebind(node, start=lo, end=lo + split.size(middle, rank))

    return moved(d, node, (*dims[:dim], middle, *dims[dim + 1 :]), local=local)


def _few(x: fx.Node, f: Factor, out: int) -> bool:
    """Rows of a computed value that say nothing of its structure: the last token's, the first one's."""
    return x.op == "call_function" and f.root().kind == "free" and out * FEW <= f.size


def _selected(d: Describer, node: fx.Node, dims: Dims, dim: int, *new: Factor) -> Access:
    """A rank that does not hold the rows gives zeros (passes/expand.py)."""
    letters = [Letter(f, "parallel") for i, f in enumerate(dims) if i != dim and f.size > 1]
    letters += [Letter(dims[dim], "select"), *(Letter(f, "whole", "few rows are taken") for f in new)]
    return moved(d, node, (*dims[:dim], *new, *dims[dim + 1 :]), letters=letters)


def _full_slice(node: fx.Node, split: Split, rank: int) -> Any:
    return rebind(node, start=0, end=2**63 - 1)


def _strided(
    d: Describer, node: fx.Node, dims: Dims, dim: int, start: int, step: int, out: int
) -> Access:
    """Every k-th row: `f = (out k)` and row `start` of k."""
    f = dims[dim]
    if start >= step or f.size != out * step:
        return _relaid(d, node, dims, dim, f"a slice by steps of {step} that does not fit")
    outer = d.fresh(out)
    conflict = d.tie(node, f, product((outer, Factor(step))))
    if conflict:
        return _relaid(d, node, dims, dim, str(conflict))

    letters = [Letter(g, "parallel") for i, g in enumerate(dims) if i != dim and g.size > 1]
    inner = _inner(f, outer)
    letters += [Letter(outer, "parallel"), *(Letter(g, "whole", "taken apart") for g in inner)]
    return moved(d, node, (*dims[:dim], outer, *dims[dim + 1 :]), letters=letters)


def _inner(f: Factor, outer: Factor) -> list[Factor]:
    root = f.root()
    return [p for p in root.parts if p.root() is not outer.root()] if root.kind == "prod" else []


def _relaid(d: Describer, node: fx.Node, dims: Dims, dim: int, why: str) -> Access:
    """Dim `dim` is whole and comes out new; the others pass."""
    fresh = d.fresh(d.sizes(node)[dim])
    letters = [Letter(f, "parallel") for i, f in enumerate(dims) if i != dim and f.size > 1]
    letters += [Letter(dims[dim], "whole", why), Letter(fresh, "whole", why)]
    return moved(d, node, (*dims[:dim], fresh, *dims[dim + 1 :]), letters=letters)


def select(d: Describer, node: fx.Node) -> Access:
    """`* (a + 1 + c) -> *`: one row, a segment of its own."""
    bound = bind(node)
    dims = source(d, node)
    dim, index = bound["dim"] % len(dims), bound["index"]
    rest = (*dims[:dim], *dims[dim + 1 :])
    f = dims[dim]
    letters = [Letter(g, "parallel") for g in rest if g.size > 1]
    if isinstance(index, int) and not d.is_symbolic(f):
        index = index % f.size
        if _few(bound["self"], f, 1):
            return _selected(d, node, dims, dim)
        parts = cut(d, node, f, (index, 1, f.size - index - 1)) if f.size > 1 else []
        if not isinstance(parts, str):
            letters += [Letter(f, "parallel")] if f.size > 1 else []

            def local(node: fx.Node, split: Split, rank: int) -> Any:
                at = split.size(parts[0], rank) if parts else 0
                return rebind(node, index=at)

            return moved(d, node, rest, letters=letters, local=local)
    return moved(d, node, rest, letters=[*letters, Letter(f, "whole", "one row is taken")])


def split_with_sizes(d: Describer, node: fx.Node) -> Access:
    """`* (a + b + ...) -> * a, * b, ...`: segments, taken apart."""
    bound = bind(node)
    operand = d.operand(bound["self"])
    dims = operand.dims
    dim = bound["dim"] % len(dims)
    count = len(node.meta["val"])
    sizes = [d.sizes(node, i)[dim] for i in range(count)]
    parts = cut(d, node, dims[dim], sizes)
    letters = [Letter(f, "parallel") for f in dims if f.size > 1]
    if isinstance(parts, str):
        letters = [Letter(f, "parallel") for i, f in enumerate(dims) if i != dim and f.size > 1]
        letters.append(Letter(dims[dim], "whole", parts))
        parts = [d.fresh(s) for s in sizes]
        letters += [Letter(p, "whole", "segments") for p in parts]
    results = tuple((*dims[:dim], p, *dims[dim + 1 :]) for p in parts)

    def local(node: fx.Node, split: Split, rank: int) -> Any:
        return (node.args[0], [split.size(p, rank) for p in parts], dim), {}

    return Access((operand,), results, tuple(letters), PARTIAL, local)


def unbind(d: Describer, node: fx.Node) -> Access:
    """`n * -> *, *, ...`: n whole, for each row is a value of its own."""
    bound = bind(node)
    operand = d.operand(bound["self"])
    dims = operand.dims
    dim = bound["dim"] % len(dims)
    rest = (*dims[:dim], *dims[dim + 1 :])
    letters = [Letter(f, "parallel") for f in rest if f.size > 1]
    letters.append(Letter(dims[dim], "whole", "each row is a value of its own"))
    results = (rest,) * len(node.meta["val"])
    return Access((operand,), results, tuple(letters), PARTIAL)


def getitem(d: Describer, node: fx.Node) -> Access:
    """One of several results: whatever layout it has."""
    producer, index = node.args
    dims = d.dims[producer][index]  # type: ignore[index]
    letters = tuple(Letter(f, "parallel") for f in dims if f.size > 1)
    return Access((Operand(producer, dims),), (dims,), letters, PARTIAL)  # type: ignore[arg-type]


def cat(d: Describer, node: fx.Node) -> Access:
    """`* a, * b, ... -> * (a + b + ...)`: segments, joined."""
    bound = bind(node)
    nodes = [n for n in bound["tensors"] if d.sizes(n) != (0,)]
    operands = [d.operand(n) for n in nodes]
    rank = len(d.sizes(node))
    dim = bound.get("dim", 0) % rank
    binder = Binder(d, node)
    names = [f"d{i}" for i in range(rank) if i != dim]
    for o in operands:
        binder.bind(names, (*o.dims[:dim], *o.dims[dim + 1 :]))
    sizes = d.sizes(node)
    result = list(binder.result(names, (*sizes[:dim], *sizes[dim + 1 :])))
    joined = total([o.dims[dim] for o in operands])
    result.insert(dim, joined)
    letters = (*binder.letters({}), Letter(joined, "parallel"))
    everything = (tuple(range(len(operands))),)
    return Access(tuple(operands), (tuple(result),), letters, everything)


def stack(d: Describer, node: fx.Node) -> Access:
    """`*, *, ... -> n *`: n whole, the others parallel."""
    bound = bind(node)
    operands = [d.operand(n) for n in bound["tensors"]]
    sizes = d.sizes(node)
    dim = bound.get("dim", 0) % len(sizes)
    binder = Binder(d, node)
    names = [f"d{i}" for i in range(len(sizes) - 1)]
    for o in operands:
        binder.bind(names, o.dims)
    result = list(binder.result(names, (*sizes[:dim], *sizes[dim + 1 :])))
    units = d.fresh(len(operands))
    result.insert(dim, units)
    letters = (*binder.letters({}), Letter(units, "whole", "stacked one by one"))
    return Access(tuple(operands), (tuple(result),), letters, (tuple(range(len(operands))),))


def constant_pad(d: Describer, node: fx.Node) -> Access:
    """Padded dims are whole and come out new; padded with zeros or its own rows, a partial sum is one."""
    bound = bind(node)
    own = bound.get("mode", "constant") != "constant"
    dims, pad = source(d, node), bound["pad"]
    sizes = d.sizes(node)
    touched = {len(dims) - 1 - i // 2 for i, p in enumerate(pad) if not _zero(p)}
    result = tuple(
        d.fresh(s) if i in touched else f for i, (f, s) in enumerate(zip(dims, sizes, strict=True))
    )
    letters = [Letter(f, "parallel") for i, f in enumerate(dims) if i not in touched and f.size > 1]
    for i in touched:
        letters += [Letter(f, "whole", "padded") for f in (dims[i], result[i])]
    access = moved(d, node, result, letters=letters)
    if not own and bound.get("value") not in (0, 0.0, None):
        return Access(access.operands, access.results, access.letters)
    return access


def _zero(p: Any) -> bool:
    return isinstance(p, int) and p == 0


def along(dims_of: Callable[[dict[str, Any]], Any], why: str) -> Any:
    """A rule for operators that mix the rows of some dims (flip, roll, cumsum): those are whole."""

    def rule(d: Describer, node: fx.Node) -> Access:
        dims = source(d, node)
        which = dims_of(bind(node))
        mixed = {i % len(dims) for i in ([which] if isinstance(which, int) else which)}
        letters = [
            Letter(f, "whole" if i in mixed else "parallel", why if i in mixed else "")
            for i, f in enumerate(dims)
            if f.size > 1
        ]
        return moved(d, node, dims, letters=letters)

    rule.__doc__ = f"* i -> * i   i whole, for it is {why}"
    return rule


def diagonal(d: Describer, node: fx.Node) -> Access:
    """`* i j -> * k`: i and j whole."""
    bound, dims = bind(node), source(d, node)
    pair = {bound[name] % len(dims) for name in ("dim1", "dim2")}
    rest = tuple(f for i, f in enumerate(dims) if i not in pair)
    k = d.fresh(d.sizes(node)[-1])
    return _placed(d, node, rest, (*rest, k), [*(dims[i] for i in pair), k])


def diag_embed(d: Describer, node: fx.Node) -> Access:
    """`* k -> * i j`: all three whole."""
    bound, dims = bind(node), source(d, node)
    sizes = d.sizes(node)
    pair = {bound[name] % len(sizes) for name in ("dim1", "dim2")}
    rest = iter(dims[:-1])
    result = tuple(d.fresh(n) if i in pair else next(rest) for i, n in enumerate(sizes))
    return _placed(d, node, dims[:-1], result, [dims[-1], *(result[i] for i in pair)])


def _placed(d: Describer, node: fx.Node, rest: Dims, result: Dims, by_place: Sequence[Factor]) -> Access:
    letters = [Letter(f, "parallel") for f in rest if f.size > 1]
    letters += [Letter(f, "whole", "placed along a diagonal") for f in by_place]
    return moved(d, node, result, letters=letters)


def full_like(d: Describer, node: fx.Node) -> Access:
    """Only the sizes of the operand are read; the operator makes its own values."""
    access = moved(d, node, source(d, node))
    return Access(access.operands, access.results, access.letters)
