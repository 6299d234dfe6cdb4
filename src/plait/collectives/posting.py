"""What one rank does for a schedule, in order: post, wait, add.

    compile_rank(build("ring[2]"), 0)      send  step 0: 0 -> 1 chunk 1 add
                                           recv  step 0: 1 -> 0 chunk 0 add   into slot 0
                                           wait  step 0: 1 -> 0 chunk 0 add
                                           add   chunk 0: mine + slot -> mine
                                           send  step 1: 0 -> 1 chunk 0 copy
                                           done  step 0: 0 -> 1 chunk 1 add
                                           recv  step 1: 1 -> 0 chunk 1 copy
                                           wait, done

`Send` and `Recv` post and return; `Wait` waits for a receive, `Done` for a send. A receive goes
straight into the buffer where it replaces a chunk that nobody reads any more, and into one of a few
`slots` where it is to be added or the chunk is still on its way out. Receives of later steps are
posted ahead, as far as their places are free: that keeps the wire busy.

No schedule deadlocks in this order, whatever the timing. Sends of step s are preceded by waits for
messages of earlier steps only. A receive of step s is held back by such waits, by `Done` of sends
of earlier steps, and by waits for messages of step s. So, by induction over steps, everything of
step s is posted once all of the earlier steps is, on every rank. (check.py does not take this for
granted: it looks for a cycle in the graph of all ranks.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from plait.collectives.schedule import Message, Schedule

Chunks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Send:
    message: Message


@dataclass(frozen=True, slots=True)
class Recv:
    message: Message
    slot: int | None  # None: straight into the buffer


@dataclass(frozen=True, slots=True)
class Wait:
    message: Message


@dataclass(frozen=True, slots=True)
class Done:
    message: Message


@dataclass(frozen=True, slots=True)
class Copy:
    """From the message's slot into the buffer."""

    message: Message
    slot: int


@dataclass(frozen=True, slots=True)
class Slot:
    """The chunks of a message where it was received."""

    message: Message
    place: int


Operand = Slot | Literal["mine", "sum"]


@dataclass(frozen=True, slots=True)
class Add:
    """left + right -> into, on a run of chunks; `sum` is an accumulator, fp32 for 16-bit floats."""

    chunks: Chunks
    left: Operand
    right: Operand
    into: Literal["mine", "sum"]


Instruction = Send | Recv | Wait | Done | Copy | Add


@lru_cache(maxsize=4096)
def compile_rank(
    schedule: Schedule, rank: int, slots: int = 4, ahead: bool = True
) -> tuple[Instruction, ...]:
    """The instructions of one rank; `slots` is exceeded only where one step cannot do with less.

    `ahead=False`: whatever a step posts is posted together and ended before the next step.
    """
    return tuple(_Compiler(schedule, rank, slots, ahead).run())


def runs(chunks: Iterable[int]) -> list[Chunks]:
    """Runs of chunks that follow each other, and so lie side by side in the buffer."""
    found: list[list[int]] = []
    for chunk in chunks:
        if found and chunk == found[-1][-1] + 1:
            found[-1].append(chunk)
        else:
            found.append([chunk])
    return [tuple(run) for run in found]


@dataclass(frozen=True, slots=True)
class Sum:
    """One sum of a step: a run of chunks and the messages that are added to it, by source."""

    chunks: Chunks
    messages: tuple[Message, ...]


class Inbox:
    """What one rank receives in one step, in the order in which it is used."""

    def __init__(self, rank: int, messages: list[Message]) -> None:
        self.rank = rank
        self.waited: set[Message] = set()
        self.copies = [m for m in messages if m.op == "copy"]
        self.sums = _sums([m for m in messages if m.op == "add"])
        used = dict.fromkeys(m for s in self.sums for m in s.messages)
        self.messages: list[Message] = [*used, *self.copies]
        self.chunks = {chunk for m in messages for chunk in m.chunks}


def _sums(messages: list[Message]) -> list[Sum]:
    """Chunks to which the same messages are added are one sum, where they lie side by side."""
    incoming: defaultdict[int, list[Message]] = defaultdict(list)
    for message in messages:
        for chunk in message.chunks:
            incoming[chunk].append(message)
    alike: defaultdict[tuple[Message, ...], list[int]] = defaultdict(list)
    for chunk in sorted(incoming):
        alike[tuple(sorted(incoming[chunk], key=lambda m: m.source))].append(chunk)
    return [Sum(run, group) for group, chunks in alike.items() for run in runs(chunks)]


