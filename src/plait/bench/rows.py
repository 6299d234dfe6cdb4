"""Rows: what is timed. One compiled model, whose program is orchestrated in several ways.

`plait.compile` chooses how weights are split, once. The blocking rows are what it would choose with
`overlap="off"` for the weights as they lie; they differ in the algorithm of their collectives and in
nothing else. Chunks are cut from that program, and floors are programs whose transfers are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.api import compile as compile_model
from plait.bench.figures import Kind
from plait.bench.textbook import CHUNKS, textbook
from plait.cluster import Cluster
from plait.models import Example
from plait.passes.overlap.choose import choose
from plait.passes.overlap.timeline import Machine
from plait.plan import overlaps, planner
from plait.plan.plan import Plan
from plait.plan.planner import Planned
from plait.runtime.compiled import Compiled
from plait.runtime.executor import Executable, executable, layouts
from plait.runtime.transport import Still


@dataclass(frozen=True)
class Row:
    """`step` runs one forward, or a forward and a backward, and returns its output."""

    name: str
    kind: Kind
    step: Callable[[], Any]
    predicted: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Call:
    """The call that every row makes, of whatever module."""

    example: Example
    train: bool

    def of(self, module: Callable[..., Any]) -> Callable[[], Any]:
        def step() -> Any:
            with torch.set_grad_enabled(self.train):
                out = module(*self.example.args, **self.example.kwargs)
                if self.train:
                    loss(out).backward()  # type: ignore[no-untyped-call]
            return out

        return step


def loss(out: Any) -> Tensor:
    """The model's own, or else the mean square of what it returns."""
    own = out.get("loss") if hasattr(out, "get") else None
    if own is not None:
        return own  # type: ignore[no-any-return]
    return sum(
        (x.float().square().mean() for x in tensors(out) if x.requires_grad), start=torch.zeros(())
    )


def tensors(out: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor) and x.is_floating_point()]


