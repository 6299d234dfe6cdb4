"""A device that does not exist: what a rank's direct moves do, written down as a trace.

Every rank's program is lowered and run in this process, one rank after another, on small tensors in the host's
memory. Streams are names, signals and the kernel that sums are lines of the trace, and what torch does is
seen by a dispatch mode. Values are garbage; what is done does not depend on them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from plait.passes.overlap.races import Span, Step, Trace
from plait.passes.overlap.schedule import Record, Wait
from plait.passes.rings import Route, find
from plait.plan.direct import HOP, RING
from plait.plan.plan import Overlapped
from plait.plan.planner import Planned
from plait.rules.moves import count
from plait.runtime import direct_calls, direct_training, pieces
from plait.runtime.executor import executable
from plait.runtime.handshake import Handshake, Reach
from plait.runtime.symmetric import Buffer, Workspace
from plait.runtime.transport import Still

BYTES = 1 << 20


@dataclass
class Memory:
    """Names of all storages, of all ranks; they are kept, so that none is given out twice."""

    names: dict[int, str] = field(default_factory=dict)
    kept: list[Tensor] = field(default_factory=list)

    def name(self, x: Tensor, owner: str) -> str:
        at = x.untyped_storage().data_ptr()
        if at not in self.names:
            self.names[at] = f"{owner}.{len(self.names)}"
            self.kept.append(x)
        return self.names[at]


@dataclass
class Tape:
    """What one rank does."""

    rank: int
    memory: Memory
    items: list[Any] = field(default_factory=list)
    lane: str = "compute"
    lanes: int = 0
    events: int = 0
    running: bool = False

    def spans(self, *tensors: Tensor | None) -> tuple[Span, ...]:
        out = []
        for x in tensors:
            if isinstance(x, Tensor) and x.numel():
                begin = x.storage_offset() * x.itemsize
                last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1
                out.append(Span(self.memory.name(x, f"r{self.rank}"), begin, begin + last * x.itemsize))
        return tuple(dict.fromkeys(out))

    def flags(self, flags: Sequence[Tensor]) -> tuple[str, ...]:
        return tuple(f"{s.memory}:{s.first}" for s in self.spans(*flags))

    def step(self, name: str, reads: Sequence[Any] = (), writes: Sequence[Any] = (), **flags: Any) -> None:
        if self.running:
            named = {k: self.flags(v) for k, v in flags.items()}
            self.items.append(Step(self.lane, name, self.spans(*reads), self.spans(*writes), **named))

    # -- signals ---------------------------------------------------------------------------------------

    def fill(self, flags: Sequence[Tensor]) -> None:
        self.step("fill", fills=flags)

    def drain(self, flags: Sequence[Tensor]) -> None:
        self.step("drain", drains=flags)

    # -- streams ---------------------------------------------------------------------------------------

    def beside(self, device: torch.device, *, first: bool = True) -> _Lane:
        self.lanes += 1
        return _Lane(self, f"lane{self.lanes}")

    def current(self, device: torch.device) -> _Lane:
        return _Lane(self, self.lane)

    # -- the kernel --------------------------------------------------------------------------------------

    def sum_norm(
        self, sources: Sequence[Tensor], residual: Any, weight: Any, bias: Any = None, *, eps: float, kind: str,
        residual_out: Any, rows_out: Tensor, far: Reach | None = None, push: Reach | None = None,
        shake: Handshake | None = None,
    ) -> None:  # fmt: skip
        read = [residual, weight, bias, *(_near(s, far) for s in sources)]
        written = [residual_out, rows_out]
        if far is not None:
            read += [t[far.first : far.last] for t in far.tensors]
        if push is not None:
            written += [t[push.first : push.last] for t in push.tensors]
        shake = shake or Handshake(rows_out)
        for flags in (shake.enter_fills, shake.leave_fills):
            assert len(set(self.flags(flags))) == len(flags)
        self.step("enter", fills=shake.enter_fills)
        self.step("sum_norm", read, written, drains=shake.enter_drains, fills=shake.leave_fills)
        self.step("leave", drains=shake.leave_drains)


def _near(source: Tensor, far: Reach | None) -> Tensor:
    """The rows of a term that are read from where they were collected: what is left beside the far ones."""
    if far is None:
        return source
    return source[far.last :] if far.first == 0 else source[: far.first]


@dataclass(frozen=True)
class _Lane:
    tape: Tape
    name: str

    @contextmanager
    def __call__(self) -> Iterator[None]:
        before, self.tape.lane = self.tape.lane, self.name
        try:
            yield
        finally:
            self.tape.lane = before

    def mark(self) -> str:
        event = f"e{self.tape.events}"
        self.tape.events += 1
        if self.tape.running:
            self.tape.items.append(Record(self.name, event))
        return event

    def after(self, *events: str | None) -> None:
        if self.tape.running:
            self.tape.items += [Wait(self.name, e) for e in events if e is not None]


class _Seen(TorchDispatchMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
        written = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        view = not written and any(r.alias_info is not None for r in func._schema.returns)
        if not view and not func._schema.name.startswith("aten::empty"):
            reads = [x for name, v in given.items() if name not in written for x in _tensors(v)]
            writes = [x for name in written for x in _tensors(given.get(name))] or _tensors(out)
            self.tape.step(func._schema.name.removeprefix("aten::"), reads, writes)
        return out


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(value) if isinstance(x, Tensor)]


@dataclass(frozen=True)
class Shots:
    """One-hop sums (runtime/kernels/oneshot.py), each program of the kernel on a lane of its own.

    An element that is not empty has arrived, and its reader empties it: the data are the flags. Rows are
    taken whole, as a program does: it goes on when all elements of a row are here.
    """

    tape: Tape
    workspace: Workspace
    slots: Buffer
    turns: list[int]

    @classmethod
    def of(cls, tape: Tape, workspace: Workspace, rows: int, width: int, dtype: torch.dtype) -> Shots:
        slots = workspace.buffer((BANKS, workspace.ranks, rows, width), dtype)
        return cls(tape, workspace, slots, [0] * rows)

    def all_reduce_norm(
        self, x: Tensor, residual: Any = None, weight: Any = None, bias: Any = None, *,
        residual_out: Any = None, rows_out: Tensor, eps: float = 0.0, kind: str = "none",
    ) -> None:  # fmt: skip
        compute, ends = _Lane(self.tape, self.tape.lane), []
        begun = compute.mark()
        for row in range(len(x)):
            mine, old, total, out = (None if t is None else t[row] for t in (x, residual, residual_out, rows_out))
            lane = _Lane(self.tape, f"row{row}")
            lane.after(begun)
            with lane():
                self._sum(row, mine)
                self.tape.step("norm", [mine, old, weight, bias], [total, out])
            ends.append(lane.mark())
        compute.after(*ends)

    def _sum(self, row: int, mine: Any) -> None:
        """The program's turn is counted on the device, so that a replay goes on where the last one ended."""
        me, bank = self.tape.rank, self.turns[row] % BANKS
        others = [r for r in range(self.workspace.ranks) if r != me]
        there = [self.slots.on[r][bank, me, row] for r in others]
        self.tape.step("push", [mine], there, fills=there)
        for r in others:
            here = self.slots.local[bank, r, row]
            self.tape.step("poll", [here], [here], drains=[here])
        self.turns[row] += self.tape.running


