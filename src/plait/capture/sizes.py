"""What the trial says of the dynamic sizes: the range in which its guards hold, and the lines that ask.

torch narrows a size by guards that compare it with a number. Others hold in a range all the same:

    x.diagonal()                    of [rows, 4] has min(rows, 4) elements
    x.diagonal().view(2, 2)         needs 2*2 of them: min(rows, 4) == 4, so rows >= 4

and the export, given that range, proves them; without it, it refuses the size. So each such guard moves
one end of the range towards the example, as far as intervals prove it, where the next value breaks it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from plait.capture.call import Call, Range

LEAST, MOST = 2, 2**31  # of a size that is a symbol: 0 and 1 are numbers to torch

Branches = Sequence[tuple[Any, bool]]  # that the model's own Python takes, with the answer in the trial


@dataclass
class Asked:
    """One dynamic size in the trial: a symbol for each dim that has it, and what it is there."""

    example: int
    symbols: set[sympy.Symbol] = field(default_factory=set)


def asked(call: Call, example: tuple[Any, Any]) -> dict[str, Asked]:
    """The dynamic sizes, by their names."""
    found: dict[str, Asked] = {}
    for x, dims in zip(pytree.tree_leaves(example), call.dims, strict=True):
        for dim, name in dims.items():
            node = x.shape[dim].node
            found.setdefault(name, Asked(int(node.hint))).symbols.update(node.expr.free_symbols)
    return found


def ranges(
    sizes: Mapping[str, Asked], env: ShapeEnv, branches: Branches, bounds: Mapping[str, Range]
) -> dict[str, Range]:
    """What the guards of the trial leave of each size; `bounds`: that the user has given."""
    found: dict[str, Range] = {}
    for name, size in sizes.items():
        low, high = bounds[name]
        if low is None or low < LEAST:
            low = LEAST if _differs_at_one(size, branches) else low
        for symbol in size.symbols:
            limits = env.bound_sympy(symbol)
            low, high = _most(low, limits.lower), _least(high, limits.upper)
        found[name] = _narrowed(size, env, (low, high))
    return found


def _differs_at_one(size: Asked, branches: Branches) -> bool:
    """Whether the model does something else where the size is 1, which torch takes for impossible."""
    one = dict.fromkeys(size.symbols, sympy.Integer(1))
    about = [(e, answer) for e, answer in branches if e.free_symbols and e.free_symbols <= size.symbols]
    return any(bool(e.xreplace(one)) != answer for e, answer in about)


def _narrowed(size: Asked, env: ShapeEnv, known: Range) -> Range:
    """By every guard of this size alone, until none says more: one may hold only in what another leaves."""
    one = min(size.symbols, key=str)
    alone = [g.expr for g in env.guards if g.expr.free_symbols <= size.symbols]
    guards = [g.xreplace(dict.fromkeys(size.symbols, one)) for g in alone]
    before = None
    while known != before:
        before = known
        for guard in guards:
            known = _within(guard, one, size.example, known)
    return known


def _within(guard: Any, size: sympy.Symbol, example: int, known: Range) -> Range:
    """The part of a range in which a guard holds, where that is all of it from one end to some value."""
    low, high = known[0] or LEAST, known[1] or MOST

    def holds(first: int, last: int) -> bool:
        span = ValueRanges(first, last if last < MOST else int_oo)
        return bool(bound_sympy(guard, {size: span}) == ValueRanges.wrap(sympy.true))

    if not low <= example <= high or holds(low, high):
        return known
    if holds(example, high):
        start = low + bisect_left(range(low, example), True, key=lambda n: holds(n, high))
        return known if holds(start - 1, start - 1) else (start, known[1])
    if holds(low, example):
        end = example + bisect_left(range(example + 1, high), True, key=lambda n: not holds(low, n))
        return known if holds(end + 1, end + 1) else (known[0], end)
    return known


def places(sizes: Mapping[str, Asked], guards: Iterable[tuple[Any, str]]) -> dict[str, str]:
    """The line that asks about each size: one that another size would answer otherwise, and an equation before a
    limit."""
    found: dict[str, str] = {}
    lines = [(guard, place) for guard, place in guards if place]
    for name, size in sizes.items():
        about = [x for x in lines if size.symbols & x[0].free_symbols]
        if about:
            found[name] = min(about, key=lambda x: (not _turns(x[0], size), not _equation(x[0])))[1]
    return found


def _turns(guard: Any, size: Asked) -> bool:
    """Whether its answer at the example is not that next to it."""
    if not guard.free_symbols <= size.symbols:
        return False
    near = (n for n in range(size.example - 1, size.example + 2) if n >= LEAST)
    return len({guard.xreplace(dict.fromkeys(size.symbols, sympy.Integer(n))) for n in near}) > 1


def _equation(guard: Any) -> bool:
    return type(guard).__name__ in ("Equality", "Unequality")


def _least(known: int | None, upper: Any) -> int | None:
    if not (upper.is_Integer and int(upper) < MOST):
        return known
    return int(upper) if known is None else min(known, int(upper))


def _most(known: int | None, lower: Any) -> int | None:
    low = int(lower) if lower.is_Integer else 0
    low = 0 if low <= LEAST else low  # which a graph does not ask for
    return max(known or 0, low) or None
