"""An algorithm is the moves it is made of, and a hierarchy of algorithms is again an algorithm.

What an algorithm leaves out is made from what it has: a reduce-scatter is the mirror of its
all-gather, a reduce the mirror of its broadcast, an all-reduce their pair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from plait.collectives.moves import (
    Blocks,
    Chunks,
    Ranks,
    Steps,
    T,
    joined,
    mirror,
    split,
    staggered,
    together,
)

AllGather = Callable[[Ranks, Sequence[Chunks]], Steps]
Broadcast = Callable[[Ranks, Chunks], Steps]
AllToAll = Callable[[Ranks, Blocks], Steps]


def one(n: int) -> int:
    return 1


def each(n: int) -> int:
    return n


@dataclass(frozen=True)
class Algorithm:
    """The moves of one algorithm.

    `style`: what its all-reduce leaves in the middle, where the other levels of a hierarchy go on:
    a part on each member (`parts`), the whole on member 0 (`root`), or the whole on all (`all`).
    """

    style: Literal["parts", "root", "all"]
    all_gather: AllGather
    broadcast: Broadcast
    own_reduce_scatter: AllGather | None = None
    own_all_reduce: Broadcast | None = None
    all_to_all: AllToAll | None = None
    slices: Callable[..., Steps] = staggered  # how the pieces of the vector follow each other
    reduce_unit: Callable[[int], int] = one  # all_reduce cuts a slice into so many chunks
    spread_unit: Callable[[int], int] = one  # broadcast does
    gather_unit: int = 1  # all_gather cuts each part of a slice into so many

    def reduce_scatter(self, ranks: Ranks, parts: Sequence[Chunks]) -> Steps:
        if self.own_reduce_scatter:
            return self.own_reduce_scatter(ranks, parts)
        return mirror(self.all_gather(ranks, parts))

    def reduce(self, ranks: Ranks, chunks: Chunks) -> Steps:
        return mirror(self.broadcast(ranks, chunks))

    def all_reduce(self, ranks: Ranks, chunks: Chunks) -> Steps:
        if self.own_all_reduce:
            return self.own_all_reduce(ranks, chunks)
        if self.style == "parts":
            parts = split(chunks, len(ranks))
            return self.reduce_scatter(ranks, parts) + self.all_gather(ranks, parts)
        return self.reduce(ranks, chunks) + self.broadcast(ranks, chunks)


def hierarchy(levels: Sequence[int], algorithms: Sequence[Algorithm]) -> Algorithm:
    """One algorithm at each level, outermost first: rank = outer index * inner size + inner index.

    An all-reduce works from the inside out and back: what a level's style leaves in the middle
    (a part, the whole on member 0, the whole on all) is what the levels outside of it reduce.
    """
    if len(levels) == 1:
        return algorithms[0]
    size, inner = levels[-1], algorithms[-1]
    outer_size, outer = prod(levels[:-1]), hierarchy(levels[:-1], algorithms[:-1])

    def groups(ranks: Ranks) -> list[Chunks]:
        return split(tuple(ranks), outer_size)

    def peers(of: Sequence[T]) -> list[Sequence[T]]:
        """What belongs to the members with the same inner index, for every index."""
        return [of[i::size] for i in range(size)]

    def all_gather(ranks: Ranks, parts: Sequence[Chunks]) -> Steps:
        across = together(*map(outer.all_gather, peers(ranks), peers(parts)))
        columns = [joined(column) for column in peers(parts)]
        return across + together(*(inner.all_gather(group, columns) for group in groups(ranks)))

    def reduce_scatter(ranks: Ranks, parts: Sequence[Chunks]) -> Steps:
        columns = [joined(column) for column in peers(parts)]
        within = together(*(inner.reduce_scatter(group, columns) for group in groups(ranks)))
        return within + together(*map(outer.reduce_scatter, peers(ranks), peers(parts)))

    def broadcast(ranks: Ranks, chunks: Chunks) -> Steps:
        across = outer.broadcast(ranks[::size], chunks)
        return across + together(*(inner.broadcast(group, chunks) for group in groups(ranks)))

    def all_reduce(ranks: Ranks, chunks: Chunks) -> Steps:
        if inner.style == "all":
            within = together(*(inner.all_reduce(group, chunks) for group in groups(ranks)))
            return within + together(*(outer.all_reduce(peer, chunks) for peer in peers(ranks)))
        if inner.style == "root":
            first = together(*(inner.reduce(group, chunks) for group in groups(ranks)))
            last = together(*(inner.broadcast(group, chunks) for group in groups(ranks)))
            return first + outer.all_reduce(ranks[::size], chunks) + last
        parts = split(chunks, size)
        first = together(*(inner.reduce_scatter(group, parts) for group in groups(ranks)))
        last = together(*(inner.all_gather(group, parts) for group in groups(ranks)))
        return first + together(*map(outer.all_reduce, peers(ranks), parts)) + last

    def all_to_all(ranks: Ranks, blocks: Blocks) -> Steps:
        """First to the right inner index, for all outer ones at once; then to the right outer."""
        assert inner.all_to_all is not None
        assert outer.all_to_all is not None
        rows = [
            blocks[i : i + size] for i in range(0, len(ranks), size)
        ]  # a row: one group's blocks
        within, across = [], []
        for group, row in zip(groups(ranks), rows, strict=True):
            columns = [[joined(column) for column in peers(sent)] for sent in row]
            within.append(inner.all_to_all(group, columns))
        for i, peer in enumerate(peers(ranks)):
            held = [zip(*(sent[i::size] for sent in row), strict=True) for row in rows]
            across.append(outer.all_to_all(peer, [list(map(joined, held_by)) for held_by in held]))
        return together(*within) + together(*across)

    unit = {
        "parts": size * inner.gather_unit,
        "root": inner.spread_unit(size),
        "all": inner.reduce_unit(size),
    }
    return Algorithm(
        "parts",
        all_gather,
        broadcast,
        reduce_scatter,
        all_reduce,
        all_to_all if inner.all_to_all and outer.all_to_all else None,
        reduce_unit=lambda n: unit[inner.style] * outer.reduce_unit(outer_size),
        spread_unit=lambda n: outer.spread_unit(outer_size) * inner.spread_unit(size),
        gather_unit=max(outer.gather_unit, inner.gather_unit),
    )
