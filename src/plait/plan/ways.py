"""Ways: one way to run a program on a cluster, its cut into stages, and what it costs.

    Group      a program on one tensor-parallel group: its layouts, its work, lines of micro-batches
    Way        such groups where they stand, micro-batches, a schedule, activations kept or recomputed
    Candidate  a way as it was weighed, by the stages of its cut (plan/plan.py)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from plait.mesh import Mesh
from plait.passes import schedule
from plait.passes.schedule import Schedule
from plait.plan.gradients import bare, room
from plait.plan.placement import Link, Placement
from plait.plan.plan import Candidate, Placed
from plait.plan.planner import Laid
from plait.plan.prices import Collective
from plait.plan.recompute import recomputed
from plait.plan.stages import Cuts, Line, cut
from plait.plan.work import Work


@dataclass(frozen=True)
class Group:
    """A program on one tensor-parallel group."""

    laid: Laid
    work: Work
    collective: Collective
    lines: dict[tuple[object, ...], Line] = field(default_factory=dict)

    def line(self, share: float, pieces: int) -> Line:
        """Of one of so many micro-batches, with a share of the batch."""
        if (share, pieces) not in self.lines:
            self.lines[share, pieces] = self.work.line(share, self.collective, pieces)
        return self.lines[share, pieces]

    def again(self, share: float, pieces: int, owed: int) -> Line:
        """The same where activations are recomputed; `owed`: see passes/schedule.py."""
        if (share, pieces, owed) not in self.lines:
            whole = float(owed) if owed else None
            self.lines[share, pieces, owed] = recomputed(self.line(share, pieces), whole)
        return self.lines[share, pieces, owed]


@dataclass(frozen=True)
class Way:
    placement: Placement
    group: Group
    pieces: int
    share: float  # of the batch, in a micro-batch
    schedule: str
    recompute: str
    outputs: float  # seconds from the last stage to all who want them

    @property
    def mesh(self) -> Mesh:
        return self.placement.mesh

    @property
    def training(self) -> bool:
        return self.group.laid.program.training

    @property
    def order(self) -> Schedule:
        return _order(self.schedule, self.mesh.pp, self.pieces, self.training)

    @property
    def line(self) -> Line:
        """Of a micro-batch."""
        if self.recompute == "off":
            return self.group.line(self.share, self.pieces)
        return self.group.again(self.share, self.pieces, schedule.owed(self.order))

    def least(self, latency: bool) -> float:
        """Seconds that no cut goes below: of a call, or between results of calls that follow one another."""
        whole = float(self.line.work[-1])
        if latency or self.training:
            seconds = schedule.least(self.schedule, self.mesh.pp, self.pieces, whole, self.training)
        else:
            seconds = whole * self.pieces / self.mesh.pp
        return (seconds + self.outputs) / (1 if latency else self.mesh.dp)

    def cuts(self, memory: float) -> Cuts:
        """The best for places of so many bytes each."""
        spare = memory - room(self.mesh, self.group.work)
        link = self.placement.link
        return divided(self.line, link, spare, self.mesh.pp, self.schedule, self.pieces, self.training)

    def weighed(self, cuts: Cuts, summed: Placed | None) -> Candidate:
        """`summed`: the sum of gradients over replicas."""
        mesh, pieces = self.mesh, self.pieces
        passes = played(self.order, cuts.seconds, self.recompute)
        sent = sum(self.group.work.communication(self.share, self.group.collective)) * pieces / mesh.pp
        compute = sum(item.seconds for item in self.line.items) * pieces / mesh.pp - sent
        ways = 2 if self.training else 1
        sends = ways * sum(map(self.placement.link.seconds, cuts.crossing)) * pieces / mesh.pp
        gradients = bare(summed, cuts)
        seconds = passes + gradients + self.outputs
        places = [sum(cuts.seconds[p :: mesh.pp]) for p in range(mesh.pp)]
        steady = seconds if self.training else max(places) * pieces + self.outputs
        return Candidate(
            tp=mesh.tp,
            pp=mesh.pp,
            dp=mesh.dp,
            order=self.placement.order,
            micro_batches=pieces,
            schedule=self.schedule,
            recompute=self.recompute,
            seconds=seconds,
            period=steady / mesh.dp,
            memory=cuts.fullest(mesh.pp) + room(mesh, self.group.work),
            parts={
                "compute": compute,
                "collectives": sent,
                "sends": sends,
                "waiting": max(0.0, passes - compute - sent - sends),
                "gradients": gradients,
                "outputs": self.outputs,
            },
            stages=cuts.seconds if len(cuts.seconds) > 1 else (),
        )


def as_graphs(schedule: str, recompute: str, dp: int, training: bool) -> bool:
    """Whether stages may run as CUDA graphs (runtime/trips.py): where no backward is halved, nothing is run again,
    and no gradient is sent to other replicas while the rest is computed."""
    return not training or (schedule != "zero-bubble" and recompute == "off" and dp == 1)


def divided(
    line: Line,
    link: Link,
    memory: float,
    pp: int,
    name: str,
    pieces: int,
    training: bool,
    homes: Sequence[frozenset[str]] | None = None,
) -> Cuts:
    """The cut into the stages that schedule `name` runs on `pp` places of so many bytes each."""
    a_place, ways = schedule.STAGES_A_PLACE[name], 2 if training else 1
    return cut(
        line,
        pp * a_place,
        byte_seconds=link.byte * ways,
        send_seconds=link.start * ways,
        memory=line.workspace + (memory - line.workspace) / a_place,  # one stage of a place runs at once
        opened=opened(name, pp, pieces, training),
        homes=homes,
        about=f", {a_place} a place as {name} has them, where others have one" if a_place > 1 else "",
    )


@cache
def _order(name: str, pp: int, pieces: int, training: bool) -> Schedule:
    return schedule.make(name, pp, pieces, training)


@cache
def opened(name: str, pp: int, pieces: int, training: bool) -> tuple[float, ...]:
    """Micro-batches that every stage has open at most."""
    if not training:
        return (0.0,) * pp * schedule.STAGES_A_PLACE[name]
    return tuple(map(float, schedule.check(_order(name, pp, pieces, True)).open))


def played(order: Schedule, each: Sequence[float], recompute: str = "off") -> float:
    """Seconds of a call; `each`: of one micro-batch in every stage, forward and backward."""
    again = recompute != "off"
    return schedule.seconds(order, schedule.forward(order, each, again), again)
