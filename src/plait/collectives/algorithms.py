"""The algorithms: what moves each is made of, alone or as one level of a hierarchy, and `build`.

    build("ring[8]/4")                       -> Schedule
    build("all_gather hierarchical[2x8: ring, one_shot]")

An algorithm is a row of the table at the end. What a row leaves out is made from what it has: a reduce-scatter
is the mirror of its all-gather, a reduce the mirror of its broadcast, an all-reduce their pair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import Literal, TypeVar

from plait.collectives import moves
from plait.collectives.moves import Blocks, Chunks, Ranks, Steps, mirror, split, together
from plait.collectives.schedule import COLLECTIVES, Collective, Schedule, Spec
from plait.errors import ScheduleError

AllGather = Callable[[Ranks, Sequence[Chunks]], Steps]
Broadcast = Callable[[Ranks, Chunks], Steps]
AllToAll = Callable[[Ranks, Blocks], Steps]
T = TypeVar("T")


def one(n: int) -> int:
    return 1


def each(n: int) -> int:
    return n


@dataclass(frozen=True)
class Algorithm:
    """The moves of one algorithm.

    `style`: what its all-reduce leaves in the middle, when other levels of a hierarchy go on from there:
    a part on each member (`parts`), everything on member 0 (`root`), or everything on all (`all`).
    """

    style: Literal["parts", "root", "all"]
    all_gather: AllGather
    broadcast: Broadcast
    own_reduce_scatter: AllGather | None = None
    own_all_reduce: Broadcast | None = None
    all_to_all: AllToAll | None = None
    slices: Callable[..., Steps] = moves.staggered  # how the pieces of the vector follow each other
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


# --- hierarchy: rank = (outer index) * inner size + inner index ----------------------------------------


def hierarchy(levels: Sequence[int], algorithms: Sequence[Algorithm]) -> Algorithm:
    """One algorithm at each level, outermost first; data shrinks on its way out, as far as the level's style allows."""
    if len(levels) == 1:
        return algorithms[0]
    size, inner = levels[-1], algorithms[-1]
    outer_size, outer = prod(levels[:-1]), hierarchy(levels[:-1], algorithms[:-1])

    def groups(ranks: Ranks) -> list[Ranks]:
        return split(tuple(ranks), outer_size)

    def peers(of: Sequence[T]) -> list[Sequence[T]]:
        """What belongs to the members with the same inner index, for every index."""
        return [of[i::size] for i in range(size)]

    def all_gather(ranks: Ranks, parts: Sequence[Chunks]) -> Steps:
        across = together(*map(outer.all_gather, peers(ranks), peers(parts)))
        columns = [moves.joined(column) for column in peers(parts)]
        return across + together(*(inner.all_gather(group, columns) for group in groups(ranks)))

    def reduce_scatter(ranks: Ranks, parts: Sequence[Chunks]) -> Steps:
        columns = [moves.joined(column) for column in peers(parts)]
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
        """First to the right inner index, all outer ones together; then to the right outer index."""
        assert inner.all_to_all and outer.all_to_all
        rows = [
            blocks[i : i + size] for i in range(0, len(ranks), size)
        ]  # rows[outer][inner][destination]
        within = [
            inner.all_to_all(group, [[moves.joined(b) for b in peers(block)] for block in row])
            for group, row in zip(groups(ranks), rows, strict=True)
        ]
        across = [
            outer.all_to_all(
                peer,
                [
                    [moves.joined(tos) for tos in zip(*(b[i::size] for b in row), strict=True)]
                    for row in rows
                ],
            )
            for i, peer in enumerate(peers(ranks))
        ]
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


# --- from a spelling to a schedule ----------------------------------------------------------------------


@lru_cache(maxsize=512)
def build(spec: Spec | str) -> Schedule:
    """The schedule that a spelling or a `Spec` names."""
    if isinstance(spec, str):
        return build(Spec.parse(spec))
    algorithm = _resolve(spec)
    if spec.n == 1:
        return Schedule(spec.collective, 1, 1, (), 0, spec)
    chunks, slices = _MAKERS[spec.collective](algorithm, spec)
    steps = tuple(tuple(step) for step in algorithm.slices(*slices) if step)
    return Schedule(spec.collective, spec.n, chunks, steps, spec.root, spec)