class _Compiler:
    """Walks through the steps; `settle(s)` waits for what step s received, and uses it."""

    def __init__(self, schedule: Schedule, rank: int, slots: int, ahead: bool) -> None:
        steps = schedule.messages
        self.ahead = ahead
        self.outbox = [[m for m in step if m.source == rank] for step in steps]
        self.inbox = [Inbox(rank, [m for m in step if m.target == rank]) for step in steps]
        self.coming = iter([m for box in self.inbox for m in box.messages])
        self.next = next(self.coming, None)  # the next receive to post
        self.slots: list[Message | None] = [None] * slots
        self.unsettled: dict[int, Inbox] = {}  # steps of which something was posted, not yet used
        self.sending: defaultdict[int, list[Message]] = defaultdict(list)  # by chunk, not done
        self.sent: defaultdict[int, set[int]] = defaultdict(set)  # the steps that send a chunk
        for message in (m for outbox in self.outbox for m in outbox):
            for chunk in message.chunks:
                self.sent[chunk].add(message.step)
        self.out: list[Instruction] = []

    def run(self) -> list[Instruction]:
        for step, outbox in enumerate(self.outbox):
            if not self.ahead:
                self._end()
            for message in outbox:
                self._settle_before(step, message.chunks)
                self._send(message)
            while self.next is not None and self.next.step == step:
                self._receive(self.next)
            while self.ahead and self.next is not None and self._receive_early(self.next, step):
                pass
        self._end()
        return self.out

    def _end(self) -> None:
        for step in sorted(self.unsettled):
            self._settle(step)
        self._finish(dict.fromkeys(m for messages in self.sending.values() for m in messages))

    def _send(self, message: Message) -> None:
        self.out.append(Send(message))
        for chunk in message.chunks:
            self.sending[chunk].append(message)

    def _receive(self, message: Message) -> None:
        """Post a receive of this step, after making room for it."""
        step = message.step
        if message.op == "copy":
            self._settle_before(step, message.chunks)
            self._finish(m for m in self._readers(message.chunks) if m.step < step)
            if not self._readers(message.chunks):
                return self._posted(message, None)
        for earlier in sorted(s for s in self.unsettled if s < step):
            if None not in self.slots:
                self._settle(earlier)
        if None not in self.slots:
            self.slots.append(None)
        return self._posted(message, self.slots.index(None))

    def _receive_early(self, message: Message, step: int) -> bool:
        """Post a receive of a later step, if its place is free and stays unread until then.

        What earlier steps left in the place is settled by now: no transfer is in vain (check.py), so it has been
        sent on, or is still to be sent, which is a read.
        """
        if message.op == "add":
            if None in self.slots:
                self._posted(message, self.slots.index(None))
                return True
            return False
        read = any(step < s <= message.step for c in message.chunks for s in self.sent[c])
        readers = self._readers(message.chunks)
        if read or any(m.step >= step for m in readers):
            return False
        self._finish(readers)
        self._posted(message, None)
        return True

    def _posted(self, message: Message, slot: int | None) -> None:
        if slot is not None:
            self.slots[slot] = message
        self.out.append(Recv(message, slot))
        self.unsettled.setdefault(message.step, self.inbox[message.step])
        self.next = next(self.coming, None)

    # --- using what came -------------------------------------------------------------------------

    def _settle_before(self, step: int, chunks: Chunks) -> None:
        """Settle the earlier steps that received any of these chunks."""
        for earlier in sorted(s for s in self.unsettled if s < step):
            if not self.unsettled[earlier].chunks.isdisjoint(chunks):
                self._settle(earlier)

    def _settle(self, step: int) -> None:
        box = self.unsettled[step]
        self._settle_before(step, tuple(box.chunks))
        del self.unsettled[step]
        for total in box.sums:
            self._sum(box, total)
        for message in box.copies:
            self._wait(box, message)
            if message in self.slots:
                self._finish(self._readers(message.chunks))
                self.out.append(Copy(message, self.slots.index(message)))
        self.slots = [None if m in box.messages else m for m in self.slots]

    def _sum(self, box: Inbox, total: Sum) -> None:
        """The operands in ascending order of rank, this rank's own among them."""
        for message in total.messages:
            self._wait(box, message)
        operands: list[tuple[int, Operand]] = [(box.rank, "mine")]
        operands += [(m.source, Slot(m, self.slots.index(m))) for m in total.messages]
        (_, left), *others = sorted(operands, key=lambda operand: operand[0])
        self._finish(self._readers(total.chunks))
        for i, (_, right) in enumerate(others, start=1):
            into: Literal["mine", "sum"] = "mine" if i == len(others) else "sum"
            self.out.append(Add(total.chunks, left, right, into))
            left = "sum"

    def _wait(self, box: Inbox, message: Message) -> None:
        if message not in box.waited:
            box.waited.add(message)
            self.out.append(Wait(message))

    def _readers(self, chunks: Chunks) -> list[Message]:
        """Sends of these chunks that are not done."""
        return list(dict.fromkeys(m for chunk in chunks for m in self.sending[chunk]))

    def _finish(self, messages: Iterable[Message]) -> None:
        for message in list(messages):
            self.out.append(Done(message))
            for chunk in message.chunks:
                self.sending[chunk].remove(message)
