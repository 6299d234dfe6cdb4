"""The algebra: factors, their unification, and the rows that a split gives to a rank.

Every dim of every value is a `Factor`. A factor starts free and is refined by what operators say:

    free            a size and an identity
    product         (h d)      parts of size >= 2, outermost first     views merge and split these
    sum             [q + k]    segments, in order                    cat joins, slice and split part

`Algebra.unify` ties two factors together. It either succeeds as a whole or undoes everything it did
and returns a `Conflict`; the caller then keeps both sides whole at that operator. Sizes are plain
integers: a symbolic size is stood for by a large prime (see describe.py), so that divisibility of
sizes is that of monomials.

Size 1 is the constant `ONE`: it binds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

Ranges = tuple[tuple[int, int], ...]
SYMBOLIC = 2**40  # the least size that stands for a symbol


class Factor:
    """A node of the union-find: `link` forwards to another factor, `parts` refine this one."""

    __slots__ = ("hint", "kind", "link", "name", "parts", "size")

    def __init__(self, size: int, kind: str = "free", parts: tuple[Factor, ...] = ()):
        self.size = size
        self.kind = kind  # "free" | "prod" | "sum"
        self.parts = parts
        self.link: Factor | None = None
        self.name = ""
        self.hint: int | None = None  # of a symbolic size: what it was in the example

    @property
    def extent(self) -> int:
        """The size to reckon with: a symbolic size counts as it was in the example."""
        f = self.root()
        if f.kind == "prod":
            return prod(p.extent for p in f.parts)
        if f.kind == "sum":
            return sum(p.extent for p in f.parts)
        return f.size if f.hint is None else f.hint

    def root(self) -> Factor:
        f = self
        while f.link is not None:
            f = f.link
        return f

    def __repr__(self) -> str:
        f = self.root()
        if f.kind == "prod":
            return "(" + " ".join(map(repr, flatten(f))) + ")"
        if f.kind == "sum":
            return "[" + " + ".join(map(repr, f.parts)) + "]"
        return f.name or str(f.size)


ONE = Factor(1)
Dims = tuple[Factor, ...]


class Conflict(Exception):
    """Two factors of one size that cannot be the same; the message is for the report."""


def flatten(f: Factor) -> list[Factor]:
    """The factors of a product, outermost first, nested products opened; else the factor itself."""
    f = f.root()
    if f.kind != "prod":
        return [f]
    return [atom for part in f.parts for atom in flatten(part)]


def segments(f: Factor) -> list[Factor]:
    """The segments of a sum, nested sums opened; else the factor itself."""
    f = f.root()
    if f.kind != "sum":
        return [f]
    return [leaf for part in f.parts for leaf in segments(part)]


def atoms(f: Factor) -> Iterator[Factor]:
    """The free factors (of size >= 2) under `f`, with repeats."""
    f = f.root()
    if f.kind == "free":
        if f.size > 1:
            yield f
    else:
        for part in f.parts:
            yield from atoms(part)


def product(parts: Sequence[Factor]) -> Factor:
    """The merged dim of `parts`, outermost first."""
    real = [p for p in parts if p.size != 1]
    if not real:
        return ONE
    return real[0] if len(real) == 1 else Factor(prod(p.size for p in real), "prod", tuple(real))


def total(parts: Sequence[Factor]) -> Factor:
    """The joined dim of `parts`, in order; empty segments vanish."""
    real = [p for p in parts if p.size != 0]
    if len(real) == 1:
        return real[0]
    return Factor(sum(p.size for p in real), "sum", tuple(real))


class Algebra:
    """Unification with a trail, so that a conflict leaves no trace (rule U6)."""

    STEPS = 4096  # a shift of a factor against itself would refine it to units one by one

    def __init__(self) -> None:
        self._trail: list[Factor] = []
        self._budget = 0

    def unify(self, f: Factor, g: Factor) -> Conflict | None:
        mark = len(self._trail)
        self._budget = self.STEPS
        try:
            self._unify(f, g)
        except Conflict as conflict:
            while len(self._trail) > mark:
                self._trail.pop().link = None
            return conflict
        return None

    def settle(self) -> None:
        """When all is unified: every factor one step from its root, however many layers tied it."""
        for f in reversed(self._trail):
            f.link = f.root()

    def _bind(self, f: Factor, to: Factor) -> None:
        assert f is not to
        assert f.link is None
        assert f.size == to.size
        f.link = to
        self._trail.append(f)

    def _unify(self, f: Factor, g: Factor) -> None:
        f, g = f.root(), g.root()
        if f is g:
            return
        self._budget -= 1
        if self._budget < 0:
            raise Conflict(f"{f!r} and {g!r} are shifted against each other")
        if f.size != g.size:
            raise Conflict(f"sizes {f.size} and {g.size} differ")
        if f.size == 1:
            return
        if f.kind == "free":
            self._bind(f, g)
        elif g.kind == "free":
            self._bind(g, f)
        elif f.kind == g.kind == "prod":
            self._products(f, g)
        elif f.kind == g.kind == "sum":
            self._sums(f, g)
        elif f.kind == "prod":
            self._product_of_sums(f, g)
        else:
            self._product_of_sums(g, f)

    def _products(self, f: Factor, g: Factor) -> None:
        """Rule U3: from the outermost, a smaller factor that divides the larger refines it."""
        a, b = flatten(f), flatten(g)
        while a and b:
            x, y = a[0], b[0]
            if x.size == y.size:
                self._unify(x, y)
                a, b = a[1:], b[1:]
                continue
            if x.size < y.size:
                a, b, x, y = b, a, y, x
            if x.size % y.size:
                raise Conflict(f"({_sizes(a)}) against ({_sizes(b)})")
            rest = Factor(x.size // y.size)
            self._unify(x, product((y, rest)))
            a, b = flatten(rest) + a[1:], b[1:]
        if f.root() is not g.root():
            self._bind(f.root(), g.root())

    def _sums(self, f: Factor, g: Factor) -> None:
        """Rule U4: from the first, a smaller segment cuts the larger; a shift is a conflict."""
        a, b = segments(f), segments(g)
        while a and b:
            x, y = a[0], b[0]
            if x.size == y.size:
                self._unify(x, y)
                a, b = _reopen(a[1:]), _reopen(b[1:])
                continue
            if x.size < y.size:
                a, b, x, y = b, a, y, x
            if any(x.root() in atoms_and_parts(other) for other in b):
                raise Conflict(f"[{_sizes(a)}] is shifted against [{_sizes(b)}]")
            rest = Factor(x.size - y.size)
            self._unify(x, total((y, rest)))
            a, b = _reopen([rest, *a[1:]]), _reopen(b[1:])
        if f.root() is not g.root():
            self._bind(f.root(), g.root())

    def _product_of_sums(self, f: Factor, g: Factor) -> None:
        """Rule U5: (p I) = [s1 + s2 ..] makes p a sum, each of whose segments repeats I."""
        outer, *inner = flatten(f)
        width = prod(i.size for i in inner)
        groups: list[list[Factor]] = [[]]
        for segment in segments(g):
            groups[-1].append(segment)
            if sum(s.size for s in groups[-1]) % width == 0:
                groups.append([])
        if groups.pop() or len(groups) < 2:
            raise Conflict(f"segments {_sizes(segments(g))} are no multiples of {width}")
        counts = [Factor(sum(s.size for s in group) // width) for group in groups]
        self._unify(outer, total(counts))
        for count, group in zip(counts, groups, strict=True):
            self._unify(total(group), product((count.root(), *inner)))
        if f.root() is not g.root():
            self._bind(f.root(), g.root())


def atoms_and_parts(f: Factor) -> Iterator[Factor]:
    """Every factor under `f`, itself included."""
    f = f.root()
    yield f
    for part in f.parts:
        yield from atoms_and_parts(part)


def _reopen(parts: Sequence[Factor]) -> list[Factor]:
    return [leaf for part in parts for leaf in segments(part)]


def _sizes(parts: Sequence[Factor]) -> str:
    return " ".join(str(p.size) for p in parts)
