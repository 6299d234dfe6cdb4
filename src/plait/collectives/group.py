"""What the calls on one process group share: ranks, buffers, what was agreed, and the sentry.

    here = communicator(group)
    here.carry_out(request, memory, total, dtype, device)

Before the first call of its kind (collective, shape, dtype, algorithm) the ranks exchange a header
of 512 bytes, and all of them raise if it differs. Later calls of the kind trust that, up to this:
on gloo the tags of their messages are made of the request, so that ranks which ask for different
things do not take each other's bytes, and the sentry ends the call on all ranks with the reason.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from plait.collectives import native
from plait.collectives.algorithms import build
from plait.collectives.bind import bind
from plait.collectives.check import prove
from plait.collectives.request import Request
from plait.collectives.run import (
    BatchedWires,
    Flat,
    Memory,
    ReduceOp,
    TaggedWires,
    Wires,
    accumulator_dtype,
    perform,
)
from plait.collectives.schedule import Schedule
from plait.collectives.sentry import Sentry, differing
from plait.errors import CollectiveError

HEADER = 512  # bytes: a digest of the request and the beginning of its words
_REQUESTS = 1 << 12  # that are kept with what they were made of
_KINDS = 1 << 16  # of requests that are remembered as agreed


class Pool:
    """Scratch memory on the CPU, kept for the next call: fresh pages cost more than copies do.

    A buffer has one borrower at a time, so calls of several threads do not share any. One that is
    not returned, because its call broke and a transfer may still write into it, stays alive.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[Tensor] = []
        self._lost: list[Tensor] = []

    @contextmanager
    def borrow(self, elements: int, dtype: torch.dtype, device: torch.device) -> Iterator[Tensor]:
        if device.type != "cpu" or not elements:  # its allocator keeps memory, and knows about streams
            yield torch.empty(elements, dtype=dtype, device=device)
            return
        buffer = self._take(elements * dtype.itemsize)
        try:
            yield buffer[: elements * dtype.itemsize].view(dtype)
        except BaseException:
            self._lost.append(buffer)
            raise
        with self._lock:
            self._free.append(buffer)

    def _take(self, size: int) -> Tensor:
        with self._lock:
            fitting = [b for b in self._free if b.numel() >= size]
            if fitting:
                best = min(fitting, key=Tensor.numel)
                self._free = [b for b in self._free if b is not best]
                return best
            if self._free:  # the largest gives way, so that buffers do not pile up
                largest = max(self._free, key=Tensor.numel)
                self._free = [b for b in self._free if b is not largest]
        return torch.empty(max(size, 4096), dtype=torch.uint8)


