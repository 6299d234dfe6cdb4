"""The proof that a schedule is right, and that what each rank does for it is.

`prove(schedule)` raises `ScheduleError`, naming rank, step and chunk, unless

1. *the steps add up*: a symbolic run, in which a value is the multiset of the contributions in it
   (a second one is refused where it is added) and the order in which they were added, leaves every
   rank with what the collective promises: each contribution once, and the same additions in the
   same order, so the same bits, on every rank that ends with a chunk; and no transfer is in vain;
2. *no timing deadlocks*: all ranks' instructions (posting.py) form one graph of what happens before
   what: the order on each rank, a send before the wait for it, and, as a network may hold nothing
   back, the posting of a receive before the end of its send (a credit). It has no cycle. The graph
   has no choices, so it has one exactly when running whatever can run gets stuck;
3. *no timing changes a value*: nothing is written while it may still be read or received into, and
   the instructions, run on the same symbolic values, end with the values of the steps.

What a proof finds out: `roundings`, how often a sum is rounded to the dtype on the wire on its way,
and `orders`, in how many orders chunks are summed: with one, bits do not depend on the size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Literal, NamedTuple, NoReturn

from plait.collectives.algorithms import schedule_of
from plait.collectives.posting import (
    Add,
    Copy,
    Done,
    Instruction,
    Operand,
    Recv,
    Send,
    Slot,
    Wait,
    compile_rank,
)
from plait.collectives.schedule import Message, Schedule, Step, Transfer
from plait.errors import ScheduleError


class Value(NamedTuple):
    """A sum: whose contributions are in it, in which order they were added, how often rounded."""

    ranks: int  # bit r: rank r's contribution
    order: int  # a rank, or the number of a pair of orders
    roundings: int = 0


class Orders(dict[frozenset[int], int]):
    """Numbers for pairs of orders, beyond the ranks; a + b and b + a have the same bits."""

    def __missing__(self, pair: frozenset[int]) -> int:
        self[pair] = -1 - len(self)
        return self[pair]

    def of(self, operands: Sequence[Value]) -> int:
        """The additions, first to last."""
        return reduce(lambda a, b: self[frozenset((a, b))], (v.order for v in operands))


Cell = tuple[int, int]  # rank, chunk
Memory = dict[Cell, Value]


@dataclass(frozen=True)
class Proof:
    """What the proof of a schedule found."""

    schedule: str
    roundings: int
    orders: int

    @property
    def accumulation(self) -> Literal["fp32", "wire"]:
        """`fp32`: added up in fp32 on one rank and rounded once; `wire`: rounded at every hop."""
        return "fp32" if self.roundings <= 1 else "wire"

    @property
    def size_free(self) -> bool:
        """The bits of an element's sum depend neither on the vector's size nor on its place."""
        return self.orders <= 1


def prove(schedule: Schedule | str, slots: int = 2) -> Proof:
    """The proof; ScheduleError where there is none."""
    return _prove(schedule_of(schedule), slots)


@lru_cache(maxsize=512)
def _prove(schedule: Schedule, slots: int) -> Proof:
    orders = Orders()
    final = _promised(schedule, run_steps(schedule, orders))
    _useful(schedule, set(final))
    programs = [compile_rank(schedule, rank, slots) for rank in range(schedule.n)]
    ended = run_programs(schedule, programs, orders)
    for (rank, chunk), value in final.items():
        if ended.get((rank, chunk)) != value:
            raise _error(schedule, rank, None, chunk, "the instructions end with another value")
    return Proof(
        str(schedule),
        max((value.roundings for value in final.values()), default=0),
        len({value.order for value in final.values() if value.roundings}),
    )


# --- 1: the steps ---------------------------------------------------------------------------------


def start(schedule: Schedule) -> Memory:
    cells = ((rank, chunk) for rank in range(schedule.n) for chunk in range(schedule.chunks))
    return {
        (rank, chunk): Value(1 << rank, rank)
        for rank, chunk in cells
        if schedule.starts_with(rank, chunk)
    }


def run_steps(schedule: Schedule, orders: Orders) -> Memory:
    """Every cell after the last step."""
    memory = start(schedule)
    for index, step in enumerate(schedule.steps):
        _plausible(schedule, index, step)
        arrived: defaultdict[Cell, list[Transfer]] = defaultdict(list)
        for transfer in step:
            if (transfer.source, transfer.chunk) not in memory:
                text = f"{transfer}: the source holds nothing there"
                raise _error(schedule, transfer.source, index, transfer.chunk, text)
            arrived[transfer.target, transfer.chunk].append(transfer)
        memory.update(
            [
                (cell, _arrive(schedule, index, cell, ts, memory, orders))
                for cell, ts in arrived.items()
            ]
        )
    return memory


def _plausible(schedule: Schedule, index: int, step: Step) -> None:
    for t in step:
        if not (0 <= t.source < schedule.n and 0 <= t.target < schedule.n):
            raise _error(schedule, t.source, index, t.chunk, f"{t}: ranks are 0..{schedule.n - 1}")
        if t.source == t.target:
            raise _error(schedule, t.source, index, t.chunk, f"{t}: sends to itself")
        if not 0 <= t.chunk < schedule.chunks:
            text = f"{t}: chunks are 0..{schedule.chunks - 1}"
            raise _error(schedule, t.source, index, t.chunk, text)


def _arrive(
    schedule: Schedule,
    index: int,
    cell: Cell,
    transfers: list[Transfer],
    memory: Memory,
    orders: Orders,
) -> Value:
    """What one cell holds after a step that sends it something."""
    rank, chunk = cell
    mine = memory.get(cell)
    came = [memory[t.source, chunk] for t in transfers]
    if all(t.op == "add" for t in transfers):
        operands = {t.source: value for t, value in zip(transfers, came, strict=True)}
        if len(operands) < len(transfers) or mine is None:
            text = "is sent twice" if mine else f"{transfers[0]}: is added to nothing"
            raise _error(schedule, rank, index, chunk, text)
        operands[rank] = mine
        return _sum(schedule, index, cell, [operands[r] for r in sorted(operands)], orders)
    if len(transfers) > 1:
        text = f"has several writers: {'; '.join(map(str, transfers))}"
        raise _error(schedule, rank, index, chunk, text)
    if came[0] == mine:
        raise _error(schedule, rank, index, chunk, f"{transfers[0]}: the target holds this already")
    return came[0]


def _sum(
    schedule: Schedule, index: int, cell: Cell, operands: Sequence[Value], orders: Orders
) -> Value:
    ranks = 0
    for value in operands:
        if twice := ranks & value.ranks:
            text = f"adds the contribution of {_ranks(twice)} a second time"
            raise _error(schedule, cell[0], index, cell[1], text)
        ranks |= value.ranks
    return Value(ranks, orders.of(operands), 1 + max(value.roundings for value in operands))


def _promised(schedule: Schedule, memory: Memory) -> Memory:
    """The cells that the collective promises, once they are found right."""
    summed = schedule.collective in ("all_reduce", "reduce_scatter", "reduce")
    promised: Memory = {}
    for chunk in range(schedule.chunks):
        wanted = (1 << schedule.n) - 1 if summed else 1 << schedule.owner(chunk)
        first: Value | None = None
        for rank in filter(lambda r: schedule.ends_with(r, chunk), range(schedule.n)):
            value = memory.get((rank, chunk))
            text = _wrong(value, wanted, first)
            if text or value is None:
                raise _error(schedule, rank, _last_write(schedule, rank, chunk), chunk, text)
            first = first or value
            promised[rank, chunk] = value
    return promised


def _wrong(value: Value | None, wanted: int, first: Value | None) -> str:
    """What is wrong with a value at the end; `first`: another rank's value of the same chunk."""
    held = value.ranks if value else 0
    faults = [f"lacks {_ranks(wanted & ~held)}"] * bool(wanted & ~held)
    faults += [f"has {_ranks(held & ~wanted)}"] * bool(held & ~wanted)
    if faults:
        return f"at the end {' and '.join(faults)}"
    if first and value and first.order != value.order:
        return "is added up in another order than on another rank: the bits would differ"
    return ""