@dataclass(frozen=True)
class Subject:
    """The compiled model, and what makes other programs of it."""

    compiled: Compiled
    cluster: Cluster
    call: Call
    device: torch.device
    blocking: Planned  # nothing of it is overlapped

    @classmethod
    def of(cls, call: Call, cluster: Cluster, device: torch.device) -> Subject:
        made = compiled(call, cluster, device, None)
        return cls(made, cluster, call, device, _unlapped(made, cluster))

    @property
    def planned(self) -> Planned:
        return self.compiled._programs.first.planned

    def rows(self, chunks: Sequence[int] = ()) -> Iterator[Row]:
        """Blocking ones first, the floors last; a row more for every number of `chunks`."""
        blocking = {
            "parameter server": self.whole("parameter_server"),
            "blocking ring": self.whole("ring"),
            "blocking native": self.whole("native"),
            "blocking best algorithm": self.whole(),
        }
        for name, planned in blocking.items():
            yield self.row(name, "blocking", planned, _algorithms(planned.plan))
        recipe = textbook(blocking["blocking native"], self.machine())
        if recipe.chosen:
            yield self.row("textbook", "textbook", recipe, f"{len(recipe.chosen)} sums in {CHUNKS} chunks")
        yield self.own()
        whole = blocking["blocking best algorithm"]
        for count in chunks:
            cut = self.cut(whole, count)
            if cut.chosen:
                forms = ", ".join(dict.fromkeys(map(str, cut.chosen.values())))
                yield self.row(f"{count} chunks", "forced", cut, forms)
        yield self.floor("floor", replace(whole, plan=replace(whole.plan, seconds=work(whole.plan))))
        if self.planned.chosen:
            yield self.floor("floor of overlapped", self.planned)

    def own(self) -> Row:
        """plait's own choice: the compiled model as it is."""
        step = self.call.of(self.compiled)
        plan = self.planned.plan
        forms = dict.fromkeys(o.form for o in plan.overlaps if o.form != "whole")
        return Row("overlapped", "overlapped", step, plan.seconds, ", ".join(forms) or "all whole")

    def row(self, name: str, kind: Kind, planned: Planned, note: str) -> Row:
        program = executable(planned, self.compiled._transport, self.device)
        return Row(name, kind, self._by(program), planned.plan.seconds, note)

    def floor(self, name: str, planned: Planned) -> Row:
        t = self.compiled._transport
        program = executable(planned, Still(t.group, t.rank, t.size), self.device)
        return Row(name, "floor", self._by(program), planned.plan.seconds, "transfers left out")

    def whole(self, algorithm: str | None = None) -> Planned:
        """Every collective by `algorithm`, or by the one that the plan has."""
        plan = self.blocking.plan
        if algorithm is None:
            return self.blocking
        options = planner.Options(plan.tp, self.cluster, algorithm, overlap="off")
        placed = tuple(
            replace(p, algorithm=name, seconds=seconds)
            for p in plan.collectives
            for name, seconds in [planner.pick(options, p.collective, p.nbytes, p.name)]
        )
        seconds = work(plan) + sum(p.seconds for p in placed)
        return replace(self.blocking, plan=replace(plan, collectives=placed, seconds=seconds))

    def cut(self, whole: Planned, count: int) -> Planned:
        """Every region that can be in `count` chunks."""
        chosen, weighed = choose(whole.flow, count, self.machine(), whole.plan.tp)
        seconds = whole.plan.seconds - sum(c.gain for c in weighed if c.region in chosen)
        return replace(whole, plan=replace(whole.plan, seconds=seconds), chosen=chosen)

    def machine(self) -> Machine:
        options = planner.Options(self.planned.plan.tp, self.cluster)
        known: dict[tuple[str, float], float] = {}

        def seconds(kind: str, nbytes: float) -> float:
            if (kind, nbytes) not in known:
                known[kind, nbytes] = planner.pick(options, kind, nbytes)[1]
            return known[kind, nbytes]

        return overlaps.machine(self.cluster, options.tp, seconds)

    def _by(self, program: Executable) -> Callable[[], Any]:
        """A call of the compiled model which runs `program`."""
        step, programs = self.call.of(self.compiled), self.compiled._programs

        def run() -> Any:
            with programs.standing_in(program):
                return step()

        return run


def _unlapped(made: Compiled, cluster: Cluster) -> Planned:
    """Rank 0's plan for the same program with overlap off, weights as they lie."""
    first = made._programs.first
    program, plan = first.planned.program, first.planned.plan
    options = planner.Options(plan.tp, cluster, overlap="off")
    chosen = planner.make(program, options, layouts(first.local))
    told = Plan.from_json(made._agreement.broadcast("plan", chosen.plan.to_json()))
    return chosen if told == chosen.plan else planner.replay(program, told, options)


def alone(call: Call, cluster: Cluster, device: torch.device) -> tuple[Row, Compiled]:
    """One device that runs all the shares: on every rank, all of them at once."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    made = compiled(call, cluster.subset([0]), device, groups[dist.get_rank()])
    return Row("one device", "alone", call.of(made), made.plan.seconds), made


def compiled(call: Call, cluster: Cluster, device: torch.device, group: Any) -> Compiled:
    example = call.example
    return compile_model(
        example.model,
        example.args,
        example.kwargs,
        cluster=cluster,
        group=group,
        device=device,
        weights=example.weights,
        training=call.train,
    )


def clear(module: nn.Module) -> None:
    for p in module.parameters():
        p.grad = None


def work(plan: Plan) -> float:
    """Predicted seconds of a call without its transfers."""
    saved = sum(o.whole - o.seconds for o in plan.overlaps)
    return plan.seconds + saved - sum(p.seconds for p in plan.collectives)


def _algorithms(plan: Plan) -> str:
    return ", ".join(dict.fromkeys(p.algorithm for p in plan.collectives)) or "no collectives"
