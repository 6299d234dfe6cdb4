"""A rank's instructions with sizes: which elements travel, where a slot begins.

Chunks become ranges of elements of one vector (for all_to_all a vector of all blocks of all ranks,
of which each rank holds some). What is empty, as in a vector shorter than its chunks, falls away on
both sides of a transfer alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from plait.collectives import posting
from plait.collectives.posting import Instruction, Operand, compile_rank, runs
from plait.collectives.schedule import Message, Schedule, offsets

PACK = 1 << 18  # bytes: a message of several ranges, up to this size, travels as one packed piece
ALIGN = 64  # bytes: a cache line
SLOTS = 8
SLOT_BYTES = 64 << 20  # of all slots together, as long as there are two

Range = tuple[int, int]  # elements [begin, end) of the vector
Place = int | Literal["mine", "sum"]  # where an operand is; a number: from there in the scratch


@dataclass(frozen=True, slots=True)
class Send:
    key: int
    peer: int
    ranges: tuple[Range, ...]
    packed: bool


@dataclass(frozen=True, slots=True)
class Recv:
    key: int
    peer: int
    ranges: tuple[Range, ...]
    packed: bool
    slot: int | None  # elements into the scratch; None: straight into the vector


@dataclass(frozen=True, slots=True)
class Wait:
    key: int


@dataclass(frozen=True, slots=True)
class Done:
    key: int


@dataclass(frozen=True, slots=True)
class Copy:
    ranges: tuple[Range, ...]
    slot: int


@dataclass(frozen=True, slots=True)
class Add:
    range: Range
    left: Place
    right: Place
    into: Literal["mine", "sum"]


Bound = Send | Recv | Wait | Done | Copy | Add


@dataclass(frozen=True)
class Plan:
    """What one rank does, and the elements of scratch and accumulator that it needs for it."""

    instructions: tuple[Bound, ...]
    scratch: int
    accumulator: int


@lru_cache(maxsize=1024)
def bind(
    schedule: Schedule,
    rank: int,
    total: int,
    itemsize: int,
    sizes: tuple[int, ...] | None = None,
    batched: bool = False,
) -> Plan:
    """The plan of one rank for `total` elements.

    `batched`: step by step, for a backend that takes a step's sends and receives as one batch.
    """
    binder = _Binder(schedule, total, itemsize, sizes)
    largest = max((binder.length(m) for step in schedule.messages for m in step), default=0)
    slots = max(2, min(SLOTS, SLOT_BYTES // max(1, largest * itemsize)))
    return binder.plan(compile_rank(schedule, rank, slots, ahead=not batched))


class _Binder:
    def __init__(
        self, schedule: Schedule, total: int, itemsize: int, sizes: tuple[int, ...] | None
    ) -> None:
        self.lengths = schedule.chunk_sizes(total, sizes)
        self.offsets = offsets(self.lengths)
        self.itemsize = itemsize
        blocks = schedule.n**2 if schedule.collective == "all_to_all" else 1
        self.block = schedule.chunks // blocks if schedule.chunks >= blocks else 1

    def length(self, message: Message) -> int:
        return sum(self.lengths[chunk] for chunk in message.chunks)

    def ranges(self, chunks: Iterable[int]) -> tuple[Range, ...]:
        """Ranges that lie side by side on every rank: all_to_all keeps blocks where it likes."""
        cut = [
            tuple(c for c in run if c // self.block == block)
            for run in runs(c for c in chunks if self.lengths[c])
            for block in sorted({c // self.block for c in run})
        ]
        return tuple((self.offsets[run[0]], self.offsets[run[-1] + 1]) for run in cut)

    def plan(self, program: tuple[Instruction, ...]) -> Plan:
        begins, scratch = self._slots(program)
        keys: defaultdict[Message, int] = defaultdict(lambda: len(keys))
        bound = [b for i in program for b in self._bound(i, keys, begins)]
        sums = [b.range for b in bound if isinstance(b, Add) and b.into == "sum"]
        return Plan(tuple(bound), scratch, max((end - begin for begin, end in sums), default=0))

    def _slots(self, program: tuple[Instruction, ...]) -> tuple[tuple[int, ...], int]:
        """Where each slot begins, as large as its largest message, and the end of the last."""
        largest: defaultdict[int, int] = defaultdict(int)
        for i in program:
            if isinstance(i, posting.Recv) and i.slot is not None:
                largest[i.slot] = max(largest[i.slot], self.length(i.message))
        step = max(1, ALIGN // self.itemsize)
        sizes = [-(-largest[slot] // step) * step for slot in range(max(largest, default=-1) + 1)]
        begins = offsets(sizes)
        return begins, begins[-1]

    def _bound(
        self, instruction: Instruction, keys: dict[Message, int], begins: tuple[int, ...]
    ) -> list[Bound]:
        if isinstance(instruction, posting.Add):
            return self._add(instruction, begins)
        message = instruction.message
        if not self.length(message):
            return []
        ranges = self.ranges(message.chunks)
        packed = len(ranges) > 1 and self.length(message) * self.itemsize <= PACK
        match instruction:
            case posting.Send(m):
                return [Send(keys[m], m.target, ranges, packed)]
            case posting.Recv(m, slot):
                begin = None if slot is None else begins[slot]
                return [Recv(keys[m], m.source, ranges, packed, begin)]
            case posting.Wait(m):
                return [Wait(keys[m])]
            case posting.Done(m):
                return [Done(keys[m])]
            case posting.Copy(_, slot):
                return [Copy(ranges, begins[slot])]

    def _add(self, add: posting.Add, begins: tuple[int, ...]) -> list[Bound]:
        begin, end = self.offsets[add.chunks[0]], self.offsets[add.chunks[-1] + 1]
        if begin == end:
            return []
        left, right = (self._place(o, add.chunks[0], begins) for o in (add.left, add.right))
        return [Add((begin, end), left, right, add.into)]

    def _place(self, operand: Operand, chunk: int, begins: tuple[int, ...]) -> Place:
        if not isinstance(operand, posting.Slot):
            return operand
        before = (c for c in operand.message.chunks if c < chunk)
        return begins[operand.place] + sum(self.lengths[c] for c in before)
