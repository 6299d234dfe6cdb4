"""Memory that every rank of a group can read and write: buffers, flags, and the workspace they lie in.

A `Workspace` is one arena a rank, mapped by all ranks of the group. It is set up before any capture;
buffers and channels are cut from it in one order on every rank, so their offsets agree:

    Workspace ── buffer()  -> Buffer    one tensor on every rank: .local, .on[r]
              ── channel() -> Channel   one flag from every rank to every rank: .put(), .wait()
              ── ready()                everything filled, all ranks here; again after a failed replay

A flag is empty or full. `put` fills it at the consumer, `wait` waits until it is full and empties it,
so a captured graph is replayed without resets and holds no numbers of turns. The rule for a reuse
of a channel or of a buffer: between two puts, the producer must have waited for something that the
consumer put after its wait (and after its last read of the data). All-gathers and reduce-scatters that
alternate on one value fulfil it by themselves; elsewhere the consumer puts back on a second channel,
which starts full.

Three ways to signal, one protocol, so that they can be mixed on one channel:

    stream    the stream's own wait and write of a 32-bit word: no kernel, no multiprocessor
    kernel    a one-warp kernel; or from inside the kernel that writes the data (kernels/signals.py)
    host      a spin on the host, for arenas in shared memory (tests without a GPU)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

ALIGN = 256  # bytes; also keeps the flags of two channels on different cache lines


@dataclass(frozen=True)
class Buffer:
    """One tensor on every rank; `on[r]` is rank r's, as this rank addresses it."""

    on: tuple[Tensor, ...]
    rank: int

    @property
    def local(self) -> Tensor:
        return self.on[self.rank]

    def narrow(self, start: int, stop: int) -> Buffer:
        return Buffer(tuple(t[start:stop] for t in self.on), self.rank)


@dataclass(frozen=True)
class Rows:
    """Rows [t, d] on every rank, cut among the ranks: rank r owns rows bounds[r] to bounds[r + 1]."""

    buffer: Buffer
    bounds: tuple[int, ...]

    def of(self, owner: int, on: int | None = None) -> Tensor:
        """The rows that `owner` owns, in the copy of rank `on` (default: this rank's)."""
        return self.between(self.bounds[owner], self.bounds[owner + 1], on)

    def between(self, first: int, last: int, on: int | None = None) -> Tensor:
        copy = self.buffer.local if on is None else self.buffer.on[on]
        return copy[first:last]

    @property
    def own(self) -> Tensor:
        return self.of(self.rank)

    @property
    def rank(self) -> int:
        return self.buffer.rank

    @property
    def others(self) -> list[int]:
        """The other ranks, each rank starting behind itself, so that no two ask the same one."""
        ranks = len(self.buffer.on)
        return [(self.rank + step) % ranks for step in range(1, ranks)]


class Signals(Protocol):
    """How flags are filled and emptied, in the order of the current stream."""

    def fill(self, flags: Sequence[Tensor]) -> None: ...
    def drain(self, flags: Sequence[Tensor]) -> None: ...


@dataclass(frozen=True)
class Channel:
    """A flag from every rank to every rank of the workspace."""

    flags: Buffer  # int32 [ranks, words]; word 0 of row s is filled by rank s
    signals: Signals
    silent: bool = False  # reaches nobody

    def put(self, ranks: Sequence[int] | None = None) -> None:
        """Tell `ranks` (default: all others) that what this stream wrote so far is there."""
        self.signals.fill(self.outgoing(ranks))

    def wait(self, ranks: Sequence[int] | None = None) -> None:
        """Hold this stream until each of `ranks` (default: all others) has put."""
        self.signals.drain(self.incoming(ranks))

    def incoming(self, ranks: Sequence[int] | None = None) -> list[Tensor]:
        """The flags that `wait` empties."""
        return [self.flags.local[r, :1] for r in self.reached(ranks)]

    def outgoing(self, ranks: Sequence[int] | None = None) -> list[Tensor]:
        """The flags that `put` fills, for kernels that signal themselves."""
        return [self.flags.on[r][self.flags.rank, :1] for r in self.reached(ranks)]

    def reached(self, ranks: Sequence[int] | None = None) -> Sequence[int]:
        """Those of `ranks` (default: all others) that can be told and heard."""
        if self.silent:
            return []
        if ranks is not None:
            return ranks
        return [r for r in range(len(self.flags.on)) if r != self.flags.rank]


