"""A collective's schedule, as data: steps of transfers, with one line that spells it.

    ring[4]            step 0    0 -> 1  chunk 3  add      every rank sends one chunk to the next,
                                 1 -> 2  chunk 0  add      which adds it to its own
                                 ...

The buffer is cut into `chunks`. A `Transfer` moves one chunk from one rank to another, where it
replaces (`copy`) or is added to (`add`) what lies there. All transfers of a step read what their
sources held before the step. Additions into one chunk in one step are one sum: the operands, the
target's own among them, in ascending order of rank, added in fp32 and rounded once to the dtype on
the wire.

Steps are each rank's order of issue, not barriers: a transfer may start as soon as what it reads is
there. That is how pieces pipeline: in `ring[4]/2` the second piece of a chunk is on the wire while
the first is added.

Everything else is a reader of this data: proof (check.py), bytes (ledger.py), execution (run.py),
price and simulation (plait.cost, plait.cost.simulator).

Spelling:  [collective] algorithm[ranks]/pieces@root, the collective all_reduce unless said:

    ring[8]/4      all_gather ring[8]      broadcast tree[6]/16@2      hierarchical[2x8: ring, tree]
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import Literal, NamedTuple, cast, get_args

from plait.errors import ScheduleError

Collective = Literal[
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all"
]
Op = Literal["copy", "add"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)


class Transfer(NamedTuple):
    source: int
    target: int
    chunk: int
    op: Op

    def __str__(self) -> str:
        return f"{self.source} -> {self.target} chunk {self.chunk} {self.op}"


Step = tuple[Transfer, ...]


class Message(NamedTuple):
    """The transfers of one step between two ranks with one op: one send, one receive, one alpha."""

    step: int
    source: int
    target: int
    op: Op
    chunks: tuple[int, ...]

    def __str__(self) -> str:
        which = "chunk" if len(self.chunks) == 1 else "chunks"
        names = ",".join(map(str, self.chunks))
        return f"step {self.step}: {self.source} -> {self.target} {which} {names} {self.op}"


@dataclass(frozen=True)
class Spec:
    """What a spelling says: which algorithm for which collective on how many ranks."""

    algorithm: str
    levels: tuple[int, ...]  # outermost first; rank = (outer index) * inner size + inner index
    collective: Collective = "all_reduce"
    inner: tuple[str, ...] = ()  # hierarchical: the algorithm of each level, in the order of levels
    pieces: int = 1
    root: int = 0

    @property
    def n(self) -> int:
        product = 1
        for size in self.levels:
            product *= size
        return product

    def __str__(self) -> str:
        prefix = "" if self.collective == "all_reduce" else f"{self.collective} "
        ranks = "x".join(map(str, self.levels)) + (f": {', '.join(self.inner)}" * bool(self.inner))
        pieces = f"/{self.pieces}" if self.pieces > 1 else ""
        root = f"@{self.root}" if self.root else ""
        return f"{prefix}{self.algorithm}[{ranks}]{pieces}{root}"

    @staticmethod
    def parse(text: str) -> Spec:
        match = _SPELLING.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None:
            raise ScheduleError(
                f"{text!r} does not spell a schedule; one reads "
                "[collective] algorithm[ranks]/pieces@root, for example ring[8]/4, "
                "broadcast tree[6]@2 or hierarchical[2x8: ring, tree]"
            )
        inner = tuple(word.strip() for word in (match["inner"] or "").split(",") if word.strip())
        return Spec(
            algorithm=match["algorithm"],
            levels=tuple(map(int, match["levels"].split("x"))),
            collective=cast(Collective, match["collective"] or "all_reduce"),
            inner=inner,
            pieces=int(match["pieces"] or 1),
            root=int(match["root"] or 0),
        )


@dataclass(frozen=True)
class Schedule:
    """Steps of transfers that carry out one collective on ranks 0..n-1.

    `spec` is None for a schedule that no spelling names (a hand-made or a broken one).
    """

    collective: Collective
    n: int
    chunks: int
    steps: tuple[Step, ...]
    root: int = 0
    spec: Spec | None = None

    def __post_init__(self) -> None:
        if self.spec is None:  # what `build` makes is formed rightly
            _check_form(self)

    @property
    def spelling(self) -> str:
        return str(self.spec) if self.spec else f"{self.collective} schedule of {self.n} ranks"

    def __str__(self) -> str:
        return self.spelling

    def __hash__(self) -> int:  # of all steps once, not at every look-up
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.collective, self.n, self.chunks, self.root, self.spec, self.steps))

    @cached_property
    def messages(self) -> tuple[tuple[Message, ...], ...]:
        """Per step, its messages by source, target and op."""
        return tuple(tuple(_messages(i, step)) for i, step in enumerate(self.steps))

    def transfers(self) -> Iterator[tuple[int, Transfer]]:
        return ((i, transfer) for i, step in enumerate(self.steps) for transfer in step)

    def owner(self, chunk: int) -> int:
        """The rank that contributes the chunk, or that keeps its sum (reduce, reduce_scatter)."""
        if self.collective in ("broadcast", "reduce"):
            return self.root
        blocks = self.n * self.n if self.collective == "all_to_all" else self.n
        block = chunk * blocks // self.chunks
        return block // self.n if self.collective == "all_to_all" else block

    def starts_with(self, rank: int, chunk: int) -> bool:
        """Does the rank hold its contribution to this chunk before the first step?"""
        if self.collective in ("all_reduce", "reduce_scatter", "reduce"):
            return True
        return rank == self.owner(chunk)

    def ends_with(self, rank: int, chunk: int) -> bool:
        """Must the rank hold the finished chunk after the last step?"""
        if self.collective in ("all_reduce", "all_gather", "broadcast"):
            return True
        if self.collective == "all_to_all":
            return rank == chunk * self.n * self.n // self.chunks % self.n
        return rank == self.owner(chunk)

    def chunk_sizes(self, total: int, sizes: Sequence[int] | None = None) -> tuple[int, ...]:
        """The size of every chunk of a buffer of `total` units (bytes or elements).

        `total` is the whole vector; for all_to_all, what one rank sends, its own block included.
        `sizes`: the part of each rank in an uneven reduce_scatter or all_gather, in place of an
        even one of `total`; in all_to_all the block of each (source, destination), row by row.
        """
        if not whole(total, least=0):
            raise ScheduleError(f"{self}: {total!r} is no size; it is a whole number, 0 or more")
        if self.collective in ("all_reduce", "broadcast", "reduce"):
            if sizes is not None:
                raise ScheduleError(f"{self}: has no parts, so takes no sizes; got {sizes}")
            return balanced(total, self.chunks)
        exchanged = self.collective == "all_to_all"
        if sizes is None:
            parts = balanced(total, self.n) * (self.n if exchanged else 1)
        else:
            parts = tuple(sizes) if isinstance(sizes, Sequence) else ()
        count = self.n * self.n if exchanged else self.n
        if len(parts) != count or not all(whole(part, least=0) for part in parts):
            raise ScheduleError(f"{self}: needs {count} sizes, none below 0, and got {parts}")
        return tuple(piece for part in parts for piece in balanced(part, self.chunks // count))


def whole(number: object, least: int) -> bool:
    """Is it a whole number, no truth value, and not below `least`?"""
    return isinstance(number, int) and not isinstance(number, bool) and number >= least


def check_asked(collective: str, n: int = 1) -> None:
    """ScheduleError unless there is such a collective, and a group of so many ranks."""
    if collective not in COLLECTIVES:
        raise ScheduleError(f"{collective!r} is no collective; there are {', '.join(COLLECTIVES)}")
    if not whole(n, least=1):
        raise ScheduleError(f"{collective}: {n!r} is no number of ranks; it is 1 or more")


def _check_form(schedule: Schedule) -> None:
    """Of a schedule that was written by hand: is everything in it of its kind?"""
    check_asked(schedule.collective, schedule.n)
    n, chunks, wrong = schedule.n, schedule.chunks, []
    parts = {"all_to_all": n * n, "all_gather": n, "reduce_scatter": n}.get(schedule.collective, 1)
    if not whole(chunks, least=1) or (n > 1 and chunks % parts):
        wrong.append(f"has {chunks!r} chunks, and needs a multiple of {parts}")
    if not whole(schedule.root, least=0) or schedule.root >= n:
        wrong.append(f"has its root at {schedule.root!r}, which is none of the ranks 0..{n - 1}")
    if not isinstance(schedule.steps, tuple):
        wrong.append(f"has for steps no tuple but {type(schedule.steps).__name__}")
    else:
        wrong += [
            f"has in step {i} {step!r}; a step is a tuple of Transfer(source, target, chunk, op)"
            for i, step in enumerate(schedule.steps)
            if not (isinstance(step, tuple) and all(map(_is_transfer, step)))
        ]
    if wrong:
        raise ScheduleError(f"the {schedule} {'; '.join(wrong)}")


def _is_transfer(found: object) -> bool:
    if not isinstance(found, Transfer) or found.op not in get_args(Op):
        return False
    return all(type(place) is int for place in (found.source, found.target, found.chunk))


def balanced(total: int, parts: int) -> tuple[int, ...]:
    """`total` in `parts` parts that differ by at most one, the larger first."""
    small, larger = divmod(total, parts)
    return (small + 1,) * larger + (small,) * (parts - larger)


def offsets(sizes: Sequence[int]) -> tuple[int, ...]:
    """Where each part begins, and where the last ends."""
    return tuple(accumulate(sizes, initial=0))


def _messages(index: int, step: Step) -> Iterator[Message]:
    def pair(t: Transfer) -> tuple[int, int, Op]:
        return t.source, t.target, t.op

    for (source, target, op), group in groupby(sorted(step, key=pair), key=pair):
        yield Message(index, source, target, op, tuple(sorted(t.chunk for t in group)))


_SPELLING = re.compile(
    rf"(?:(?P<collective>{'|'.join(COLLECTIVES)})\s+)?(?P<algorithm>[a-z_]+)"
    r"\[(?P<levels>[0-9]{1,9}(?:x[0-9]{1,9})*)(?::\s*(?P<inner>[a-z_]+(?:\s*,\s*[a-z_]+)*))?\]"
    r"(?:/(?P<pieces>[0-9]{1,9}))?(?:@(?P<root>[0-9]{1,9}))?"
)