def supports(algorithm: str, collective: Collective) -> bool:
    """Does the algorithm have a schedule for this collective?"""
    return (
        collective != "all_to_all"
        or algorithm == "hierarchical"
        or ALGORITHMS[algorithm].all_to_all is not None
    )


def names(collective: Collective) -> tuple[str, ...]:
    """The algorithms of one level that serve a collective."""
    return tuple(name for name in ALGORITHMS if supports(name, collective))


def _members(spec: Spec) -> list[int]:
    """All ranks, the root first, neighbours at every level still together."""
    digits, root = [], spec.root
    for size in reversed(spec.levels):
        digits.append([(root + i) % size for i in range(size)])
        root //= size
    members = [0]
    for size, level in zip(spec.levels, reversed(digits), strict=True):
        members = [rank * size + digit for rank, digit in product(members, level)]
    return members


def _reduced(algorithm: Algorithm, spec: Spec) -> tuple[int, list[Steps]]:
    return _sliced(spec, algorithm.reduce_unit(spec.n), algorithm.all_reduce)


def _spread(algorithm: Algorithm, spec: Spec) -> tuple[int, list[Steps]]:
    return _sliced(spec, algorithm.spread_unit(spec.n), algorithm.broadcast)


def _collected(algorithm: Algorithm, spec: Spec) -> tuple[int, list[Steps]]:
    return _sliced(spec, algorithm.spread_unit(spec.n), algorithm.reduce)


def _sliced(spec: Spec, unit: int, make: Broadcast) -> tuple[int, list[Steps]]:
    chunks = tuple(range(unit * spec.pieces))
    return len(chunks), [make(_members(spec), piece) for piece in split(chunks, spec.pieces)]


def _gathered(algorithm: Algorithm, spec: Spec) -> tuple[int, list[Steps]]:
    return _parted(spec, algorithm.gather_unit, algorithm.all_gather)


def _scattered(algorithm: Algorithm, spec: Spec) -> tuple[int, list[Steps]]:
    return _parted(spec, algorithm.gather_unit, algorithm.reduce_scatter)


def _parted(spec: Spec, unit: int, make: AllGather) -> tuple[int, list[Steps]]:
    """Part r of the vector is rank r's; a slice is a piece of every part."""
    members = _members(spec)
    chunks = tuple(range(spec.n * unit * spec.pieces))
    parts = [split(part, spec.pieces) for part in split(chunks, spec.n)]
    return len(chunks), [make(members, [parts[r][j] for r in members]) for j in range(spec.pieces)]


def _exchanged(algorithm: Algorithm, spec: Spec) -> tuple[int, list[Steps]]:
    """Chunks (source, destination, piece) in this order."""
    assert algorithm.all_to_all
    n, k, members = spec.n, spec.pieces, _members(spec)
    slices = [[[((a * n + b) * k + j,) for b in members] for a in members] for j in range(k)]
    return n * n * k, [algorithm.all_to_all(members, blocks) for blocks in slices]


