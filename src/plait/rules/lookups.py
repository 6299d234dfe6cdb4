"""Rules of the operators that read rows by index, and of those that write them there.

What is indexed is whole; the dims beside it are parallel, and both ways are linear in the values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from plait.rules.describe import Access, Describer, Letter, Operand, bind
from plait.rules.equation import Factor
from plait.rules.rule import Binder, Equation, carry_groups, is_tensor


def embedding(d: Describer, node: fx.Node) -> Access:
    """`v d, * -> * d`, v selected; all but d whole where gradients are scaled by how often a row is read."""
    access = _embedding(d, node)
    if not bind(node).get("scale_grad_by_freq"):
        return access
    width = access.operands[0].dims[1]
    counted = "its reads are counted"
    letters = (x if x.factor is width else Letter(x.factor, "whole", counted) for x in access.letters)
    return replace(access, letters=tuple(letters))


_embedding = Equation("weight[v d] indices[*] -> [* d]", select="v", carry="weight")


@dataclass(frozen=True)
class Picks:
    """The indices of `x[:, i, arange(n)]`: names of all dims; those of `x` that `i` picks from have none.

    A dim that is counted beside the index, 0 to n - 1, is read row by row: it has the index's name.
    """

    x: Operand
    indices: tuple[Operand, ...]
    names: tuple[str, ...]  # of the dims of x
    inner: tuple[str, ...]  # of what is read or written
    counts: tuple[bool, ...]  # of each index

    @classmethod
    def of(cls, d: Describer, node: fx.Node) -> Picks | None:
        """None where an index is boolean."""
        bound = bind(node)
        x = d.operand(bound["self"])
        picks = list(bound["indices"]) + [None] * (len(x.dims) - len(bound["indices"]))
        at = [i for i, p in enumerate(picks) if p is not None]
        indices = [d.operand(picks[i]) for i in at]
        if any(p.node.meta["val"].dtype in (torch.bool, torch.uint8) for p in indices):
            return None
        width = max(len(p.dims) for p in indices)
        rows = [f"i{i}" for i in range(width)]
        names = [f"x{i}" if p is None else "" for i, p in enumerate(picks)]
        for i, p in zip(at, indices, strict=True):
            if d.counts(p.node, x.dims[i].size):
                (j,) = (j for j, f in enumerate(p.dims, width - len(p.dims)) if f.size > 1)
                names[i] = rows[j] if rows[j] not in names else ""
        kept = [f"x{i}" for i, p in enumerate(picks) if p is None]
        before = kept[: at[0]] if at == [*range(at[0], at[-1] + 1)] else []
        inner = (*before, *rows, *kept[len(before) :])
        return cls(x, tuple(indices), tuple(names), inner, tuple(bool(names[i]) for i in at))

    def bind(self, binder: Binder) -> None:
        named = [(name, f) for name, f in zip(self.names, self.x.dims, strict=True) if name]
        binder.bind([name for name, _ in named], tuple(f for _, f in named))

    @property
    def counted(self) -> tuple[Factor, ...]:
        """The dims that are read row by row, by an index that counts them."""
        return tuple(f for name, f in zip(self.names, self.x.dims, strict=True) if name[:1] == "i")

    @property
    def by_value(self) -> list[Factor]:
        """The dims that are picked from."""
        return [f for name, f in zip(self.names, self.x.dims, strict=True) if not name]


def index(d: Describer, node: fx.Node) -> Access:
    """Rows picked by one integer tensor, or by several that broadcast: indexed dims are whole.

    Not those that are counted beside another: in `x[arange(b), i]` b is parallel.
    """
    picks = Picks.of(d, node)
    if picks is None:
        return d.whole(node, BOOLEAN)
    binder = Binder(d, node)
    rows = [name for name in picks.inner if name[0] == "i"]
    for p, counts in zip(picks.indices, picks.counts, strict=True):
        if not counts:
            binder.bind(rows[len(rows) - len(p.dims) :], p.dims)
    picks.bind(binder)
    result = binder.result(list(picks.inner), d.sizes(node))
    letters = (*binder.letters({}), *(Letter(f, "whole", "indexed by value") for f in picks.by_value))
    return Access((picks.x, *picks.indices), (result,), letters, ((0,),), counts=picks.counted)


def gather(d: Describer, node: fx.Node) -> Access:
    """`t e, t k -> t k`: the gathered dim whole, the others parallel where the sizes agree."""
    bound = bind(node)
    x, ids = d.operand(bound["self"]), d.operand(bound["index"])
    dim = bound["dim"] % max(1, len(x.dims))
    binder = Binder(d, node)
    names = [f"d{i}" for i in range(len(x.dims))]
    loose: list[Letter] = []
    for i, name in enumerate(names):
        if i != dim and x.dims[i].size == ids.dims[i].size:
            binder.bind([name], (x.dims[i],))
        else:
            loose.append(Letter(x.dims[i], "whole", "gathered by value"))
    binder.bind(names, ids.dims)
    result = binder.result(names, d.sizes(node))
    gathered = {names[i]: "parallel" for i in range(len(names))}
    return Access((x, ids), (result,), (*binder.letters(gathered), *loose), ((0,),))


def index_select(d: Describer, node: fx.Node) -> Access:
    """`t *, k -> k *`: t whole, where rows are picked; the others parallel."""
    bound = bind(node)
    x, ids = d.operand(bound["self"]), d.operand(bound["index"])
    dim = bound["dim"] % max(1, len(x.dims))
    result = (*x.dims[:dim], *(ids.dims or d.fresh_dims(node)[dim : dim + 1]), *x.dims[dim + 1 :])
    letters = [Letter(f, "parallel") for i, f in enumerate(x.dims) if i != dim]
    letters += [Letter(f, "parallel") for f in ids.dims]
    letters.append(Letter(x.dims[dim], "whole", "indexed by value"))
    return Access((x, ids), (result,), tuple(letters), ((0,),))


def scatter(d: Describer, node: fx.Node) -> Access:
    """`t e, t k, t k -> t e`: e whole, where rows are written; the others parallel where the sizes agree."""
    bound = bind(node)
    names = [n for n in ("self", "index", "src", "source") if is_tensor(bound.get(n))]
    operands = [d.operand(bound[n]) for n in names]
    x = operands[0]
    dim = bound["dim"] % max(1, len(x.dims))
    binder, loose = Binder(d, node), list[Letter]()
    letters = [f"d{i}" for i in range(len(x.dims))]
    binder.bind(letters, x.dims)
    for name, o in zip(names[1:], operands[1:], strict=True):
        if name == "index" and "index_" in str(node.target):  # index_add and its like: one for all rows
            loose += [Letter(f, "whole", WRITTEN) for f in o.dims]
            continue
        for i, (letter, f) in enumerate(zip(letters, o.dims, strict=True)):
            if i != dim and f.size == x.dims[i].size:
                binder.bind([letter], (f,))
            elif f.size > 1 or x.dims[i].size > 1:
                loose += [Letter(g, "whole", WRITTEN) for g in (f, x.dims[i])]
    result = binder.result(letters, d.sizes(node))
    found = binder.letters({f"d{dim}": "whole"} if letters else {})
    linear = "" if "reduce" in bound else "+".join(n for n in names if n != "index")
    carries = carry_groups([linear.split("+")], names) if "+" in linear else ()
    return Access(tuple(operands), (result,), (*found, *loose), carries)


def index_put(d: Describer, node: fx.Node) -> Access:
    """Rows written at integer indices: indexed dims are whole, the others of `self` and `values` parallel.

    Not those that are counted beside another: in `x[arange(b), i] = v` b is parallel.
    """
    picks, values = Picks.of(d, node), d.operand(bind(node)["values"])
    if picks is None:
        return d.whole(node, BOOLEAN)
    binder = Binder(d, node)
    picks.bind(binder)
    binder.bind(list(picks.inner[len(picks.inner) - len(values.dims) :]), values.dims)
    rows, loose = [name for name in picks.inner if name[0] == "i"], list[Factor]()
    for p, counts in zip(picks.indices, picks.counts, strict=True):
        for name, f in zip(rows[len(rows) - len(p.dims) :], p.dims, strict=True):
            if name in picks.names and not counts:
                binder.bind([name], (f,))
            elif not counts:
                loose.append(f)
    bare = [(name, f) for name, f in zip(picks.names, picks.x.dims, strict=True) if name]
    named = iter(binder.result([name for name, _ in bare], tuple(f.size for _, f in bare)))
    result = tuple(next(named) if name else f for name, f in zip(picks.names, picks.x.dims, strict=True))
    letters = binder.letters({name: "whole" for name in rows if name not in picks.names})
    written = (Letter(f, "whole", WRITTEN) for f in (*picks.by_value, *loose))
    carries = ((0, 1 + len(picks.indices)),)
    operands = (picks.x, *picks.indices, values)
    return Access(operands, (result,), (*letters, *written), carries, counts=picks.counted)


def assign(d: Describer, node: fx.Node) -> Access:
    """`* d, * e -> * d`, what `x[:, 1:] = y` becomes: the dim that is written in part is whole."""
    bound = bind(node)
    x, source = d.operand(bound["self"]), d.operand(bound["src"])
    dim = bound["dim"] % len(x.dims)
    names = [f"d{i}" for i in range(len(x.dims))]
    one = "index" in bound  # a row, which has no such dim
    rows = names[:dim] + ([] if one else ["e"]) + names[dim + 1 :]
    if not one and source.dims[dim].size == x.dims[dim].size and not d.is_symbolic(x.dims[dim]):
        rows = names  # all of it
    binder = Binder(d, node)
    binder.bind(names, x.dims)
    binder.bind(rows, source.dims)
    result = binder.result(names, d.sizes(node))
    letters = binder.letters({} if rows is names else {names[dim]: "whole", "e": "whole"})
    return Access((x, source), (result,), letters, ((0, 1),))


WRITTEN = "written by value"
BOOLEAN = "a boolean index: how many rows depends on values"