def _useful(schedule: Schedule, read: set[Cell]) -> None:
    """No transfer whose value is overwritten before it is read; `read`: what is read at the end."""
    for index in reversed(range(len(schedule.steps))):
        step = schedule.steps[index]
        for t in step:
            if (t.target, t.chunk) not in read:
                text = f"{t}: is overwritten or never read"
                raise _error(schedule, t.target, index, t.chunk, text)
        read -= {(t.target, t.chunk) for t in step if t.op == "copy"}
        read |= {(t.source, t.chunk) for t in step}


def _last_write(schedule: Schedule, rank: int, chunk: int) -> int | None:
    writes = [i for i, t in schedule.transfers() if (t.target, t.chunk) == (rank, chunk)]
    return writes[-1] if writes else None


# --- 2 and 3: the instructions --------------------------------------------------------------------


def run_programs(
    schedule: Schedule, programs: Sequence[Sequence[Instruction]], orders: Orders
) -> Memory:
    """Run whatever can run until all ranks have ended; the cells of all ranks, or ScheduleError."""
    posted = Posted()
    ranks = [_Rank(schedule, rank, posted, orders) for rank in range(schedule.n)]
    at = [0] * schedule.n
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while at[rank] < len(program) and ranks[rank].run(program[at[rank]]):
                at[rank] += 1
                moved = True
    stuck = [programs[r][at[r]] for r in range(schedule.n) if at[r] < len(programs[r])]
    if stuck:
        waits = "; ".join(f"{type(i).__name__.lower()} {_message(i)}" for i in stuck)
        first = _message(stuck[0])
        text = f"deadlock: the ranks wait for each other in {waits}"
        raise _error(schedule, first.target, first.step, first.chunks[0], text)
    for ended in ranks:
        ended.end()
    _channels(schedule, programs)
    return {(rank.rank, chunk): v for rank in ranks for chunk, v in rank.memory.items()}


