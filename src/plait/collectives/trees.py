"""The moves of algorithms with a root: a broadcast down a tree, or by a scatter and an all-gather.

    broadcast(ranks, chunks)       member 0 holds the chunks; afterwards every member does

Its mirror is a reduce. A tree is a list of edges (parent, child, time) between members, of which
`spread` makes a broadcast and `tree_all_gather` an all-gather.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.collectives.moves import (
    Chunks,
    Ranks,
    Steps,
    bits,
    direct_all_gather,
    doubling_all_gather,
    joined,
    mirror,
    move,
    split,
    together,
    turned,
)

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
      1   5           floor(log2 n) levels; a root without right child when n is a power of two
     0 2 4 6
    """
    edges: list[tuple[int, int, int]] = []

    def grow(low: int, size: int, depth: int) -> int:
        root = low + (1 << size.bit_length() - 1) - 1
        for start, count in ((low, root - low), (root + 1, low + size - root - 1)):
            if count:
                edges.append((root, grow(start, count, depth + 1), depth))
        return root

    if n > 1:
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


def tree_reduce_scatter(ranks: Ranks, parts: Sequence[Chunks], edges: Edges) -> Steps:
    """All sums up the tree, then down the tree what each subtree owns: every part is added up in
    the same order, which the mirror of the all-gather, with fewer bytes, would not do."""
    up = mirror(spread(ranks, joined(parts), edges))
    gather = tree_all_gather(ranks, parts, edges)[: len(up)]
    return up + turned(gather)


def twin_broadcast(ranks: Ranks, chunks: Chunks) -> Steps:
    """Member 0 sends one half of the chunks into each of two trees over the others."""
    others = ranks[1:]
    tracks = []
    for half, edges in zip(split(chunks, 2), twin_trees(len(others)), strict=True):
        root = others[_root(edges)] if others else ranks[0]
        tracks.append([move(ranks[0], root, half), *spread(others, half, edges)] if others else [])
    return together(*tracks)


def twin_all_reduce(ranks: Ranks, chunks: Chunks) -> Steps:
    """One half of the chunks up and down each tree."""
    halves = zip(split(chunks, 2), twin_trees(len(ranks)), strict=True)
    down = [spread(ranks, half, edges) for half, edges in halves]
    return together(*(mirror(track) + track for track in down))


def twin_reduce_scatter(ranks: Ranks, parts: Sequence[Chunks]) -> Steps:
    """One half of every part up and down each tree."""
    halves = [split(part, 2) for part in parts]
    return together(
        *(
            tree_reduce_scatter(ranks, [half[i] for half in halves], edges)
            for i, edges in enumerate(twin_trees(len(ranks)))
        )
    )


def twin_all_gather(ranks: Ranks, parts: Sequence[Chunks]) -> Steps:
    """One half of every part up and down each tree."""
    halves = [split(part, 2) for part in parts]
    return together(
        *(
            tree_all_gather(ranks, [half[i] for half in halves], edges)
            for i, edges in enumerate(twin_trees(len(ranks)))
        )
    )


def _height(edges: Edges) -> int:
    return max((time + 1 for _, _, time in edges), default=0)


def _root(edges: Edges) -> int:
    """The member that is nobody's child; 0 for a tree of one."""
    children = {child for _, child, _ in edges}
    return next((parent for parent, _, _ in edges if parent not in children), 0)


# --- broadcast by scatter and all_gather ----------------------------------------------------------


def scatter(ranks: Ranks, parts: Sequence[Chunks]) -> Steps:
    """Binomial: whoever holds parts [low, high) passes the upper half on."""
    steps: Steps = [[] for _ in bits(len(ranks))]

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
        lacking = [
            (m, tuple(c for c in m.chunks if (m.target, c) not in held)) for m in step
        ]
        kept.append([m._replace(chunks=chunks) for m, chunks in lacking if chunks])
        held |= {(m.target, c) for m in step for c in m.chunks}
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
