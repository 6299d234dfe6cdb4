"""Looks: what a node is by itself, its factors numbered in order of appearance.

Nodes of one look have the same strategies but for the names of their factors. So they are found for the first such
node and read off it for all others: the operators of eighty layers cost what those of one do.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch

from plait.rules.describe import Access
from plait.rules.equation import Dims, Factor, flatten
from plait.rules.layout import Layout, Strategy, shard
from plait.rules.split import Split


@dataclass(frozen=True)
class Seen:
    """The first of a look: its strategies, and which of the splits near it each of them is by."""

    number: int
    strategies: tuple[tuple[Strategy, int], ...]  # -1: by none

    def again(self, near: Sequence[Split], access: Access | None) -> tuple[Strategy, ...]:
        """Those of another node, whose splits near it are `near`."""
        return tuple(s if at < 0 else _by(s, near[at], access) for s, at in self.strategies)


@dataclass
class Looks:
    """Those of one program."""

    _seen: dict[Hashable, Seen] = field(default_factory=dict)

    def strategies(
        self, look: Hashable, near: Sequence[Split], access: Access | None, find: Callable[[], tuple[Strategy, ...]]
    ) -> tuple[int, tuple[Strategy, ...]]:
        """The number of the look, and the node's strategies; `find` has them where it is the first."""
        seen = self._seen.get(look)
        if seen is not None:
            return seen.number, seen.again(near, access)
        found, at = find(), {split: i for i, split in enumerate(near)}
        pairs = tuple((s, at[s.split] if s.split is not None else -1) for s in found)
        self._seen[look] = Seen(len(self._seen), pairs)
        return self._seen[look].number, found


def look(
    what: Hashable, results: Sequence[Dims], dtypes: Sequence[torch.dtype], access: Access | None, near: Sequence[Split]
) -> Hashable:
    """Equal for nodes that differ in the names of their factors alone; `what`: all else that tells them apart."""
    numbers: dict[Factor, int] = {}
    operands = access.operands if access is not None else ()
    dims = tuple(tuple(_shape(f, numbers) for f in d) for d in (*(o.dims for o in operands), *results))
    equation: Hashable = None
    if access is not None:
        equation = (
            tuple((x.property, _shape(x.factor, numbers)) for x in access.letters),
            tuple(o.added for o in operands),
            access.carries,
            access.fused and tuple(_shape(f, numbers) for f in access.fused),
        )
    splits = tuple((tuple(numbers.get(f, -1) for f in s.factors), s.bounds) for s in near)
    return what, dims, tuple(dtypes), equation, splits


def _shape(f: Factor, numbers: dict[Factor, int]) -> Hashable:
    f = f.root()
    if f.kind == "free":
        return (f.size, numbers.setdefault(f, len(numbers)) if f.size > 1 else -1)
    if f.kind == "prod":
        return ("*", tuple(_shape(p, numbers) for p in flatten(f)))
    return ("+", tuple(_shape(p, numbers) for p in f.parts))


def _by(s: Strategy, split: Split, access: Access | None) -> Strategy:
    """The same strategy by another node's split."""
    here = shard(split)

    def mine(layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
        return tuple(x if x.split is None else here for x in layouts)

    letters = access.letters if access is not None and s.statistics else ()
    statistics = tuple(x.factor for x in letters if split.touches(x.factor))
    return Strategy(f"split({split.name})", mine(s.operands), mine(s.results), split, statistics)
