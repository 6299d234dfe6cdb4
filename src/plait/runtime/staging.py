"""Staging: a rank's place in a pipeline, and the way from a program to what it runs there.

Rank = stage group x tp + rank in the group: a tensor-parallel group is a run of neighbours, which
stand in one host wherever hosts have enough devices.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from plait.cluster import Cluster
from plait.errors import InputError
from plait.mesh import Mesh
from plait.plan import staged
from plait.plan.plan import Plan
from plait.plan.planner import Options
from plait.plan.staged import Pieces, Wish
from plait.program import Program
from plait.runtime.agree import Agreement
from plait.runtime.channel import Channel
from plait.runtime.executor import layouts
from plait.runtime.pipeline import Pipeline, pipeline
from plait.runtime.places import Places
from plait.runtime.transport import Transport


@dataclass(frozen=True)
class Staging:
    wish: Wish
    channel: Channel
    transport: Transport  # within this rank's tensor-parallel group
    only_last: bool
    _covered: list[Agreement] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        mesh: Mesh,
        cluster: Cluster,
        group: dist.ProcessGroup | None,
        micro_batches: int | str,
        schedule: str,
        outputs: str,
    ) -> Staging | None:
        """None where there is one stage and one micro-batch."""
        if outputs not in ("all", "last"):
            raise InputError(f"outputs={outputs!r}: it takes 'all' or 'last'")
        if mesh.pp == 1 and micro_batches in ("auto", 1):
            return None
        rank = dist.get_rank(group) if group is not None else 0
        line = Channel(group, rank, mesh.tp, mesh.pp)
        wish = Wish(mesh.pp, cluster, micro_batches, schedule)
        return cls(wish, line, _transport(group, line, mesh), outputs == "last")

    def build(
        self,
        program: Program,
        options: Options,
        agreement: Agreement,
        device: torch.device,
        saved: Plan | None,
        first: Pipeline | None,
    ) -> Pipeline:
        """The stages of this rank, by rank 0's plan; `first` says where the weights are."""
        if agreement not in self._covered and self.transport.group is not None:
            agreement.covers(self.transport.group)
            self._covered.append(agreement)
        pieces = self._pieces(program, options, agreement, saved, first)
        return pipeline(
            pieces,
            self.transport,
            self.channel,
            agreement.guard,
            device,
            self.only_last,
            None if first is None else first.holders,
        )

    def _pieces(
        self,
        program: Program,
        options: Options,
        agreement: Agreement,
        saved: Plan | None,
        first: Pipeline | None,
    ) -> Pieces:
        agreement.same("compile", [f"program {staged.program_digest(program)}"])  # type: ignore[attr-defined]
        if saved is not None and first is None:
            return staged.replay(program, saved, options, self.wish)
        fixed = None if first is None else layouts(first.local)
        homes = None if first is None else first.homes()
        mine: Pieces | None = None
        text = ""
        with agreement.step("plan"):
            if self.channel.place == self.channel.tp_rank == 0:
                mine = staged.make(program, options, self.wish, fixed, homes)
                text = mine.plan.to_json()
        chosen = Plan.from_json(agreement.broadcast("plan", text))
        return mine or staged.replay(program, chosen, options, self.wish)

    def places(self, first: Pipeline, device: torch.device) -> Places:
        weights = (*(s.weight for s in first.local.shares), *first.program.unused)
        by_node = {w.node: w.name for w in weights}
        holders = {by_node[node]: places for node, places in first.holders.items()}
        return Places(self.channel, holders, device)


def _transport(group: dist.ProcessGroup | None, line: Channel, mesh: Mesh) -> Transport:
    if mesh.tp == 1 or group is None:
        return Transport(None, 0, 1)
    if mesh.pp == 1:
        return Transport(group, line.tp_rank, mesh.tp)
    return Transport(_own_group(group, line.place, mesh), line.tp_rank, mesh.tp)


def _own_group(group: dist.ProcessGroup, place: int, mesh: Mesh) -> dist.ProcessGroup:
    """The tensor-parallel group of `place`; all ranks of `group` come here together.

    A part of the world makes its groups without the others. torch names such a group by its ranks
    and by how many groups a process has had, so that ranks with different pasts would wait for each
    other under different names: those that are behind first make groups of their own rank alone.
    """
    ranks = dist.get_process_group_ranks(group)
    lines = [ranks[p * mesh.tp : (p + 1) * mesh.tp] for p in range(mesh.pp)]
    if len(ranks) == dist.get_world_size():
        return [dist.new_group(line) for line in lines][place]  # type: ignore[no-any-return]
    for _ in range(_behind(group)):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return dist.new_group(lines[place], use_local_synchronization=True)  # type: ignore[no-any-return]


def _behind(group: dist.ProcessGroup) -> int:
    """How many groups fewer than another rank of `group` this one has had."""
    had: list[int] = [0] * dist.get_world_size(group)
    mine = len(dist.distributed_c10d._world.pg_names)
    dist.all_gather_object(had, mine, group=group)
    return max(had) - mine
