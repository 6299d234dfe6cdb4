"""Rows: what is timed. The unmodified model, compiled as it is and with overlap off.

The blocking rows are the one program that `overlap="off"` chooses; they differ in the algorithm of
their collectives and in nothing else. Chunks are cut from that program, and a floor is a program
whose transfers are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.api import compile as compile_model
from plait.bench.figures import Kind
from plait.bench.textbook import CHUNKS, textbook
from plait.cluster import Cluster
from plait.errors import InputError
from plait.models import Example
from plait.passes.overlap.choose import choose
from plait.passes.overlap.timeline import Machine
from plait.plan import overlaps, planner, rival
from plait.plan.plan import Plan
from plait.plan.planner import Planned
from plait.runtime.compiled import Compiled
from plait.runtime.executor import executable
from plait.runtime.transport import Still

Make = Callable[[], Planned | None]  # None: there is no such program


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


def main_output(out: Any) -> Tensor:
    """The largest floating tensor of what a step returns."""
    return max(tensors(out), key=lambda x: x.numel()).detach().float()


@dataclass(frozen=True)
class Subject:
    """The compiled models, and what makes other programs of them."""

    compiled: Compiled
    plain: Compiled  # overlap is off
    cluster: Cluster
    call: Call
    device: torch.device

    @classmethod
    def of(cls, call: Call, cluster: Cluster, device: torch.device) -> Subject:
        auto = compiled(call, cluster, device, None)
        return cls(auto, compiled(call, cluster, device, None, "off"), cluster, call, device)

    @property
    def blocking(self) -> Planned:
        return self.plain._programs.first.planned

    def rows(self, chunks: Sequence[int] = (), without: Collection[str] = ()) -> Iterator[Row]:
        """Blocking ones first, the floors last; a row more for every number of `chunks`."""
        for name, kind, make, note in self._programs(chunks):
            if name in without:
                continue
            if kind == "overlapped":
                yield self.own()
            elif (planned := make()) is not None:
                yield self.row(name, kind, planned, note or _how(planned))
        overlapped = self.compiled._programs.first.planned
        if rival.overlapped(overlapped.plan) and OWN_FLOOR not in without:
            yield replace(self.row(OWN_FLOOR, "floor", overlapped, IDLE, self.compiled), predicted=None)

    def _programs(self, chunks: Sequence[int]) -> Iterator[tuple[str, Kind, Make, str]]:
        for name, algorithm in BLOCKING.items():
            yield name, "blocking", partial(self.whole, algorithm), ""
        yield "textbook", "textbook", self.recipe, f"sums in {CHUNKS} chunks"
        yield "overlapped", "overlapped", lambda: None, ""
        for count in chunks:
            yield f"{count} chunks", "forced", partial(self.cut, count), ""
        yield "floor", "floor", self.idle, IDLE

    def own(self) -> Row:
        """plait's own choice: the compiled model as it is."""
        step = self.call.of(self.compiled)
        plan = self.compiled.plan
        forms = dict.fromkeys(o.form for o in plan.overlaps if o.form != "whole")
        return Row("overlapped", "overlapped", step, plan.seconds, ", ".join(forms) or _whole(plan))

    def row(
        self, name: str, kind: Kind, planned: Planned, note: str, over: Compiled | None = None
    ) -> Row:
        """`over`: whose weights the program takes, and whose calls it stands in for."""
        over = over or self.plain
        transport = over._holdings.transport
        if kind == "floor":
            transport = Still(transport.group, transport.rank, transport.size)
        program = executable(planned, transport, self.device)
        step, programs = self.call.of(over), over._programs

        def run() -> Any:
            with programs.standing_in(program):
                return step()

        return Row(name, kind, run, planned.plan.seconds, note)

    def idle(self) -> Planned:
        """The blocking program, predicted without its transfers."""
        plan = self.blocking.plan
        return replace(self.blocking, plan=replace(plan, seconds=work(plan)))

    def recipe(self) -> Planned | None:
        made = textbook(self.whole("native"), self.machine())
        return made if made.chosen else None

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

    def cut(self, count: int) -> Planned | None:
        """Every region that can be in `count` chunks."""
        whole = self.blocking
        chosen, weighed = choose(whole.flow, count, self.machine(), whole.plan.tp)
        seconds = whole.plan.seconds - sum(c.gain for c in weighed if c.region in chosen)
        made = replace(whole, plan=replace(whole.plan, seconds=seconds), chosen=chosen)
        return made if chosen else None

    def machine(self) -> Machine:
        options = planner.Options(self.plain.plan.tp, self.cluster)
        known: dict[tuple[str, float], float] = {}

        def seconds(kind: str, nbytes: float) -> float:
            if (kind, nbytes) not in known:
                known[kind, nbytes] = planner.pick(options, kind, nbytes)[1]
            return known[kind, nbytes]

        return overlaps.machine(self.cluster, options.tp, seconds)


def alone(call: Call, cluster: Cluster, device: torch.device) -> tuple[Row, Compiled]:
    """One device that runs all the shares: on every rank, all of them at once."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    made = compiled(call, cluster.subset([0]), device, groups[dist.get_rank()])
    return Row(ALONE, "alone", call.of(made), made.plan.seconds), made


def compiled(
    call: Call, cluster: Cluster, device: torch.device, group: Any, overlap: str = "auto"
) -> Compiled:
    example = call.example
    return compile_model(
        example.model,
        example.args,
        example.kwargs,
        tp="auto",
        pp=1,  # the rows are of one stage
        cluster=cluster,
        group=group,
        device=device,
        weights=example.weights,
        training=call.train,
        overlap=overlap,
    )


def refuse_unknown(without: Collection[str], chunks: Sequence[int]) -> None:
    """InputError, with the rows there are, for a row to leave out that is none of them."""
    there = [*BLOCKING, "textbook", "overlapped", *(f"{n} chunks" for n in chunks), "floor", OWN_FLOOR]
    unknown = [repr(name) for name in without if name not in there]
    if unknown:
        always = f"; {ALONE!r} is always timed" if ALONE in without else ""
        raise InputError(f"--without {', '.join(unknown)}: it takes {', '.join(there)}{always}")


def clear(module: nn.Module) -> None:
    for p in module.parameters():
        p.grad = None


def work(plan: Plan) -> float:
    """Predicted seconds of a call without its transfers."""
    saved = sum(o.whole - o.seconds for o in plan.overlaps)
    return plan.seconds + saved - sum(p.seconds for p in plan.collectives)


def _whole(plan: Plan) -> str:
    """Why nothing is overlapped: what most of what was weighed says."""
    why = Counter([*(o.reason for o in plan.overlaps if o.reason), *plan.bare.values()]).most_common(1)
    return ": ".join(["all whole", *(words for words, _ in why)])


def _how(planned: Planned) -> str:
    """Forms of chunks, or algorithms."""
    forms = dict.fromkeys(map(str, planned.chosen.values()))
    algorithms = dict.fromkeys(p.algorithm for p in planned.plan.collectives)
    return ", ".join(forms or algorithms) or "no collectives"


IDLE, OWN_FLOOR = "transfers left out", "floor of overlapped"
ALONE = "one device"
BLOCKING = {  # row -> the algorithm of every collective; None: the plan's
    "parameter server": "parameter_server",
    "blocking ring": "ring",
    "blocking native": "native",
    "blocking best algorithm": None,
}
