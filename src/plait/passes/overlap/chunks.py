"""Chunks: one factor cut in time, in the same algebra as a split in space.

    rows 4      four contiguous runs of rows, as equal as they come
    rows 4/0.5  four runs, each 0.5 of the one before: the last transfer, which nothing hides, is short
    parts 4     run k of every rank's own rows: a gather or reduce-scatter of each, all ranks alike
    blocks      the ranks' own rows, each rank beginning with its own: peers' rows are fetched one by one

A form is the line above; `Chunks` is the form applied to a factor on one rank. It answers the
questions of a `Split` (how many rows of a dim, which) with chunks in the place of ranks, so that
`Access.local` writes the arguments of an operator for one chunk as it does for one rank.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from plait.errors import ScheduleError
from plait.rules.equation import Factor, Ranges
from plait.rules.split import Split


@dataclass(frozen=True)
class Form:
    """How a region is cut: `kind` is whole, rows, parts or blocks."""

    kind: str = "whole"
    count: int = 1
    ratio: float = 1.0  # rows: of a chunk to the one before

    def __str__(self) -> str:
        if self.kind in ("whole", "blocks"):
            return self.kind
        return f"{self.kind} {self.count}" + (f"/{self.ratio:g}" if self.ratio != 1 else "")

    @classmethod
    def parse(cls, text: str) -> Form:
        found = re.fullmatch(r"(whole|blocks)|(rows|parts) ([1-9]\d*)(?:/(\d+(?:\.\d+)?))?", text)
        if found is None:
            raise ScheduleError(f"{text!r} is no form of chunks; one reads like whole, blocks, rows 4 or parts 2/1.5")
        alone, kind, count, ratio = found.groups()
        return cls(alone) if alone else cls(kind, int(count), float(ratio or 1))


WHOLE = Form()


@dataclass(frozen=True)
class Chunks(Split):
    """`rows[i]`: what chunk i holds of the factor's index."""

    rows: tuple[Ranges, ...] = ()

    @property
    def ranks(self) -> int:
        return len(self.rows)

    def _share(self, count: int, rank: int) -> tuple[Ranges, int]:
        return self.rows[rank], self.factors[0].size


def cut(f: Factor, form: Form, ranks: Sequence[Ranges], rank: int) -> Chunks:
    """The chunks of `f` on `rank`; `ranks`: the rows of every rank where its rows are cut in space."""
    match form.kind:
        case "rows":
            rows = tuple(runs(f.size, form.count, form.ratio))
        case "parts":
            pieces = [[_pick(own, *run) for run in spans(_count(own), form.count)] for own in ranks]
            rows = tuple(_merged([piece[k] for piece in pieces]) for k in range(form.count))
        case "blocks":
            n = len(ranks)
            rows = tuple(ranks[(rank + step) % n] for step in range(n))
        case _:
            rows = (((0, f.size),),)
    return Chunks((f,), (), rows=rows)


def runs(size: int, count: int, ratio: float = 1.0) -> list[Ranges]:
    return [((lo, hi),) if hi > lo else () for lo, hi in spans(size, count, ratio)]


def spans(size: int, count: int, ratio: float = 1.0) -> list[tuple[int, int]]:
    """`count` contiguous spans of `size` rows, none empty if there are enough, the larger first."""
    if ratio == 1.0:
        sizes = [size // count + (i < size % count) for i in range(count)]
    else:
        weights = [ratio**i for i in range(count)]
        sizes = [max(min(1, size // count), int(size * w / sum(weights))) for w in weights]
        sizes[0] += size - sum(sizes)
    bounds = [0]
    for s in sizes:
        bounds.append(bounds[-1] + s)
    return list(pairwise(bounds))


def _pick(own: Ranges, lo: int, hi: int) -> Ranges:
    """Rows number `lo` to `hi` among `own`."""
    out, at = [], 0
    for begin, end in own:
        a, b = max(begin, begin + lo - at), min(end, begin + hi - at)
        if a < b:
            out.append((a, b))
        at += end - begin
    return tuple(out)


def _merged(parts: Sequence[Ranges]) -> Ranges:
    return tuple(run for part in parts for run in part)


def _count(ranges: Ranges) -> int:
    return sum(hi - lo for lo, hi in ranges)


def covered(chunks: Chunks) -> bool:
    """Every row is in exactly one chunk."""
    seen = sorted(run for rows in chunks.rows for run in rows)
    ends = [0, *(hi for _, hi in seen)]
    return [lo for lo, _ in seen] == ends[:-1] and ends[-1] == prod(f.size for f in chunks.factors)