class Posted:
    """Sends with the values they carry, and receives, that some rank has posted."""

    def __init__(self) -> None:
        self.sends: dict[Message, list[Value]] = {}
        self.receives: set[Message] = set()


class _Rank:
    """One rank's buffer, slots and accumulator in the symbolic run."""

    def __init__(self, schedule: Schedule, rank: int, posted: Posted, orders: Orders) -> None:
        self.schedule, self.rank, self.posted, self.orders = schedule, rank, posted, orders
        held = (chunk for chunk in range(schedule.chunks) if schedule.starts_with(rank, chunk))
        self.memory = {chunk: Value(1 << rank, rank) for chunk in held}
        self.leaving: defaultdict[int, set[Message]] = defaultdict(set)  # sends that may still read
        self.coming: dict[int, Message] = {}  # receives that may still write
        self.slots: dict[int, dict[int, Value | None]] = {}  # place -> chunk -> value, once there
        self.sum: dict[int, list[Value]] = {}
        self.going: set[Message] = set()  # sends that have not ended
        self.expected: dict[Message, int | None] = {}  # receives that have not ended, and their slots

    def run(self, instruction: Instruction) -> bool:
        """Carry it out; False if it must wait."""
        match instruction:
            case Send(m):
                self._send(m)
            case Recv(m, slot):
                self._post(m, slot)
            case Wait(m):
                if m not in self.posted.sends:
                    return False
                self._received(m)
            case Done(m):
                if m not in self.posted.receives:
                    return False
                self._sent(m)
            case Copy(m, slot):
                for chunk in m.chunks:
                    self._write(chunk, self._take(Slot(m, slot), chunk), m)
            case Add(chunks, left, right, into):
                for chunk in chunks:
                    self._add(chunk, left, right, into)
        return True

    def _send(self, message: Message) -> None:
        if message in self.posted.sends:
            self._fail(message.chunks[0], message, "is sent twice")
        self.posted.sends[message] = [self._read(chunk, message) for chunk in message.chunks]
        self.going.add(message)
        for chunk in message.chunks:
            self.leaving[chunk].add(message)

    def _sent(self, message: Message) -> None:
        if message not in self.going:
            self._fail(message.chunks[0], message, "is ended as a send that has not begun here")
        self.going.remove(message)
        for chunk in message.chunks:
            self.leaving[chunk].discard(message)

    def _post(self, message: Message, slot: int | None) -> None:
        if message in self.posted.receives:
            self._fail(message.chunks[0], message, "is received twice")
        self.posted.receives.add(message)
        self.expected[message] = slot
        if slot is None:
            for chunk in message.chunks:
                self._free(chunk, message)
                self.coming[chunk] = message
            return
        if self.slots.get(slot):
            self._fail(message.chunks[0], message, f"slot {slot} still holds another message")
        self.slots[slot] = dict.fromkeys(message.chunks)

    def _received(self, message: Message) -> None:
        if message not in self.expected:
            self._fail(message.chunks[0], message, "is waited for as a receive that has not begun here")
        slot = self.expected.pop(message)
        for chunk, value in zip(message.chunks, self.posted.sends[message], strict=True):
            if slot is None:
                del self.coming[chunk]
                self.memory[chunk] = value
            else:
                self.slots[slot][chunk] = value

    def end(self) -> None:
        """Nothing may be left open: whoever called the collective uses its buffers again."""
        for message in (*self.going, *self.expected):
            what = "sent" if message in self.going else "received"
            self._fail(message.chunks[0], message, f"may still be {what} at the end")
        for slot, held in self.slots.items():
            for chunk in held:
                self._fail(chunk, None, f"is left in slot {slot} at the end")
        for chunk in self.sum:
            self._fail(chunk, None, "is summed, and written nowhere")

    def _add(self, chunk: int, left: Operand, right: Operand, into: str) -> None:
        if left == "sum" and chunk not in self.sum:
            self._fail(chunk, None, "is added to a sum that has not begun")
        if right == "sum":
            self._fail(chunk, None, "has its sum as what is added; a sum stands first")
        operands = self.sum.pop(chunk) if left == "sum" else [self._operand(left, chunk)]
        operands.append(self._operand(right, chunk))
        if into == "sum":
            self.sum[chunk] = operands
        else:
            cell = self.rank, chunk
            self._write(chunk, _sum(self.schedule, 0, cell, operands, self.orders), None)

    def _operand(self, operand: Operand, chunk: int) -> Value:
        return self._take(operand, chunk) if isinstance(operand, Slot) else self._read(chunk, None)

    def _take(self, slot: Slot, chunk: int) -> Value:
        value = self.slots.get(slot.place, {}).pop(chunk, None)
        if value is None:
            self._fail(chunk, slot.message, f"is not there in slot {slot.place}: it was not waited for, or is used up")
        return value

    def _read(self, chunk: int, message: Message | None) -> Value:
        if chunk in self.coming:
            self._fail(chunk, message, f"is read while it is received: {self.coming[chunk]}")
        if chunk not in self.memory:
            self._fail(chunk, message, "is read before anything is there")
        return self.memory[chunk]

    def _write(self, chunk: int, value: Value, message: Message | None) -> None:
        self._free(chunk, message)
        self.memory[chunk] = value

    def _free(self, chunk: int, message: Message | None) -> None:
        if self.leaving[chunk]:
            text = f"is written while it is sent: {next(iter(self.leaving[chunk]))}"
            self._fail(chunk, message, text)
        if chunk in self.coming:
            self._fail(chunk, message, f"is written while it is received: {self.coming[chunk]}")

    def _fail(self, chunk: int, message: Message | None, text: str) -> NoReturn:
        step = message.step if message else None
        raise _error(self.schedule, self.rank, step, chunk, text)