class Workspace:
    """One arena on every rank of a group, and what is cut from it."""

    alone = False  # nobody else is there

    def __init__(
        self,
        arenas: Sequence[Tensor],
        rank: int,
        signals: Signals,
        barrier: Callable[[], None],
        owner: Any = None,
    ) -> None:
        self.arenas, self.rank, self.signals = tuple(arenas), rank, signals
        self._barrier, self._owner = barrier, owner  # owner: what keeps the mapping alive
        self._used = 0
        self._resets: list[Callable[[], Any]] = []
        self._broken = False

    @classmethod
    def on_group(
        cls, nbytes: int, group: Any, device: torch.device, signals: Signals | None = None
    ) -> Workspace:
        """Allocate `nbytes` on every rank of `group` and map them all; collective."""
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symm_mem
        from torch._C._distributed_c10d import _SymmetricMemory

        # An allocation of its own: a pooled one may start inside a larger mapping.
        arena = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
        handle = symm_mem.rendezvous(arena, group)
        assert handle is not None, "symmetric memory: the group's ranks cannot map each other"
        arenas = [handle.get_buffer(r, (nbytes,), torch.uint8) for r in range(handle.world_size)]
        assert arenas[handle.rank].data_ptr() == arena.data_ptr()

        def barrier() -> None:
            torch.cuda.synchronize(device)
            dist.barrier(group)

        return cls(arenas, handle.rank, signals or StreamSignals(), barrier, (arena, handle))

    @property
    def ranks(self) -> int:
        return len(self.arenas)

    def buffer(
        self, shape: Sequence[int], dtype: torch.dtype, *, fill: int | None = None
    ) -> Buffer:
        """The next piece of the arena; `fill` is what `ready` sets it to."""
        nbytes, start = math.prod(shape) * dtype.itemsize, self._used
        self._used = start + -(-nbytes // ALIGN) * ALIGN
        size = self.arenas[self.rank].numel()
        assert self._used <= size, f"workspace of {size} bytes, {self._used} needed"
        pieces = (arena[start : start + nbytes] for arena in self.arenas)
        buffer = Buffer(tuple(p.view(dtype).view(*shape) for p in pieces), self.rank)
        if fill is not None:
            self.on_reset(lambda: buffer.local.fill_(fill))
        return buffer

    def channel(self, *, full: bool = False, signals: Signals | None = None) -> Channel:
        """A new channel; `full`: the first wait on it passes, as if every rank had put."""
        flags = self.buffer((self.ranks, ALIGN // 4), torch.int32, fill=int(full))
        return Channel(flags, signals or self.signals)

    def local_flags(self, *shape: int) -> Tensor:
        """Counters and flags of this rank alone, 64 bytes each; empty after `ready`."""
        words = torch.zeros(*shape, 16, dtype=torch.int32, device=self.arenas[self.rank].device)
        self.on_reset(words.zero_)
        return words[..., :1]

    def on_reset(self, action: Callable[[], Any]) -> None:
        self._resets.append(action)

    def brought(self, x: Tensor) -> None:
        """`x` is written by peers, or with what is pulled from them."""

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Around every call of a program. One that failed, which it did on all ranks, left signals behind."""
        if self._broken:
            self.ready()
        self.left(broken=True)
        yield
        self.left(broken=False)

    def left(self, *, broken: bool) -> None:
        """Note whether there may be signals that nobody will take."""
        self._broken = broken

    def ready(self) -> None:
        """Empty all flags and slots, then meet all ranks: before first use and after a failure."""
        self._barrier()  # nobody still writes
        for action in self._resets:
            action()
        self._broken = False
        self._barrier()  # nobody writes yet


class Idle(Workspace):
    """One arena in the place of all: a program over it does its own work, sends nothing and awaits nobody.

    What peers would bring is random and finite, as in `transport.Still`: its time is a floor.
    """

    alone = True

    @classmethod
    def on_device(cls, nbytes: int, rank: int, ranks: int, device: torch.device) -> Idle:
        arena = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        return cls([arena] * ranks, rank, Silence(), lambda: None)

    def channel(self, *, full: bool = False, signals: Signals | None = None) -> Channel:
        return replace(super().channel(full=full, signals=signals), silent=True)

    def brought(self, x: Tensor) -> None:
        self.on_reset(x.normal_)


def bytes_for(*pieces: tuple[Sequence[int], torch.dtype], channels: int = 0, ranks: int = 0) -> int:
    """What a workspace needs for buffers of these shapes and dtypes and for `channels`."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in pieces]
    return sum(-(-size // ALIGN) * ALIGN for size in sizes) + channels * ranks * ALIGN


class KernelSignals:
    """One-warp kernels; they need a free slot on a multiprocessor, which a matmul may hold back."""

    def fill(self, flags: Sequence[Tensor]) -> None:
        from plait.runtime.kernels.signals import fill_kernel

        fill_kernel[(1,)](tuple(flags), num_warps=1)

    def drain(self, flags: Sequence[Tensor]) -> None:
        from plait.runtime.kernels.signals import drain_kernel

        drain_kernel[(1,)](tuple(flags), num_warps=1)


class StreamSignals:
    """The stream's own memory operations: one node in a graph, no kernel.

    Unlike a kernel, `fill` does not wait for an empty flag: the rule of reuse has to hold.
    """

    def fill(self, flags: Sequence[Tensor]) -> None:
        from plait.runtime.memops import batch, write

        batch([write(flag.data_ptr(), 1) for flag in flags])

    def drain(self, flags: Sequence[Tensor]) -> None:
        from plait.runtime.memops import batch, wait_equal, write

        pairs = ((wait_equal(flag.data_ptr(), 1), write(flag.data_ptr(), 0)) for flag in flags)
        batch([operation for pair in pairs for operation in pair])


class Silence:
    """Tells and awaits nothing."""

    def fill(self, flags: Sequence[Tensor]) -> None:
        assert not flags

    def drain(self, flags: Sequence[Tensor]) -> None:
        assert not flags


class HostSignals:
    """A spin on the host over arenas in shared memory."""

    def __init__(self, timeout: float = 60.0) -> None:
        self.timeout = timeout

    def fill(self, flags: Sequence[Tensor]) -> None:
        for flag in flags:
            self._until(flag, 0)
            flag.fill_(1)

    def drain(self, flags: Sequence[Tensor]) -> None:
        for flag in flags:
            self._until(flag, 1)
            flag.fill_(0)

    def _until(self, flag: Tensor, value: int) -> None:
        limit = time.monotonic() + self.timeout
        while int(flag) != value:
            if time.monotonic() > limit:
                raise TimeoutError(f"flag is {int(flag)}, not {value}, after {self.timeout} s")
            time.sleep(0)
