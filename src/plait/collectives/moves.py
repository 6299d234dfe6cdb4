"""The moves of algorithms without a tree: pure functions from members and chunks to steps.

    all_gather(ranks, parts)       member i owns part i; afterwards every member holds every part
    all_reduce(ranks, chunks)      afterwards every member holds the sum
    all_to_all(ranks, blocks)      blocks[i][j] goes from member i to member j

A part, or block, is a tuple of chunks. A `Move` takes several of them at once.

Played backwards with additions in place of copies (`mirror`) an all-gather is a reduce-scatter: a
chunk that reaches every member once becomes a sum that every member enters once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from plait.collectives.schedule import Op

T = TypeVar("T")
Ranks = Sequence[int]
Chunks = tuple[int, ...]
Blocks = Sequence[Sequence[Chunks]]


class Move(NamedTuple):
    """Chunks on their way between two ranks in one step, all of them copied or all added."""

    source: int
    target: int
    chunks: Chunks
    op: Op


Steps = list[list[Move]]


# --- combining steps ------------------------------------------------------------------------------


def move(source: int, target: int, chunks: Chunks) -> list[Move]:
    return [Move(source, target, chunks, "copy")] if chunks else []


def mirror(steps: Steps) -> Steps:
    """The same moves backwards in time and direction, each copy an addition."""
    return [[Move(m.target, m.source, m.chunks, "add") for m in step] for step in steps[::-1]]


def turned(steps: Steps) -> Steps:
    """The same moves backwards in time and direction, all copies."""
    return [[Move(m.target, m.source, m.chunks, "copy") for m in step] for step in steps[::-1]]


def together(*tracks: Steps, lag: int = 0) -> Steps:
    """Tracks side by side, each `lag` steps behind the one before."""
    length = max((len(track) + i * lag for i, track in enumerate(tracks)), default=0)
    merged: Steps = [[] for _ in range(length)]
    for i, track in enumerate(tracks):
        for at, step in enumerate(track, start=i * lag):
            merged[at].extend(step)
    return merged


def staggered(*slices: Steps) -> Steps:
    """Slice j does at step s what slice 0 did at step s - j."""
    return together(*slices, lag=1)


def in_turns(*slices: Steps) -> Steps:
    """Every slice's first step, one after the other, then every slice's second, ..."""
    return [step for turn in zip(*slices, strict=True) for step in turn]


def split(chunks: Chunks, count: int) -> list[Chunks]:
    """`count` equal runs of chunks."""
    assert len(chunks) % count == 0, (chunks, count)
    size = len(chunks) // count
    return [chunks[i * size : (i + 1) * size] for i in range(count)]


def joined(parts: Iterable[Chunks]) -> Chunks:
    return tuple(chunk for part in parts for chunk in part)


# --- all_gather: member i owns part i -------------------------------------------------------------


def ring_all_gather(ranks: Ranks, parts: Sequence[Chunks]) -> Steps:
    """Turn t: member i passes part i - t to its right neighbour.

    turn 0    0 -p0-> 1 -p1-> 2 -p2-> 3 -p3-> 0
    turn 1    0 -p3-> 1 -p0-> 2 -p1-> 3 -p2-> 0
    """
    n = len(ranks)
    return [
        [t for i in range(n) for t in move(ranks[i], ranks[(i + 1) % n], parts[(i - turn) % n])]
        for turn in range(n - 1)
    ]


def ring_reduce_scatter(ranks: Ranks, parts: Sequence[Chunks]) -> Steps:
    """The mirror of a ring that turns left, so that both phases use the same links."""
    return mirror(ring_all_gather(ranks[::-1], parts[::-1]))


def direct_all_gather(ranks: Ranks, parts: Sequence[Chunks]) -> Steps:
    """One step: every member sends its part to every other."""
    return [
        [
            t
            for a, part in zip(ranks, parts, strict=True)
            for b in ranks
            if a != b
            for t in move(a, b, part)
        ]
    ]


def doubling_all_gather(ranks: Ranks, parts: Sequence[Chunks]) -> Steps:
    """Recursive doubling: members whose numbers differ in bit b exchange all they have.

    When n is no power of two, the first pairs count as one member, the odd one, who is given the
    even one's part before and gives it everything after.
    """
    core, folded = _core(len(ranks))
    held = [(parts[c],) if c not in folded else (parts[folded[c]], parts[c]) for c in core]
    before = [t for odd, even in folded.items() for t in move(ranks[even], ranks[odd], parts[even])]
    steps = [before]
    for bit in bits(len(core)):
        block = [range(i & -bit, (i & -bit) + bit) for i in range(len(core))]
        steps.append([
            t
            for i, c in enumerate(core)
            for t in move(ranks[c], ranks[core[i ^ bit]], joined(joined(held[j]) for j in block[i]))
        ])  # fmt: skip
    steps.append([
        t
        for odd, even in folded.items()
        for t in move(ranks[odd], ranks[even], joined(p for j, p in enumerate(parts) if j != even))
    ])  # fmt: skip
    return steps


def bruck_all_gather(ranks: Ranks, parts: Sequence[Chunks]) -> Steps:
    """Any n, ceil(log2 n) steps: member i passes the first parts it has, from i on, to i - 2^b."""
    n = len(ranks)
    return [
        [
            t
            for i in range(n)
            for t in move(
                ranks[i],
                ranks[(i - bit) % n],
                joined(parts[(i + j) % n] for j in range(min(bit, n - bit))),
            )
        ]
        for bit in bits(n)
    ]


# --- all_reduce -----------------------------------------------------------------------------------


def exchange(ranks: Ranks, chunks: Chunks) -> Steps:
    """One step: every member sends all chunks to every other, and each sums for itself."""
    return [[Move(a, b, chunks, "add") for a in ranks for b in ranks if a != b]]


def doubling_all_reduce(ranks: Ranks, chunks: Chunks) -> Steps:
    """Members whose numbers differ in bit b exchange and add their sums; log2 n steps."""
    core, fold = _fold(ranks, chunks)
    steps = [
        [Move(rank, core[i ^ bit], chunks, "add") for i, rank in enumerate(core)]
        for bit in bits(len(core))
    ]
    return fold + steps + turned(fold)


def rabenseifner(ranks: Ranks, chunks: Chunks) -> Steps:
    """Recursive halving, then recursive doubling, on the largest power of two of the members."""
    core, fold = _fold(ranks, chunks)
    gather = doubling_all_gather(core, split(chunks, len(core)))
    return fold + mirror(gather) + gather + turned(fold)


def _fold(ranks: Ranks, chunks: Chunks) -> tuple[list[int], Steps]:
    """The members that remain when the even one of each folded pair has given its vector away."""
    core, folded = _core(len(ranks))
    given = [Move(ranks[even], ranks[odd], chunks, "add") for odd, even in folded.items()]
    return [ranks[c] for c in core], [given]


# --- all_to_all: blocks[i][j] from member i to member j -------------------------------------------


def direct_all_to_all(ranks: Ranks, blocks: Blocks) -> Steps:
    """One step: every block straight to its member."""
    return [[t for step in pairwise_all_to_all(ranks, blocks) for t in step]]


def pairwise_all_to_all(ranks: Ranks, blocks: Blocks) -> Steps:
    """Turn t: member i sends to member i + t."""
    n = len(ranks)
    return [
        [
            t
            for i in range(n)
            for t in move(ranks[i], ranks[(i + turn) % n], blocks[i][(i + turn) % n])
        ]
        for turn in range(1, n)
    ]


def bruck_all_to_all(ranks: Ranks, blocks: Blocks) -> Steps:
    """ceil(log2 n) steps: a block with d members to go moves 2^b on at step b, if d has bit b."""
    n = len(ranks)
    return [
        [
            t
            for i in range(n)
            for way in range(n)
            if way & bit
            for t in move(
                ranks[(i + (way & bit - 1)) % n],
                ranks[(i + (way & 2 * bit - 1)) % n],
                blocks[i][(i + way) % n],
            )
        ]
        for bit in bits(n)
    ]


# --- powers of two --------------------------------------------------------------------------------


def _core(n: int) -> tuple[list[int], dict[int, int]]:
    """A power of two of n members, and {odd: even} of the pairs that were folded to reach it."""
    extra = n - (1 << n.bit_length() - 1)
    folded = {2 * i + 1: 2 * i for i in range(extra)}
    return [*folded, *range(2 * extra, n)], folded


def bits(n: int) -> list[int]:
    """1, 2, 4, ... below n."""
    return [1 << b for b in range((n - 1).bit_length())]
