"""The algorithms: pure functions from ranks and chunks to steps of transfers.

Three moves make everything else:

    all_gather(ranks, parts)         member i owns part i; afterwards every member holds every part
    broadcast(ranks, pieces)         member 0 holds the pieces; afterwards every member does
    all_to_all(ranks, blocks)        blocks[i][j] goes from member i to member j

Played backwards, with sums in place of copies, the first is a reduce-scatter and the second a reduce
(`mirror`): every copy that reaches a member once becomes an addition that leaves it once. An all-reduce is
a reduce-scatter and an all-gather, or a reduce and a broadcast. A piece is the tuple of chunks that one
transfer carries, a part the sequence of pieces that follow each other through a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from plait.collectives.schedule import Collective, Schedule, Spec, Transfer
from plait.errors import ScheduleError

Ranks = Sequence[int]
Piece = tuple[int, ...]
Part = tuple[Piece, ...]
Steps = list[list[Transfer]]


# --- combining steps ---------------------------------------------------------------------------


def move(source: int, target: int, chunks: Iterable[int]) -> list[Transfer]:
    return [Transfer(source, target, chunk, "copy") for chunk in chunks]


def mirror(steps: Steps) -> Steps:
    """The same transfers backwards in time and direction, each copy an addition."""
    return [[Transfer(t.target, t.source, t.chunk, "add") for t in step] for step in reversed(steps)]


def together(*tracks: Steps, lag: int = 0) -> Steps:
    """Tracks side by side, each `lag` steps behind the one before."""
    length = max((len(track) + i * lag for i, track in enumerate(tracks)), default=0)
    merged: Steps = [[] for _ in range(length)]
    for i, track in enumerate(tracks):
        for at, step in enumerate(track, start=i * lag):
            merged[at].extend(step)
    return merged


def chunks_of(part: Part) -> Piece:
    return tuple(chunk for piece in part for chunk in piece)


# --- all_gather: member i owns part i ----------------------------------------------------------


def ring_all_gather(ranks: Ranks, parts: Sequence[Part]) -> Steps:
    """Round t: member i passes part i - t to its right neighbour, piece by piece."""
    n = len(ranks)
    return [
        [t for i in range(n) for t in move(ranks[i], ranks[(i + 1) % n], parts[(i - turn) % n][j])]
        for turn in range(n - 1)
        for j in range(len(parts[0]))
    ]


def direct_all_gather(ranks: Ranks, parts: Sequence[Part]) -> Steps:
    """One step: every member sends its part to every other."""
    return [
        [
            t
            for i, source in enumerate(ranks)
            for target in ranks
            if source != target
            for t in move(source, target, chunks_of(parts[i]))
        ]
    ]


# --- the table ---------------------------------------------------------------------------------


def _one_shot_all_reduce(ranks: Ranks, part: Part) -> Steps:
    """One step: every member sends the whole vector to every other, which sums it."""
    return [
        [
            Transfer(source, target, chunk, "add")
            for source in ranks
            for target in ranks
            if source != target
            for chunk in chunks_of(part)
        ]
    ]


def _ring_all_reduce(ranks: Ranks, parts: Sequence[Part]) -> Steps:
    back = [part[::-1] for part in reversed(parts)]
    return mirror(ring_all_gather(ranks[::-1], back)) + ring_all_gather(ranks, parts)


@lru_cache(maxsize=256)
def build(spec: Spec | str) -> Schedule:
    """The schedule that a spelling or a `Spec` names."""
    if isinstance(spec, str):
        return build(Spec.parse(spec))
    n, k = spec.n, spec.pieces
    ranks = range(n)
    if spec.collective != "all_reduce":
        raise ScheduleError(f"{spec}: to come")
    if spec.algorithm == "ring":
        parts = [tuple((i * k + j,) for j in range(k)) for i in ranks]
        chunks, steps = n * k, _ring_all_reduce(ranks, parts)
    elif spec.algorithm == "one_shot":
        chunks, steps = 1, _one_shot_all_reduce(ranks, ((0,),))
    else:
        raise ScheduleError(f"{spec}: to come")
    kept = tuple(tuple(step) for step in steps if step)
    return Schedule(spec.collective, n, chunks, kept, spec.root, spec)


parse = build