def _channels(schedule: Schedule, programs: Sequence[Sequence[Instruction]]) -> None:
    """Between two ranks, receives are posted in the order of the sends (NCCL knows no tags)."""
    sent: defaultdict[tuple[int, int], list[Message]] = defaultdict(list)
    received: defaultdict[tuple[int, int], list[Message]] = defaultdict(list)
    for instruction in (i for program in programs for i in program):
        if isinstance(instruction, Send | Recv):
            m = instruction.message
            side = sent if isinstance(instruction, Send) else received
            side[m.source, m.target].append(m)
    for (source, target), messages in sent.items():
        if messages != received[source, target]:
            m = messages[0]
            text = f"rank {target} receives from rank {source} in another order than it sends"
            raise _error(schedule, target, m.step, m.chunks[0], text)


def _message(instruction: Instruction) -> Message:
    assert not isinstance(instruction, Add)
    return instruction.message


def _ranks(mask: int) -> str:
    ranks = [str(rank) for rank in range(mask.bit_length()) if mask >> rank & 1]
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(ranks)}"


def _error(schedule: Schedule, rank: int, step: int | None, chunk: int, text: str) -> ScheduleError:
    at = "" if step is None else f", step {step}"
    return ScheduleError(f"{schedule}: rank {rank}{at}, chunk {chunk}: {text}")
