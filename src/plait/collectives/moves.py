"""The moves that algorithms are made of: pure functions from members and chunks to steps of transfers.

Three moves make everything else:

    all_gather(ranks, parts)         member i owns part i; afterwards every member holds every part
    broadcast(ranks, chunks)         member 0 holds the chunks; afterwards every member does
    all_to_all(ranks, blocks)        blocks[i][j] goes from member i to member j

Played backwards with additions in place of copies, the first is a reduce-scatter and the second a reduce
(`mirror`): a chunk that reaches every member once becomes a sum that every member enters once. An all-reduce
is a reduce-scatter and an all-gather, or a reduce and a broadcast, or its own function. A part is a tuple of chunks.
Pieces (`ring[8]/4`) are slices of the vector that follow each other through the same steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from plait.collectives.schedule import Transfer

Ranks = Sequence[int]
Chunks = tuple[int, ...]
Steps = list[list[Transfer]]


# --- combining steps -------------------------------------------------------------------------------


def move(source: int, target: int, chunks: Iterable[int]) -> list[Transfer]:
    return [Transfer(source, target, chunk, "copy") for chunk in chunks]


def mirror(steps: Steps) -> Steps:
    """The same transfers backwards in time and direction, each copy an addition."""
    return [[Transfer(t.target, t.source, t.chunk, "add") for t in step] for step in steps[::-1]]


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


# --- all_gather: member i owns part i --------------------------------------------------------------


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
    for bit in _bits(len(core)):
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
    """Any n in ceil(log2 n) steps: member i passes the first parts it has, from i on, to i - 2^b."""
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
        for bit in _bits(n)
    ]


# --- trees: edges (parent, child, time) between members --------------------------------------------

Edges = Sequence[tuple[int, int, int]]


def star(n: int) -> Edges:
    return [(0, child, 0) for child in range(1, n)]


def chain(n: int) -> Edges:
    return [(child - 1, child, child - 1) for child in range(1, n)]


def binary_tree(n: int) -> Edges:
    """Heap order: the children of i are 2i + 1 and 2i + 2; floor(log2 n) levels."""
    return [((child - 1) // 2, child, (child + 1).bit_length() - 2) for child in range(1, n)]


def binomial_tree(n: int) -> Edges:
    """At time t every member below 2^t sends to the one 2^t further on; ceil(log2 n) times."""
    return [(child ^ 1 << (t := child.bit_length() - 1), child, t) for child in range(1, n)]


def in_order_tree(n: int) -> Edges:
    """A binary tree whose interior members are odd: an in-order walk meets 0, 1, 2, ..., so that
    every left subtree has 2^k - 1 members and every leaf is even.

            3
          1   5           floor(log2 n) levels; the root has only a left child when n is a power of two
         0 2 4 6
    """
    edges: list[tuple[int, int, int]] = []

    def grow(low: int, size: int, depth: int) -> int:
        root = low + (1 << size.bit_length() - 1) - 1
        for start, count in ((low, root - low), (root + 1, low + size - root - 1)):
            if count:
                edges.append((root, grow(start, count, depth + 1), depth))
        return root

    grow(0, n, 0)
    return edges


def twin_trees(n: int) -> tuple[Edges, Edges]:
    """Two trees such that every member is interior in at most one (Sanders, Speck, Träff 2009).

    The second is the first with members renamed so that odd becomes even: reversed when n is even,
    shifted by one when n is odd.
    """
    first = in_order_tree(n)
    if n % 2:
        return first, [((a + 1) % n, (b + 1) % n, time) for a, b, time in first]
    return first, [(n - 1 - a, n - 1 - b, time) for a, b, time in first]


def spread(ranks: Ranks, chunks: Chunks, edges: Edges) -> Steps:
    """The chunks from the root down the tree."""
    steps: Steps = [[] for _ in range(_height(edges))]
    for parent, child, time in edges:
        steps[time] += move(ranks[parent], ranks[child], chunks)
    return steps


def tree_all_gather(ranks: Ranks, parts: Sequence[Chunks], edges: Edges) -> Steps:
    """Up the tree what each subtree owns, down the tree what it lacks."""
    height = _height(edges)
    below = {i: {i} for i in range(len(ranks))}
    steps: Steps = [[] for _ in range(2 * height)]
    for parent, child, time in sorted(edges, key=lambda edge: -edge[2]):
        below[parent] |= below[child]
        owned = [parts[i] for i in sorted(below[child])]
        steps[height - 1 - time] += move(ranks[child], ranks[parent], joined(owned))
    for parent, child, time in edges:
        lacking = [part for i, part in enumerate(parts) if i not in below[child]]
        steps[height + time] += move(ranks[parent], ranks[child], joined(lacking))
    return steps


def twin_broadcast(ranks: Ranks, chunks: Chunks) -> Steps:
    """Member 0 sends one half of the chunks into each of two trees over the others."""
    others = ranks[1:]
    tracks = []
    for half, edges in zip(split(chunks, 2), twin_trees(len(others)), strict=True):
        root = others[_root(edges)] if others else ranks[0]
        tracks.append([move(ranks[0], root, half)] + spread(others, half, edges) if others else [])
    return together(*tracks)


def twin_all_reduce(ranks: Ranks, chunks: Chunks) -> Steps:
    """One half of the chunks up and down each tree."""
    halves = zip(split(chunks, 2), twin_trees(len(ranks)), strict=True)
    down = [spread(ranks, half, edges) for half, edges in halves]
    return together(*(mirror(track) + track for track in down))


def twin_all_gather(ranks: Ranks, parts: Sequence[Chunks]) -> Steps:
    """One half of every part up and down each tree."""
    halves = [split(part, 2) for part in parts]
    return together(
        *(
            tree_all_gather(ranks, [half[i] for half in halves], edges)
            for i, edges in enumerate(twin_trees(len(ranks)))
        )
    )


# --- broadcast by scatter and all_gather -----------------------------------------------------------


def scatter(ranks: Ranks, parts: Sequence[Chunks]) -> Steps:
    """Binomial: whoever holds parts [low, high) passes the upper half on."""
    steps: Steps = [[] for _ in _bits(len(ranks))]

    def halve(low: int, high: int, time: int) -> None:
        if high - low > 1:
            middle = low + (1 << (high - low - 1).bit_length() - 1)
            steps[time] += move(ranks[low], ranks[middle], joined(parts[middle:high]))
            halve(low, middle, time + 1)
            halve(middle, high, time + 1)

    halve(0, len(ranks), 0)
    return steps


def without_repeats(steps: Steps, root: int, chunks: Chunks) -> Steps:
    """Without the copies of what the target already holds."""
    held = {(root, chunk) for chunk in chunks}
    kept: Steps = []
    for step in steps:
        kept.append([t for t in step if (t.target, t.chunk) not in held])
        held |= {(t.target, t.chunk) for t in step}
    return kept


def direct_broadcast(ranks: Ranks, chunks: Chunks) -> Steps:
    """Member 0 sends each member its part, each member passes its part to the others."""
    parts = split(chunks, len(ranks))
    first = [
        [
            t
            for rank, part in zip(ranks[1:], parts[1:], strict=True)
            for t in move(ranks[0], rank, part)
        ]
    ]
    return without_repeats(first + direct_all_gather(ranks, parts), ranks[0], chunks)


def doubling_broadcast(ranks: Ranks, chunks: Chunks) -> Steps:
    parts = split(chunks, len(ranks))
    steps = scatter(ranks, parts) + doubling_all_gather(ranks, parts)
    return without_repeats(steps, ranks[0], chunks)


# --- all_reduce that is no pair of the above -------------------------------------------------------


def exchange(ranks: Ranks, chunks: Chunks) -> Steps:
    """One step: every member sends all chunks to every other, and each sums for itself."""
    return [[Transfer(a, b, c, "add") for a in ranks for b in ranks if a != b for c in chunks]]


def doubling_all_reduce(ranks: Ranks, chunks: Chunks) -> Steps:
    """Members whose numbers differ in bit b exchange and add their sums; log2 n steps."""
    core, fold = _fold(ranks, chunks)
    steps = [
        [Transfer(rank, core[i ^ bit], c, "add") for i, rank in enumerate(core) for c in chunks]
        for bit in _bits(len(core))
    ]
    return fold + steps + mirror_copies(fold)


def rabenseifner(ranks: Ranks, chunks: Chunks) -> Steps:
    """Recursive halving, then recursive doubling, on the largest power of two of the members."""
    core, fold = _fold(ranks, chunks)
    gather = doubling_all_gather(core, split(chunks, len(core)))
    return fold + mirror(gather) + gather + mirror_copies(fold)


def mirror_copies(fold: Steps) -> Steps:
    return [[Transfer(t.target, t.source, t.chunk, "copy") for t in step] for step in fold]


def _fold(ranks: Ranks, chunks: Chunks) -> tuple[list[int], Steps]:
    """The members that remain when the even one of each folded pair has given its vector away."""
    core, folded = _core(len(ranks))
    given = [
        Transfer(ranks[even], ranks[odd], c, "add") for odd, even in folded.items() for c in chunks
    ]
    return [ranks[c] for c in core], [given]


def _core(n: int) -> tuple[list[int], dict[int, int]]:
    """A power of two of n members, and {odd: even} of the pairs that were folded to reach it."""
    extra = n - (1 << n.bit_length() - 1)
    folded = {2 * i + 1: 2 * i for i in range(extra)}
    return [*folded, *range(2 * extra, n)], folded


def _bits(n: int) -> list[int]:
    """1, 2, 4, ... below n."""
    return [1 << b for b in range((n - 1).bit_length())]


def _height(edges: Edges) -> int:
    return max((time + 1 for _, _, time in edges), default=0)


def _root(edges: Edges) -> int:
    """The member that is nobody's child; 0 for a tree of one."""
    children = {child for _, child, _ in edges}
    return next((parent for parent, _, _ in edges if parent not in children), 0)


# --- all_to_all: blocks[i][j] from member i to member j --------------------------------------------

Blocks = Sequence[Sequence[Chunks]]


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
    """ceil(log2 n) steps: a block that must travel d members moves 2^b of them at step b, if d has bit b."""
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
        for bit in _bits(n)
    ]
