"""Chosen: what decides how a program is run, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

from plait.cluster.presets import grow
from plait.errors import PlanError
from plait.mesh import ORDERS, Mesh, Seats
from plait.plan import joint, planner
from plait.plan.plan import Choice, Plan
from plait.plan.planner import Laid
from plait.program import Program
from plait.runtime.agree import Agreement


@dataclass(frozen=True)
class Chosen:
    mesh: Mesh
    choice: Choice | None = None
    pieces: int | str = "auto"
    recompute: str = "off"
    laid: Laid | None = None  # on rank 0, of a choice that was made just now

    @property
    def seats(self) -> Seats:
        return Seats(self.mesh, self.choice.winner.order if self.choice is not None else ORDERS[0])

    def micro_batches(self, asked: int | str) -> int | str:
        """One stage has as many as were weighed with it; a pipeline weighs them with its cuts."""
        return self.pieces if asked == "auto" and self.mesh.pp == 1 else asked

    def alone(self, training: bool) -> bool:
        """Whether one stage of one micro-batch runs as it is: it keeps what its backward needs, and shares
        its gradients with no replica."""
        return self.recompute == "off" and not (training and self.mesh.dp > 1)

    def options(self, asked: planner.Options) -> planner.Options:
        """Of one tensor-parallel group."""
        tp, machine = self.mesh.tp, asked.cluster
        group = machine.subset(range(tp)) if machine.size >= tp else machine
        return replace(asked, tp=tp, cluster=group, choice=self.choice)


def choose(program: Program, ask: joint.Ask, agreement: Agreement, saved: Plan | None) -> Chosen:
    """The saved plan's, or rank 0's choice, which every rank's plan records; what was asked for is weighed
    too where it leaves one mesh, for that may not fit the memory."""
    if saved is not None:
        mesh = Mesh(saved.tp, saved.pp, saved.dp)
        if mesh not in ask.meshes:
            raise PlanError(
                f"the plan is for {mesh}; of the ranks at hand these can be made: "
                + ", ".join(map(str, ask.meshes))
            )
        kept = saved.staged.recompute if saved.staged is not None else "off"
        return Chosen(mesh, saved.choice, saved.micro_batches, kept)
    agreement.same("compile", [f"program {program.digest}"])
    laid, text = None, ""
    with agreement.planning():
        if agreement.leads:
            size = ask.meshes[0].size
            machine = grow(ask.cluster, size).subset(range(size))
            found = joint.search(program, replace(ask, cluster=machine))
            laid, text = found.laid, found.choice.to_json()
    choice = Choice.from_json(agreement.broadcast("plan", text))
    best = choice.winner
    mesh = Mesh(best.tp, best.pp, best.dp)
    return Chosen(mesh, choice, best.micro_batches, best.recompute, laid)
