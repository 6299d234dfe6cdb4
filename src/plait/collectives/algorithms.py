"""The algorithms, and `build`, which makes the schedule that a spelling names.

    build("ring[8]/4")                       -> Schedule
    build("all_gather hierarchical[2x8: ring, one_shot]")

An algorithm is a row of the table at the end: the moves it is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import product
from math import isqrt

from plait.collectives import moves, trees
from plait.collectives.hierarchy import Algorithm, AllGather, Broadcast, each, hierarchy
from plait.collectives.moves import Move, Steps, split
from plait.collectives.schedule import (
    COLLECTIVES,
    Collective,
    Schedule,
    Spec,
    Transfer,
    check_asked,
    whole,
)
from plait.errors import ScheduleError

MOST = 1 << 20  # transfers, about, of a schedule that is built step by step


def build(spec: Spec | str) -> Schedule:
    """The schedule that a spelling or a `Spec` names."""
    made = spec if isinstance(spec, Spec) else Spec.parse(spec)
    _resolve(made)  # before what is remembered, in which a root of True is one of 1
    return _build(made)


def schedule_of(what: Schedule | Spec | str) -> Schedule:
    """A schedule as it is, or by its spelling."""
    return what if isinstance(what, Schedule) else build(what)


def transfers(spec: Spec) -> int:
    """About the most that its schedule has: the chunks of every rank, to every other."""
    return spec.n * spec.n * spec.pieces


@lru_cache(maxsize=512)
def _build(spec: Spec) -> Schedule:
    chunks, steps = moves_of(spec)
    done = tuple(tuple(sorted(_transfers(step))) for step in steps if step)
    return Schedule(spec.collective, spec.n, chunks, done, spec.root, spec)


def _transfers(step: Iterable[Move]) -> Iterator[Transfer]:
    return (Transfer(m.source, m.target, chunk, m.op) for m in step for chunk in m.chunks)


def moves_of(spec: Spec) -> tuple[int, Steps]:
    """The number of chunks, and the steps as the algorithm makes them; nothing is remembered."""
    algorithm = _resolve(spec)
    if spec.n == 1:
        return 1, []
    chunks, slices = _MAKERS[spec.collective](algorithm, spec)
    return chunks, algorithm.slices(*slices)


def supports(algorithm: str, collective: Collective) -> bool:
    """Does the algorithm have a schedule for this collective?"""
    check_asked(collective)
    if algorithm == "hierarchical":
        return True
    known = ALGORITHMS.get(algorithm)
    return known is not None and (collective != "all_to_all" or known.all_to_all is not None)


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
    sound = spec.levels and all(whole(size, least=1) for size in spec.levels)
    sound = sound and whole(spec.pieces, least=1) and whole(spec.root, least=0)
    if not sound or spec.root >= spec.n:
        raise ScheduleError(
            f"{spec}: needs at least one rank (has {spec.n}), one piece (has {spec.pieces}) "
            f"and a root among the ranks (has {spec.root}), all whole numbers"
        )
    if transfers(spec) > MOST:
        fewer = [f"{isqrt(MOST // spec.pieces)} ranks"] if spec.pieces <= MOST else []
        fewer += [f"{MOST // spec.n**2} pieces"] if spec.n**2 <= MOST else []
        raise ScheduleError(
            f"{spec}: would have about {transfers(spec):.2g} transfers, and {MOST} are the most that "
            f"are written down; nearest: {' or '.join(fewer) or 'ring[8]'} "
            "(plait.cost.flow.wide simulates thousands of ranks)"
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
            f"{spec}: no level can run {', '.join(unknown)}; these exist: {', '.join(ALGORITHMS)}"
        )
    used = spec.inner or (spec.algorithm,)
    if lacking := [name for name in used if not supports(name, spec.collective)]:
        raise ScheduleError(
            f"{spec}: {', '.join(lacking)} cannot do {spec.collective}; "
            f"these can: {', '.join(names(spec.collective))}"
        )
    return hierarchy(spec.levels, [ALGORITHMS[name] for name in used])


# --- the tables -----------------------------------------------------------------------------------

_MAKERS: dict[Collective, Callable[[Algorithm, Spec], tuple[int, list[Steps]]]] = {
    "all_reduce": _reduced,
    "reduce_scatter": _scattered,
    "all_gather": _gathered,
    "broadcast": _spread,
    "reduce": _collected,
    "all_to_all": _exchanged,
}


def _tree(edges: Callable[[int], trees.Edges]) -> Algorithm:
    return Algorithm(
        "root",
        all_gather=lambda ranks, parts: trees.tree_all_gather(ranks, parts, edges(len(ranks))),
        broadcast=lambda ranks, chunks: trees.spread(ranks, chunks, edges(len(ranks))),
        own_reduce_scatter=lambda ranks, parts: trees.tree_reduce_scatter(
            ranks, parts, edges(len(ranks))
        ),
    )


_DIRECT = Algorithm(
    "parts",
    moves.direct_all_gather,
    trees.direct_broadcast,
    all_to_all=moves.direct_all_to_all,
    reduce_unit=each,
    spread_unit=each,
)

ALGORITHMS: dict[str, Algorithm] = {
    "parameter_server": _tree(
        trees.star
    ),  # one master: sums, sends back; its port carries (N-1)S each way
    "sharded_server": _DIRECT,  # every rank the master of one part: the same transfers as two_shot
    "ring": Algorithm(
        "parts",
        moves.ring_all_gather,
        lambda ranks, chunks: trees.spread(ranks, chunks, trees.chain(len(ranks))),
        moves.ring_reduce_scatter,
        all_to_all=moves.pairwise_all_to_all,
        slices=moves.in_turns,
        reduce_unit=each,
    ),
    "tree": _tree(trees.binary_tree),
    "binomial": _tree(trees.binomial_tree),
    "double_tree": Algorithm(
        "root",
        trees.twin_all_gather,
        trees.twin_broadcast,
        trees.twin_reduce_scatter,
        own_all_reduce=trees.twin_all_reduce,
        reduce_unit=lambda n: 2,
        spread_unit=lambda n: 2,
        gather_unit=2,
    ),
    "halving_doubling": Algorithm(
        "parts",
        moves.doubling_all_gather,
        trees.doubling_broadcast,
        own_all_reduce=moves.rabenseifner,
        reduce_unit=lambda n: 1 << n.bit_length() - 1,
        spread_unit=each,
    ),
    "recursive_doubling": Algorithm(
        "all",
        moves.bruck_all_gather,
        lambda ranks, chunks: trees.spread(ranks, chunks, trees.binomial_tree(len(ranks))),
        own_all_reduce=moves.doubling_all_reduce,
        all_to_all=moves.bruck_all_to_all,
    ),
    "one_shot": Algorithm(
        "all",
        moves.direct_all_gather,
        lambda ranks, chunks: trees.spread(ranks, chunks, trees.star(len(ranks))),
        own_all_reduce=moves.exchange,
        all_to_all=moves.direct_all_to_all,
    ),
    "two_shot": _DIRECT,
}