BANKS = 2  # of the slots, in turn


def record(
    planned: Planned, n: int, route: Route, *, alone: bool = False, calls: int = 1
) -> tuple[list[Trace], list[str]]:
    """The trace of every rank, all rings of the program direct by `route`; and the flags that begin full.

    `alone`: with the transfers left out. `calls`: that follow each other; of two, one-hop sums are direct too,
    which are as they were at the beginning after every second call.
    """
    memory = Memory()
    arenas = [torch.zeros(BYTES, dtype=torch.uint8) for _ in range(n)]
    for rank, arena in enumerate(arenas):
        memory.names[arena.untyped_storage().data_ptr()] = f"r{rank}"
    traces, full = [], dict[str, None]()
    for rank in range(n):
        tape = Tape(rank, memory)
        workspace = Recorded(arenas, rank, tape, full)
        traces.append(_one(planned, n, route, tape, None if alone else workspace, calls))
    return traces, list(full)


def _one(
    planned: Planned, n: int, route: Route, tape: Tape, workspace: Workspace | None, calls: int
) -> Trace:
    rank, cpu = tape.rank, torch.device("cpu")
    local = planned.local(rank)
    found = find(planned.program, local)
    sites = {e.site.name: f"{RING} {route}" for events in found.rings.values() for e in events}
    sites |= {few.site.name: HOP for few in found.few if calls > 1}
    forms = [Overlapped(s, form, (s,), 0, 0.0, 0.0, 0.0) for s, form in sites.items()]
    planned = replace(planned, plan=replace(planned.plan, overlaps=tuple(forms)))
    still = Still(None, rank, n)
    kernels = ModuleType("norm")
    kernels.sum_norm = tape.sum_norm  # type: ignore[attr-defined]
    with ExitStack() as stack:
        shots = ModuleType("oneshot")
        shots.OneShot = partial(Shots.of, tape)  # type: ignore[attr-defined]
        names = {"norm": kernels, "oneshot": shots}
        stack.enter_context(patch.dict(sys.modules, {f"plait.runtime.kernels.{n}": m for n, m in names.items()}))
        for module in (pieces, direct_calls, direct_training):
            stack.enter_context(patch.object(module, "Lane", tape))
        made = executable(planned, still, cpu, still.arena if workspace is None else lambda *_: workspace)
        feed = _feed(made.local, planned)
        tape.running = True
        stack.enter_context(_Seen(tape))
        stack.enter_context(torch.set_grad_enabled(planned.program.training))
        for _ in range(calls):
            outs = [x for x in made.module(*feed) if x.requires_grad]
            if outs:
                asked = [x for x in feed if x.requires_grad]
                torch.autograd.grad(outs, asked, list(map(torch.ones_like, outs)), allow_unused=True)
    return tuple(tape.items)


class Recorded(Workspace):
    def __init__(self, arenas: list[Tensor], rank: int, tape: Tape, full: dict[str, None]) -> None:
        super().__init__(arenas, rank, tape, lambda: None)
        self.tape, self.begin = tape, full

    def channel(self, *, full: bool = False, signals: Any = None) -> Any:
        made = super().channel(full=full, signals=signals)
        if full:
            self.begin |= dict.fromkeys(self.tape.flags(made.incoming()))
        return made


def _feed(local: Any, planned: Planned) -> list[Tensor]:
    out = []
    for share in local.shares:
        shape = list(share.weight.shape)
        if share.cut is not None:
            shape[share.cut.dim] = count(share.cut.rows[local.rank])
        asks = planned.program.training and share.weight.requires_grad
        out.append(torch.zeros(shape, dtype=share.weight.dtype, requires_grad=asks))
    values = {x.name: x.meta["val"] for x in planned.program.graph.nodes if x.op == "placeholder"}
    return out + [
        torch.zeros(tuple(values[i.node].shape), dtype=values[i.node].dtype)
        for i in planned.program.inputs
        if i.node is not None
    ]
