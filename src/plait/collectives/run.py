"""Run: one rank's plan over the point-to-point transfers of a process group.

    perform(plan, wires, memory, scratch, "sum")

Buffers are contiguous, every handle is waited for, and everything is posted in the order that
check.py proves free of deadlock. gloo takes each send and receive by itself; NCCL takes a step's
sends and receives as one batch.

A sum of two is one addition in the tensor's dtype (which torch makes in fp32 for 16-bit floats,
and rounds once); a sum of more is accumulated, for 16-bit floats in fp32, and rounded once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from plait.collectives.bind import Add, Copy, Done, Place, Plan, Range, Recv, Send, Wait

ReduceOp = Literal["sum", "max", "min"]
Combine = Callable[..., Tensor]


def accumulator_dtype(dtype: torch.dtype, op: ReduceOp) -> torch.dtype:
    narrow = op == "sum" and dtype.is_floating_point and dtype.itemsize < 4
    return torch.float32 if narrow else dtype


# --- where elements are ---------------------------------------------------------------------------


class Memory(Protocol):
    """Where a rank keeps the elements of the vector."""

    def view(self, begin: int, end: int) -> Tensor: ...


class Flat:
    """All of them side by side."""

    def __init__(self, vector: Tensor) -> None:
        self.vector = vector

    def view(self, begin: int, end: int) -> Tensor:
        return self.vector[begin:end]


class Blocks:
    """Blocks that lie apart: {begin: the tensor of the block that begins there}, none empty."""

    def __init__(self, blocks: dict[int, Tensor]) -> None:
        self.blocks, self.begins = blocks, sorted(blocks)

    def view(self, begin: int, end: int) -> Tensor:
        first = self.begins[bisect_right(self.begins, begin) - 1]
        return self.blocks[first][begin - first : end - first]


# --- wires ----------------------------------------------------------------------------------------


class Wires(Protocol):
    """Posts sends and receives to ranks of the group; `flush` comes before any `wait`."""

    def send(self, tensor: Tensor, peer: int) -> Any: ...
    def recv(self, tensor: Tensor, peer: int) -> Any: ...
    def flush(self) -> None: ...
    def wait(self, handle: Any) -> None: ...


class TaggedWires:
    """gloo: messages find each other by tag.

    A tag is made of the call's signature, so that ranks which ask for different things do not take
    each other's bytes for their own: they wait, and the sentry finds out why.
    """

    def __init__(self, group: dist.ProcessGroup, signature: int) -> None:
        self.group, self.base = group, 1 << 30 | (signature & 0xFFFFF) << 10  # a tag has 31 bits
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()

    def send(self, tensor: Tensor, peer: int) -> Any:
        self.sent[peer] += 1
        return self.group.send([tensor], peer, self.base | self.sent[peer] & 0x3FF)

    def recv(self, tensor: Tensor, peer: int) -> Any:
        self.received[peer] += 1
        return self.group.recv([tensor], peer, self.base | self.received[peer] & 0x3FF)

    def flush(self) -> None:
        pass

    def wait(self, handle: Any) -> None:
        handle.wait()


class BatchedWires:
    """NCCL: what is posted between two waits is one batch, and waits are of the stream."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.batch: list[dist.P2POp] = []

    def send(self, tensor: Tensor, peer: int) -> Any:
        self.batch.append(dist.P2POp(dist.isend, tensor, group=self.group, group_peer=peer))

    def recv(self, tensor: Tensor, peer: int) -> Any:
        self.batch.append(dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=peer))

    def flush(self) -> None:
        if self.batch:
            batch, self.batch = self.batch, []
            for work in dist.batch_isend_irecv(batch):
                work.wait()

    def wait(self, handle: Any) -> None:
        pass


# --- the run --------------------------------------------------------------------------------------


def perform(
    plan: Plan,
    wires: Wires,
    memory: Memory,
    slots: Tensor,
    accumulator: Tensor,
    op: ReduceOp = "sum",
) -> None:
    """Carry out one rank's plan; everything that it posts is done when it returns."""
    _Run(wires, memory, slots, accumulator, op).run(plan)


class _Run:
    def __init__(
        self, wires: Wires, memory: Memory, slots: Tensor, accumulator: Tensor, op: ReduceOp
    ) -> None:
        self.wires, self.memory = wires, memory
        self.slots, self.accumulator = slots, accumulator
        self.combine = _COMBINE[op]
        self.widens = accumulator.dtype != slots.dtype
        self.handles: dict[int, list[tuple[Any, Tensor]]] = {}  # with what they must keep alive
        self.packed: dict[int, tuple[Tensor, tuple[Range, ...]]] = {}

    def run(self, plan: Plan) -> None:
        for instruction in plan.instructions:
            match instruction:
                case Send():
                    self._send(instruction)
                case Recv():
                    self._recv(instruction)
                case Wait(key) | Done(key):
                    self._wait(key)
                case Copy(ranges, slot):
                    self._unpack(self.slots[slot:], ranges)
                case Add(range_, left, right, into):
                    self._add(range_, left, right, into)
        self.wires.flush()

    def _send(self, send: Send) -> None:
        views = [self.memory.view(*r) for r in send.ranges]
        pieces = [torch.cat(views)] if send.packed else views
        self.handles[send.key] = [(self.wires.send(piece, send.peer), piece) for piece in pieces]

    def _recv(self, recv: Recv) -> None:
        pieces = self._room(recv)
        self.handles[recv.key] = [(self.wires.recv(piece, recv.peer), piece) for piece in pieces]

    def _room(self, recv: Recv) -> list[Tensor]:
        """Where the pieces of a message go."""
        if recv.slot is None and not recv.packed:
            return [self.memory.view(*r) for r in recv.ranges]
        lengths = [end - begin for begin, end in recv.ranges]
        if recv.slot is None:
            room = self.slots.new_empty(sum(lengths))
            self.packed[recv.key] = room, recv.ranges
        else:
            room = self.slots[recv.slot : recv.slot + sum(lengths)]
        whole = recv.packed or len(lengths) == 1
        return [room] if whole else list(torch.split(room, lengths))

    def _wait(self, key: int) -> None:
        self.wires.flush()
        for handle, _ in self.handles.pop(key):
            self.wires.wait(handle)
        if key in self.packed:
            self._unpack(*self.packed.pop(key))

    def _unpack(self, room: Tensor, ranges: tuple[Range, ...]) -> None:
        at = 0
        for begin, end in ranges:
            self.memory.view(begin, end).copy_(room[at : at + end - begin])
            at += end - begin

    def _add(self, range_: Range, left: Place, right: Place, into: str) -> None:
        begin, end = range_
        total = self.accumulator[: end - begin]
        mine = self.memory.view(begin, end)

        def operand(place: Place) -> Tensor:
            if isinstance(place, int):
                return self.slots[place : place + end - begin]
            return mine if place == "mine" else total

        target = mine if into == "mine" else total
        if not self.widens or "sum" not in (left, into):
            self.combine(operand(left), operand(right), out=target)
            return
        if left != "sum":
            total.copy_(operand(left))
        total += operand(right)
        if into == "mine":
            mine.copy_(total)


_COMBINE: dict[ReduceOp, Combine] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