def _resolve(spec: Spec) -> Algorithm:
    """The algorithm of a spec, or an error that says what is wrong with the spec."""
    known = (*ALGORITHMS, "hierarchical")
    if spec.algorithm not in known:
        raise ScheduleError(
            f"{spec}: no schedule is called {spec.algorithm!r}; there are {', '.join(known)}"
        )
    if spec.collective not in COLLECTIVES:
        raise ScheduleError(f"{spec}: {spec.collective!r} is none of {', '.join(COLLECTIVES)}")
    if spec.n < 1 or spec.pieces < 1 or not 0 <= spec.root < spec.n:
        raise ScheduleError(
            f"{spec}: needs at least one rank (has {spec.n}), one piece (has {spec.pieces}) "
            f"and a root among the ranks (has {spec.root})"
        )
    if spec.algorithm != "hierarchical" and (len(spec.levels) > 1 or spec.inner):
        raise ScheduleError(
            f"{spec}: only hierarchical has levels; nearest: {spec.algorithm}[{spec.n}]"
        )
    if spec.algorithm == "hierarchical" and len(spec.inner) != len(spec.levels):
        raise ScheduleError(
            f"{spec}: {len(spec.levels)} levels need as many algorithms, outermost first, and "
            f"{len(spec.inner)} are given; for example hierarchical[2x8: ring, tree]"
        )
    if unknown := [name for name in spec.inner if name not in ALGORITHMS]:
        raise ScheduleError(
            f"{spec}: no algorithm is called {', '.join(unknown)}; there are {', '.join(ALGORITHMS)}"
        )
    used = spec.inner or (spec.algorithm,)
    if lacking := [name for name in used if not supports(name, spec.collective)]:
        raise ScheduleError(
            f"{spec}: {', '.join(lacking)} cannot do {spec.collective}; "
            f"these can: {', '.join(names(spec.collective))}"
        )
    return hierarchy(spec.levels, [ALGORITHMS[name] for name in used])


# --- the tables -------------------------------------------------------------------------------------------

_MAKERS: dict[Collective, Callable[[Algorithm, Spec], tuple[int, list[Steps]]]] = {
    "all_reduce": _reduced,
    "reduce_scatter": _scattered,
    "all_gather": _gathered,
    "broadcast": _spread,
    "reduce": _collected,
    "all_to_all": _exchanged,
}


def _tree(edges: Callable[[int], moves.Edges]) -> Algorithm:
    return Algorithm(
        "root",
        all_gather=lambda ranks, parts: moves.tree_all_gather(ranks, parts, edges(len(ranks))),
        broadcast=lambda ranks, chunks: moves.spread(ranks, chunks, edges(len(ranks))),
    )


_DIRECT = Algorithm(
    "parts",
    moves.direct_all_gather,
    moves.direct_broadcast,
    all_to_all=moves.direct_all_to_all,
    reduce_unit=each,
    spread_unit=each,
)

ALGORITHMS: dict[str, Algorithm] = {
    "parameter_server": _tree(
        moves.star
    ),  # one master: sums, sends back; its port carries (N-1)S each way
    "sharded_server": _DIRECT,  # every rank the master of one part: the same transfers as two_shot
    "ring": Algorithm(
        "parts",
        moves.ring_all_gather,
        lambda ranks, chunks: moves.spread(ranks, chunks, moves.chain(len(ranks))),
        moves.ring_reduce_scatter,
        all_to_all=moves.pairwise_all_to_all,
        slices=moves.in_turns,
        reduce_unit=each,
    ),
    "tree": _tree(moves.binary_tree),
    "binomial": _tree(moves.binomial_tree),
    "double_tree": Algorithm(
        "root",
        moves.twin_all_gather,
        moves.twin_broadcast,
        own_all_reduce=moves.twin_all_reduce,
        reduce_unit=lambda n: 2,
        spread_unit=lambda n: 2,
        gather_unit=2,
    ),
    "halving_doubling": Algorithm(
        "parts",
        moves.doubling_all_gather,
        moves.doubling_broadcast,
        own_all_reduce=moves.rabenseifner,
        reduce_unit=lambda n: 1 << n.bit_length() - 1,
        spread_unit=each,
    ),
    "recursive_doubling": Algorithm(
        "all",
        moves.bruck_all_gather,
        lambda ranks, chunks: moves.spread(ranks, chunks, moves.binomial_tree(len(ranks))),
        own_all_reduce=moves.doubling_all_reduce,
        all_to_all=moves.bruck_all_to_all,
    ),
    "one_shot": Algorithm(
        "all",
        moves.direct_all_gather,
        lambda ranks, chunks: moves.spread(ranks, chunks, moves.star(len(ranks))),
        own_all_reduce=moves.exchange,
        all_to_all=moves.direct_all_to_all,
    ),
    "two_shot": _DIRECT,
}
