"""Split: a factor laid along a mesh axis, and the rows of a dim that each rank then holds.

A split names one factor, or a run of factors that stand next to each other in a product (`g` and
`r` of the query heads `(g r)`), and the bounds of each rank's share of their joint index. Shares
may be uneven. A dim that holds only the outermost of the run (`g`: the key/value heads) holds the
covering range, so neighbours may hold the same row.

One-line spelling: `f3: 0 2 4`, `f3*f4: 0 5 9`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from plait.rules.equation import SYMBOLIC, Dims, Factor, Ranges, atoms, flatten


@dataclass(frozen=True)
class Split:
    """`factors` outermost first; rank r holds `bounds[r]` to `bounds[r + 1]` of the joint index."""

    factors: tuple[Factor, ...]
    bounds: tuple[int, ...]
    ordinal: int = 0  # tells fused runs apart that share their outermost factor

    @classmethod
    def even(cls, factors: tuple[Factor, ...], n: int, ordinal: int = 0) -> Split:
        """Shares that differ by at most one, the larger first."""
        size = prod(f.size for f in factors)
        bounds = [0]
        for r in range(n):
            bounds.append(bounds[-1] + size // n + (r < size % n))
        return cls(factors, tuple(bounds), ordinal)

    @property
    def name(self) -> str:
        return "*".join(f.name for f in self.factors)

    @property
    def ranks(self) -> int:
        return len(self.bounds) - 1

    def __str__(self) -> str:
        return f"{self.name}: {' '.join(map(str, self.bounds))}"

    def touches(self, f: Factor) -> bool:
        """Whether the split cuts `f`. Remembered, for it is asked of every dim of every value;
        factors no longer change once splits are made."""
        known = self._touched.get(f)
        if known is None:
            known = self._touched[f] = any(atom in self._set for atom in atoms(f))
        return known

    @cached_property
    def _touched(self) -> dict[Factor, bool]:
        return {}

    @cached_property
    def _sizes(self) -> dict[Factor, tuple[int, ...]]:
        return {}

    @cached_property
    def _ranges(self) -> dict[tuple[Factor, int], Ranges]:
        return {}

    @cached_property
    def _set(self) -> frozenset[Factor]:
        return frozenset(self.factors)

    def dim(self, dims: Dims) -> int | None:
        """The one dim of a value that this split cuts, if any (`splittable` must hold)."""
        for i, f in enumerate(dims):
            if self.touches(f):
                return i
        return None

    def splittable(self, dims: Dims) -> bool:
        """Whether a value with these dims may be cut: at most one dim, no diagonal, a whole run.

        Nor a dim that is also of symbolic size: which rows are whose would be known in the call alone.
        """
        cut = [f for f in dims if self.touches(f)]
        return not cut or (len(cut) == 1 and cut[0].size < SYMBOLIC and self._legal(cut[0]))

    def _legal(self, f: Factor) -> bool:
        f = f.root()
        if f.kind == "sum":
            return all(self._legal(part) for part in f.parts)
        run = [part for part in flatten(f) if self.touches(part)]
        if not run:
            return True
        if len(run) == 1 and run[0].kind == "sum":
            return self._legal(run[0])
        return self._run(f) is not None

    def _run(self, f: Factor) -> tuple[int, int] | None:
        """Where the factors of the split stand in the product `f`: (first part, how many)."""
        parts = flatten(f)
        at = [i for i, part in enumerate(parts) if part in self._set]
        first, count = (at[0], len(at)) if at else (0, 0)
        found = tuple(parts[first : first + count])
        return (first, count) if count and found == self.factors[:count] else None

    def ranges(self, f: Factor, rank: int) -> Ranges:
        """The rows of a dim that `rank` holds, in order. Remembered as `touches` is."""
        f = f.root()
        known = self._ranges.get((f, rank))
        if known is None:
            known = self._ranges[f, rank] = self._rows(f, rank)
        return known

    def _rows(self, f: Factor, rank: int) -> Ranges:
        if not self.touches(f):
            return ((0, f.size),) if f.size else ()
        if f.kind == "sum":
            return self._sum_ranges(f, rank)
        parts = flatten(f)
        run = self._run(f)
        if run is None:  # a sum inside a product
            (at,) = [i for i, part in enumerate(parts) if self.touches(part)]
            middle, count, size = self.ranges(parts[at], rank), 1, parts[at].size
        else:
            at, count = run
            middle, size = self._share(count, rank)
        inner = prod(p.size for p in parts[at + count :])
        middle = tuple((lo * inner, hi * inner) for lo, hi in middle)
        outer = prod(p.size for p in parts[:at])
        step = size * inner
        return merged([(o * step + lo, o * step + hi) for o in range(outer) for lo, hi in middle])

    def _share(self, count: int, rank: int) -> tuple[Ranges, int]:
        """The rank's range over the first `count` factors (covering, if not all); their size."""
        lo, hi = self.bounds[rank], self.bounds[rank + 1]
        rest = prod(f.size for f in self.factors[count:])
        size = prod(f.size for f in self.factors[:count])
        return (((lo // rest, -(-hi // rest)),) if hi > lo else ()), size

    def _sum_ranges(self, f: Factor, rank: int) -> Ranges:
        out: list[tuple[int, int]] = []
        offset = 0
        for part in f.parts:
            out += [(offset + lo, offset + hi) for lo, hi in self.ranges(part, rank)]
            offset += part.size
        return merged(out)

    def size(self, f: Factor, rank: int) -> int:
        """The local size of a dim."""
        return self.sizes(f)[rank]

    def sizes(self, f: Factor) -> tuple[int, ...]:
        """The local sizes of a dim, by rank."""
        f = f.root()
        known = self._sizes.get(f)
        if known is None:
            known = self._sizes[f] = tuple(self._size(f, r) for r in range(self.ranks))
        return known

    def _size(self, f: Factor, rank: int) -> int:
        if not self.touches(f):
            return f.size
        if f.kind == "sum":
            return sum(self.size(part, rank) for part in f.parts)
        run, parts = self._run(f), flatten(f)
        if run is None:  # a sum inside a product
            return prod(self.size(part, rank) for part in parts)
        at, count = run
        rows, _ = self._share(count, rank)
        others = prod(part.size for part in [*parts[:at], *parts[at + count :]])
        return others * sum(hi - lo for lo, hi in rows)

    def owned(self, f: Factor, rank: int) -> Ranges:
        """Those rows of `ranges` that no lower rank holds: every row is owned once."""
        mine = self.ranges(f, rank)
        for lower in range(rank):
            mine = _minus(mine, self.ranges(f, lower))
        return mine

    def disjoint(self, f: Factor) -> bool:
        """Whether no row of the dim is held twice."""
        return sum(self.sizes(f)) == f.size


def merged(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """Ascending ranges, neighbours as one."""
    out: list[tuple[int, int]] = []
    for lo, hi in ranges:
        if lo == hi:
            continue
        if out and out[-1][1] == lo:
            out[-1] = (out[-1][0], hi)
        else:
            out.append((lo, hi))
    return tuple(out)


def _minus(a: Ranges, b: Ranges) -> Ranges:
    """The rows of `a` that are not in `b`, both ascending."""
    out: list[tuple[int, int]] = []
    for lo, hi in a:
        for blo, bhi in b:
            if bhi <= lo or blo >= hi:
                continue
            if blo > lo:
                out.append((lo, blo))
            lo = max(lo, bhi)
        if lo < hi:
            out.append((lo, hi))
    return tuple(out)
