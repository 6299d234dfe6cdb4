"""Recompute: activations that are computed again in the backward, and so need not be kept.

    segment   a run of operators; forward it keeps what enters it, backward it runs again first

Many short segments keep much of what enters them, a few long ones need much while they run again. The
best are short of neither: from all lengths that double, the one for which both together are least. A
segment begins where little is alive, so between the layers of a model and not in the middle of one.

Halves of a backward (passes/late.py) hold on to operators by themselves: there a stage is one segment.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from plait.plan.stages import Again, Line

FORWARD = 1 / 3  # of an operator's seconds, forward and backward: the part that runs twice


def recomputed(line: Line, at_once: float | None = None) -> Line:
    """The same where every operator runs again in the backward.

    `at_once`: micro-batches whose second half of a backward is still to come; None: in one piece.
    """
    items = tuple(replace(item, seconds=item.seconds * (1 + FORWARD)) for item in line.items)
    entering = float(line.live.max())
    if at_once is not None:
        return replace(line, items=items, again=Again(entering=entering, at_once=at_once))
    starts = segments(line)
    return replace(line, items=items, again=Again(starts, entering, _longest(line, starts)))


def segments(line: Line) -> tuple[int, ...]:
    """The positions at which segments begin, but the first, so that least is held at once."""
    best: tuple[int, ...] = ()
    least = _longest(line, best)
    parts = 2
    while parts <= len(line.items):
        starts = _even(line, float(line.kept[-1]) / parts)
        held = float(line.live[list(starts)].sum()) + _longest(line, starts)
        if held < least:
            best, least = starts, held
        parts *= 2
    return best


def _even(line: Line, length: float) -> tuple[int, ...]:
    """Each segment keeps from one to two `length` bytes, and begins where least is alive."""
    kept, starts, here = line.kept, list[int](), 0.0
    while length > 0:
        first, last = np.searchsorted(kept, [here + length, here + 2 * length])
        near = [p for p in range(first, min(int(last), len(line.items) - 1) + 1) if line.legal[p]]
        near = [p for p in near if kept[-1] - kept[p] >= length / 2]
        if not near:
            break
        starts.append(min(near, key=lambda p: line.live[p]))
        here = float(kept[starts[-1]])
    return tuple(starts)


def _longest(line: Line, starts: tuple[int, ...]) -> float:
    """Bytes that the operators of one segment keep, at most."""
    return float(np.diff(line.kept[[0, *starts, len(line.items)]]).max())