class Communicator:
    """One process group, seen from this rank."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self.rank, self.size = group.rank(), group.size()
        self.pool = Pool()
        self._calls = 0
        self._ordered = False
        self._agreed: set[str] = set()
        self._proven: set[Schedule] = set()
        self._backends: dict[str, str] = {}
        self.asked: dict[tuple[Any, ...] | None, Request] = {}  # requests that were checked
        watched = self.size > 1 and self.backend("cpu") == "gloo"
        self._sentry = Sentry(group, _store(group)) if watched else None

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        assert group is not None, "the process group is gone"
        return group

    def backend(self, device: str) -> str:
        """The backend of this group for a type of device; "" if it has none."""
        if device not in self._backends:
            try:
                self._backends[device] = str(self.group._get_backend(torch.device(device)).name())
            except RuntimeError:
                return ""
        return self._backends[device]

    def remember(self, key: tuple[Any, ...] | None, asked: Request) -> None:
        """A request that was checked, for the next call that is made of the same."""
        if key is not None:
            if len(self.asked) >= _REQUESTS:
                self.asked.clear()
            self.asked[key] = asked

    @contextmanager
    def call(self, asked: Request, device: torch.device, timeout: float | None) -> Iterator[None]:
        """One call: all ranks ask for the same, and what breaks in it is raised with its reason."""
        self._calls += 1
        what = str(asked)
        if self._sentry is None or device.type != "cpu":
            self._agree(what, device)
            yield
            return
        with self._sentry.over(self._calls, what, timeout):
            if what not in self._agreed:
                with self._sentry.comparing():
                    self._agree(what, device)
            yield

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Calls in it come in one order on all ranks, by a program that they share: no tokens."""
        before, self._ordered = self._ordered, True
        try:
            yield
        finally:
            self._ordered = before

    def refuse(self, what: str, error: Exception) -> None:
        """This rank cannot take part in what would have been the next call."""
        self._calls += 1
        if self._sentry is not None:
            self._sentry.refuse(self._calls, what, error)

    def perform(
        self,
        schedule: Schedule,
        memory: Memory,
        total: int,
        like: Tensor,
        signature: str,
        sizes: tuple[int, ...] | None = None,
        op: ReduceOp = "sum",
    ) -> None:
        """Carry out a proven schedule on `total` elements of the dtype and device of `like`."""
        if schedule not in self._proven:
            prove(schedule)
            self._proven.add(schedule)
        dtype, device = like.dtype, like.device
        wires = self._wires(device, signature)
        batched = isinstance(wires, BatchedWires)
        plan = bind(schedule, self.rank, total, dtype.itemsize, sizes, batched)
        wide = accumulator_dtype(dtype, op)
        with (
            self.pool.borrow(plan.scratch, dtype, device) as slots,
            self.pool.borrow(plan.accumulator, wide, device) as accumulator,
        ):
            perform(plan, wires, memory, slots, accumulator, op)

    def token(self, signature: str) -> None:
        """Pass a byte around the ring under the tag of the request, before a call that has no tags.

        A rank gets one only from a neighbour that asks for the same. Bytes need gloo: without it nothing is passed.
        """
        if self._ordered or self.backend("cpu") != "gloo":
            return
        wires = self._wires(torch.device("cpu"), signature)
        if self.size > 1 and isinstance(wires, TaggedWires):
            byte = torch.zeros(2, dtype=torch.uint8)
            came = wires.recv(byte[:1], (self.rank - 1) % self.size)
            sent = wires.send(byte[1:], (self.rank + 1) % self.size)
            wires.wait(came)
            wires.wait(sent)

    def _wires(self, device: torch.device, signature: str) -> Wires:
        backend = self.backend(device.type)
        if backend == "gloo" and device.type == "cpu":
            return TaggedWires(self.group, crc32(signature.encode()))
        if backend == "nccl":
            return BatchedWires(self.group)
        name = backend or "no backend"
        raise CollectiveError(
            f"{signature}: point-to-point transfers of {device.type} tensors need gloo (cpu) or "
            f"nccl (cuda), and the group has {name} for them; algorithm='native' takes what it can"
        )

    def _agree(self, what: str, device: torch.device) -> None:
        """Compare the request with all ranks', unless one like it was compared before."""
        if what in self._agreed or self.size == 1:
            return
        headers = torch.zeros(self.size, HEADER, dtype=torch.uint8, device=device)
        headers[self.rank] = torch.frombuffer(bytearray(_header(what)), dtype=torch.uint8)
        if self.backend(device.type) == "gloo" and device.type == "cpu":
            schedule = build(f"all_gather recursive_doubling[{self.size}]")
            flat = headers.view(-1)
            self.perform(schedule, Flat(flat), flat.numel(), flat, "header")
        else:
            headers = native.all_gather(headers[self.rank], [HEADER] * self.size, self.group)
            headers = headers.view(self.size, HEADER)
        asked = dict(enumerate(map(bytes, headers.tolist())))
        if len(set(asked.values())) > 1:
            words = {rank: header[20:].rstrip(b"\0").decode() for rank, header in asked.items()}
            raise CollectiveError(differing(self._calls, words))
        if len(self._agreed) >= _KINDS:  # on all ranks at the same call
            self._agreed.clear()
        self._agreed.add(what)


def communicator(group: dist.ProcessGroup | None = None) -> Communicator:
    """The communicator of a group (None: the default group), made at its first use."""
    if not dist.is_available() or not dist.is_initialized():
        text = "there is no process group; torch.distributed.init_process_group makes one"
        raise CollectiveError(text)
    here: object = c10d._get_default_group() if group is None else group
    if here is dist.GroupMember.NON_GROUP_MEMBER:
        raise CollectiveError(f"rank {dist.get_rank()} is not in the group")
    if not isinstance(here, dist.ProcessGroup):
        raise CollectiveError(f"takes a process group, not {type(here).__name__}")
    if here not in _COMMUNICATORS:
        _COMMUNICATORS[here] = Communicator(here)
    return _COMMUNICATORS[here]


def _header(what: str) -> bytes:
    words = what.encode()
    shown = words[: HEADER - 20] if len(words) <= HEADER - 20 else words[: HEADER - 23] + b"..."
    return (hashlib.sha1(words).digest() + shown).ljust(HEADER, b"\0")


def _store(group: dist.ProcessGroup) -> c10d.Store:
    return c10d._get_process_group_store(group)


_COMMUNICATORS: weakref.WeakKeyDictionary[dist.ProcessGroup, Communicator] = (
    weakref.WeakKeyDictionary()
)
