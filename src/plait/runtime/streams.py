"""Streams: a move runs on a line of its own beside the compute, between its start and its wait.

    start   hands the move to the line and goes on; what it returns stands for the value on its way
    wait    the value, as soon as the line has done that move

A line does its moves one after another, in the order in which they were started, which is the same
on every rank; so does every other move of a program that has starts. On the CPU a line is a thread,
and the transfer of gloo runs while this thread computes; on CUDA it is a stream of high priority.

For autograd the two halves are each other's duals: the backward of a wait starts the dual move, and
the backward of the start waits for it. Between them runs what autograd has to do in between, which
is the reverse of what the forward did there.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from plait.passes.late import Queue
from plait.passes.partition import BACK, Site
from plait.rules.moves import Cut, Step
from plait.runtime.transport import Begun, MoveModule, Transport

Job = Callable[[], Tensor]


class Handle(Protocol):
    def wait(self) -> Tensor: ...


class Line(Protocol):
    def start(self, job: Job) -> Handle: ...


@dataclass
class Done:
    """A step without communication: it needs no line."""

    value: Tensor

    def wait(self) -> Tensor:
        return self.value


@dataclass
class _Awaited:
    """A move of which a line counts how many are not waited for yet."""

    handle: Handle
    open: Begun

    def wait(self) -> Tensor:
        self.open.count -= 1
        return self.handle.wait()


class _Promise:
    def __init__(self, job: Job) -> None:
        self.job: Job | None = job
        self.ready = threading.Event()
        self.value: Tensor | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        assert self.job is not None
        try:
            with torch.no_grad():
                self.value = self.job()
        except BaseException as error:  # raised again where it is waited for
            self.error = error
        self.job = None  # lets go of what it read
        self.ready.set()

    def wait(self) -> Tensor:
        self.ready.wait()
        if self.error is not None:
            raise self.error
        assert self.value is not None
        return self.value


class Thread:
    """The line of a CPU rank; it ends with its program."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Promise | None] = queue.SimpleQueue()
        threading.Thread(target=_work, args=(self._jobs,), name="plait moves", daemon=True).start()
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def start(self, job: Job) -> Handle:
        promise = _Promise(job)
        self._jobs.put(promise)
        return promise


def _work(jobs: queue.SimpleQueue[_Promise | None]) -> None:
    while (promise := jobs.get()) is not None:
        promise.run()
        del promise  # else it would keep what it moved until the next one


class Stream:
    """The line of a CUDA rank: its kernels are placed before those of the compute stream."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1)

    def start(self, job: Job) -> Handle:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream), torch.no_grad():
            value = job()
            event = self.stream.record_event()
        return _Arrival(value, event)


@dataclass
class _Arrival:
    value: Tensor
    event: Any

    def wait(self) -> Tensor:
        stream = torch.cuda.current_stream()
        stream.wait_event(self.event)
        self.value.record_stream(stream)
        return self.value


def line(device: torch.device) -> Line:
    return Stream(device) if device.type == "cuda" else Thread()


@dataclass(frozen=True)
class Beside(Transport):
    """A transport whose moves all run on one line; `run` starts one and waits for it."""

    under: Transport = field(kw_only=True)
    on: Line = field(kw_only=True)
    underway: Begun = field(default_factory=Begun, kw_only=True, compare=False)

    @property
    def open(self) -> int:
        return self.underway.count

    @classmethod
    def of(cls, transport: Transport, device: torch.device) -> Beside:  # type: ignore[override]
        t = transport
        return cls(
            t.group, t.rank, t.size, backward=t.backward, begun=t.begun, under=t, on=line(device)
        )

    def run(self, step: Step, x: Tensor, cut: Cut | None, algorithm: str) -> Tensor:
        return self.start(step, x, cut, algorithm).wait()

    def start(self, step: Step, x: Tensor, cut: Cut | None, algorithm: str) -> Handle:
        run = self.under.carry_out
        self.begun.count += step.collective is not None
        if step.collective is None:
            return Done(run(step, x, cut, algorithm))
        if x.is_cuda and isinstance(self.on, Stream):
            x.record_stream(self.on.stream)
        self.underway.count += 1
        return _Awaited(self.on.start(lambda: run(step, x, cut, algorithm)), self.underway)


@dataclass
class _Trip:
    """What the two halves of one move of one call share."""

    there: Handle | None = None
    back: Handle | None = None


@dataclass(frozen=True)
class Underway:
    """A value on its way. `token` is empty; it ties the halves together for autograd. `queue`: of matmuls that
    read the value, what their weights are owed (passes/meanwhile.py)."""

    token: Tensor | None
    trip: _Trip
    queue: Queue | None = None


@dataclass(frozen=True)
class _Way:
    """A site with the line that its moves run on."""

    site: Site
    transport: Beside
    algorithms: tuple[str, str]

    def forward(self, x: Tensor) -> Handle:
        c = self.site.conversion
        return self.transport.start(c.forward, x, c.cut, self.algorithms[0])

    def backward(self, grad: Tensor) -> Handle:
        c = self.site.conversion
        return self.transport.start(c.backward, grad, c.cut, self.algorithms[1])


class Start(nn.Module):
    def __init__(self, way: _Way) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor) -> Underway:
        trip = _Trip()
        if self.way.site.grad and torch.is_grad_enabled() and x.requires_grad:
            return Underway(_Start.apply(x, self.way, trip), trip)
        trip.there = self.way.forward(x)
        return Underway(None, trip)


class Wait(nn.Module):
    def __init__(self, way: _Way) -> None:
        super().__init__()
        self.way = way

    def forward(self, underway: Underway) -> Tensor:
        trip = underway.trip
        if underway.token is not None:
            return _Wait.apply(underway.token, self.way, trip)  # type: ignore[no-any-return]
        assert trip.there is not None
        return trip.there.wait()


def modules(
    sites: Mapping[str, Site], transport: Transport, algorithms: Mapping[str, str], fresh: Collection[str] = ()
) -> dict[str, Any]:
    """What runs the moves of a program; those in chunks by their halves. `fresh`: sites whose value is theirs alone."""
    out: dict[str, Any] = {}
    for name, site in sites.items():
        whole = site.of or name
        forward, backward = (algorithms.get(n, "native") for n in (whole, f"{whole}{BACK}"))
        if site.of:
            assert isinstance(transport, Beside)
            out |= halves(site, transport, forward, backward)
        else:
            out[name] = MoveModule(site, transport, forward, backward, fresh=name in fresh)
    return out


def halves(
    site: Site, transport: Beside, forward: str, backward: str
) -> dict[str, nn.Module]:
    """The modules of a site that is started and waited for apart, by the names in the graph."""
    way = _Way(site, transport, (forward, backward))
    return {f"{site.name}.start": Start(way), f"{site.name}.wait": Wait(way)}


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, way: _Way, trip: _Trip) -> Tensor:
        ctx.way, ctx.trip = way, trip
        trip.there = way.forward(x.detach())
        return x.new_empty(0)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor, None, None]:
        trip: _Trip = ctx.trip
        assert trip.back is not None, "the wait's backward comes first"
        with ctx.way.transport.backward():
            grad, trip.back = trip.back.wait(), None
        return grad, None, None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, way: _Way, trip: _Trip) -> Tensor:
        ctx.way, ctx.trip = way, trip
        assert trip.there is not None
        value, trip.there = trip.there.wait(), None
        return value.detach()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        with ctx.way.transport.way_back(grad):
            ctx.trip.back = ctx.way.backward(grad)
        return grad.new_empty(0), None, None
