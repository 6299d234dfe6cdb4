"""Job: from a program to what runs it on this rank, the first time and for other forms of call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.capture.join import Join, along
from plait.capture.loss import Loss, with_loss
from plait.capture.state import State
from plait.compiler.source import Source
from plait.errors import CaptureError, InputError, LaidError
from plait.passes.microbatch import Joined, Uncut, why_uncut
from plait.plan import planner, rival
from plait.plan.plan import Plan
from plait.plan.planner import Held, Laid, Planned
from plait.program import Program
from plait.runtime.agree import Agreement
from plait.runtime.executor import Executable, executable, layouts
from plait.runtime.holdings import Holdings, Values, no_rows, part_of
from plait.runtime.staging import Seat, Staging
from plait.runtime.weights import locate, open_source


@dataclass(frozen=True)
class Job:
    """One compile on one rank."""

    source: Source
    options: planner.Options
    seat: Seat
    agreement: Agreement
    saved: Plan | None = None
    staging: Staging | None = None  # of a pipeline
    laid: Laid | None = None  # by the joint choice, of the whole batch
    measure: bool = True

    @property
    def device(self) -> torch.device:
        return self.source.device

    def build(self, program: Program, first: Any = None, joined: Joined | None = None) -> Any:
        """What runs the program on this rank; `first` holds the weights that it must take."""
        if self.staging is not None:
            return self.staging.build(
                program, self.options, self.agreement, self.device, self.saved, first, joined
            )
        fixed = None if first is None else layouts(first.local)
        return executable(self.plan(program, fixed), self.seat.transport, self.device)

    def plan(self, program: Program, fixed: Held | None = None) -> Planned:
        """Rank 0's plan on every rank; all ranks must have captured the same program."""
        self.agreement.same("compile", program.compared)
        if self.saved is not None and fixed is None:
            return planner.replay(program, self.saved, self.options)
        laid = self.laid if fixed is None else None

        def make() -> Planned:
            made = planner.make(program, self.options, fixed, laid)
            return replace(made, plan=replace(made.plan, dp=self.seat.seats.mesh.dp))

        return self.shared(program, make)

    def shared(self, program: Program, make: Callable[[], Planned]) -> Planned:
        """What rank 0 makes, on every rank."""
        mine: Planned | None = None
        text = ""
        with self.agreement.planning():
            if self.agreement.plans:
                mine = make()
                text = mine.plan.to_json()
        chosen = Plan.from_json(self.agreement.broadcast("plan", text))
        return mine if mine is not None else planner.replay(program, chosen, self.options)

    def rewoven(self, first: Any, plan: Plan) -> Any:
        """`first` as another plan of the same program has it, over the same weights."""
        if self.staging is not None:
            return self.staging.rewoven(first, plan, self.options, self.agreement, self.device)
        return executable(rival.rewoven(first.planned, plan), self.seat.transport, self.device)

    @property
    def beside(self) -> dist.ProcessGroup | None:
        """The ranks that a call needs."""
        return self.seat.transport.group if self.staging is None else self.seat.group

    def load(self, program: Program, first: Any, weights: Any, runs: Sequence[Sequence[str]]) -> Holdings:
        """This rank's parts of the weights, from `weights` or from the live model; those of `runs` in a row."""
        rank, source = self.seat.transport.rank, self.source
        with self.agreement.step("load"):
            opened = open_source(weights) if weights is not None else None
            loading = locate(
                program.weights, model=source.model, source=opened, unused=program.unused
            )
            shares = {s.weight.name: s for s in first.local.shares}
            unused = {w.name: w for w in program.unused}
            parts = {n: part_of(s.weight, s.cut, rank) for n, s in shares.items()}
            parts |= {n: part_of(w, None, rank) for n, w in unused.items()}
            places = self.staging.places(first, self.device) if self.staging is not None else None
            if places is not None:
                parts = {n: part for n, part in parts.items() if places.holds(n)}
                parts |= no_rows(program.weights, parts)
            tensors: dict[str, Tensor] = loading.load(
                parts, device=self.device, dtype=source.dtype, runs=runs
            )
        for weight in (*program.weights, *program.unused):
            if weight.kind == "parameter" and weight.name in tensors:
                value = tensors[weight.name]
                tensors[weight.name] = nn.Parameter(value, requires_grad=weight.requires_grad)
        return Holdings(shares, tensors, unused, self.seat, places)

    def again(self, first: Executable) -> Any:
        """Programs for other forms of call, with the weights as they are loaded."""
        job = replace(self, options=rival.lasting(self.options, first.planned.plan))

        def recompile(
            args: Sequence[Any],
            kwargs: Mapping[str, Any],
            state: State,
            values: Values,
            loss: Loss,
            cut: bool = False,
        ) -> Any:
            """`cut`: the plain program of a step runs in micro-batches, and so should this one."""
            source = replace(self.source, args=args, kwargs=kwargs)
            if loss.asked:
                source = replace(source, model=with_loss(source.model, loss), dynamic=None)
            program: Program | None = None
            joined: Joined | None = None
            reason = ""
            with self.agreement.step("compile"):
                try:
                    program = source.capture_again(state, values)
                    reason = why_uncut(program) if cut else ""
                    _same_weights(first.planned.program, program)
                except CaptureError as error:
                    if not loss.asked:
                        raise
                    reason = str(error)
            if loss.every is not None:
                program, joined, reason = self._join(source, program, loss, state, values, reason)
            if loss.asked:
                self.agreement.same("compile", [reason or f"{loss} is captured"])
            if program is None or reason:
                return reason
            try:
                return job.build(program, first, joined)
            except LaidError as error:  # on every rank; its loss takes weights apart otherwise than they are loaded
                if not loss.asked:
                    raise
                return str(error)

        return recompile

    def _join(
        self,
        source: Source,
        own: Program | None,
        loss: Loss,
        state: State,
        values: Values,
        reason: str,
    ) -> tuple[Program | None, Joined | None, str]:
        """The program of all replicas' batches together, or why there is none."""
        agreement, program = self.agreement, None
        failed = next(filter(None, agreement.all_replicas("join", reason if own is None else "")), "")
        if failed:
            return None, None, failed
        told = agreement.all_replicas("join", along(own) if own is not None else None)
        with agreement.step("join"):
            join = Join.of(told, loss.every)
        if not join.possible:
            return None, None, "no input has a dim that holds the batch"
        args, kwargs = source.args, source.kwargs or {}
        rest = agreement.all_replicas("join", join.rest(args, kwargs))
        if len(set(rest)) > 1:
            raise InputError("step: inputs without a batch differ between replicas; pass the same")
        found: Joined | Uncut = Uncut("")
        with agreement.step("join"):
            args, kwargs = join.example(args, kwargs)
            try:
                program = replace(source, args=args, kwargs=kwargs).capture_again(state, values)
                found = join.found(program, self.seat.replicas.number)
            except CaptureError as error:
                found = Uncut(str(error))
        if isinstance(found, Uncut):
            return None, None, found.reason
        return program, found, ""


def _same_weights(before: Program, now: Program) -> None:
    """A compiled module has its weights already: another program of it has to take them."""
    held = {n: w for w in (*before.weights, *before.unused) for n in w.names}
    wrong = [
        f"{w.name} {list(w.shape)} {w.dtype}, compiled as "
        + (f"{list(old.shape)} {old.dtype}" if old is not None else "nothing")
        for w in now.weights
        if w.kind != "constant"
        for old in [held.get(w.name)]
        if old is None or (old.shape, old.dtype) != (w.shape, w.dtype)
    ]
    if wrong:
        raise CaptureError(
            f"the weights of the model changed after the compile: {'; '.join(wrong)}. Compile the "
            "model again"
        )
