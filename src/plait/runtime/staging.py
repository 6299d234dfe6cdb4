"""Staging: a rank's seat in the mesh, and the way from a program to what it runs there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from plait.cluster import Cluster
from plait.errors import InputError
from plait.mesh import Seats
from plait.passes.microbatch import Joined
from plait.plan import staged
from plait.plan.plan import Plan
from plait.plan.planner import Options
from plait.plan.staged import Pieces, Wish
from plait.program import Program
from plait.runtime.agree import Agreement
from plait.runtime.channel import Channel, Ways
from plait.runtime.executor import layouts
from plait.runtime.pipeline import Pipeline, pipeline
from plait.runtime.places import Places
from plait.runtime.replicas import Replicas
from plait.runtime.transport import Begun, Transport


@dataclass(frozen=True)
class Seat:
    """A rank's own place in the mesh, and the groups that it belongs to."""

    seats: Seats
    channel: Channel
    transport: Transport  # within this rank's tensor-parallel group
    replicas: Replicas
    group: dist.ProcessGroup | None = None  # of all of them

    @classmethod
    def of(
        cls, seats: Seats, group: dist.ProcessGroup | None, agreement: Agreement, device: torch.device
    ) -> Seat:
        """All ranks of `group` come here together."""
        mesh, grid = seats.mesh, seats.grid
        rank = dist.get_rank(group) if group is not None else 0
        place, replica, index = seats.of(rank)
        ways = _ways(group, device) if mesh.pp > 1 else Ways(group, group)
        line = Channel(ways, grid[:, replica, index].tolist(), place)
        back = agreement.backward
        rows = _transport(group, grid.reshape(-1, mesh.tp), index, back)
        copies = grid.transpose(0, 2, 1).reshape(-1, mesh.dp)
        replicas = Replicas(_transport(group, copies, replica, back), device)
        made = (rows.group, replicas.transport.group, ways.up, ways.down)
        agreement.covers(*(g for g in dict.fromkeys(made) if g not in (None, group)))
        if mesh.pp == 1:
            agreement.counted(Place(rows.begun, replicas.transport.begun))
        return cls(seats, line, rows, replicas, group)


@dataclass(frozen=True)
class Place:
    """How far a rank has come, in its replica and between replicas: without stages, all do the same."""

    within: Begun
    between: Begun

    def __str__(self) -> str:
        return f"{self.within} {self.between}"


@dataclass(frozen=True)
class Staging:
    wish: Wish
    seat: Seat
    only_last: bool

    @classmethod
    def of(
        cls,
        seat: Seat,
        cluster: Cluster,
        micro_batches: int | str,
        schedule: str,
        recompute: str,
        outputs: str,
        alone: bool,
    ) -> Staging | None:
        """None where there is one stage and one micro-batch that runs `alone`: it keeps its activations,
        and no gradient is summed over replicas."""
        if outputs not in ("all", "last"):
            raise InputError(f"outputs={outputs!r}: it takes 'all' or 'last'")
        mesh = seat.seats.mesh
        if alone and mesh.pp == 1 and micro_batches in ("auto", 1):
            return None
        wish = Wish(
            mesh.pp, cluster, micro_batches, schedule, recompute, mesh.dp, seat.seats.order
        )
        return cls(wish, seat, outputs == "last")

    def build(
        self,
        program: Program,
        options: Options,
        agreement: Agreement,
        device: torch.device,
        saved: Plan | None,
        first: Pipeline | None,
        joined: Joined | None = None,
    ) -> Pipeline:
        """The stages of this rank, by rank 0's plan; `first` says where the weights are.

        `joined`: the program is of all replicas' batches together.
        """
        wish = replace(self.wish, joined=joined)
        pieces = self._pieces(program, options, wish, agreement, saved, first)
        return self._pipeline(pieces, agreement, device, first)

    def rewoven(
        self, first: Pipeline, plan: Plan, options: Options, agreement: Agreement, device: torch.device
    ) -> Pipeline:
        """`first` as another plan of the same program has it."""
        return self._pipeline(staged.replay(first.program, plan, options, self.wish), agreement, device, first)

    def _pipeline(
        self, pieces: Pieces, agreement: Agreement, device: torch.device, first: Pipeline | None
    ) -> Pipeline:
        return pipeline(
            pieces,
            self.seat.transport,
            self.seat.channel,
            agreement.guard,
            device,
            self.only_last,
            None if first is None else first.holders,
            self.seat.replicas,
        )

    def _pieces(
        self,
        program: Program,
        options: Options,
        wish: Wish,
        agreement: Agreement,
        saved: Plan | None,
        first: Pipeline | None,
    ) -> Pieces:
        agreement.same("compile", program.compared)
        if saved is not None and first is None:
            return staged.replay(program, saved, options, wish)
        fixed = None if first is None else layouts(first.local)
        homes = None if first is None else first.homes()
        mine: Pieces | None = None
        text = ""
        with agreement.planning():
            if agreement.plans:
                mine = staged.make(program, options, wish, fixed, homes)
                text = mine.plan.to_json()
        chosen = Plan.from_json(agreement.broadcast("plan", text))
        return mine or staged.replay(program, chosen, options, wish)

    def places(self, first: Pipeline, device: torch.device) -> Places:
        weights = (*(s.weight for s in first.local.shares), *first.program.unused)
        by_node = {w.node: w.name for w in weights}
        holders = {by_node[node]: places for node, places in first.holders.items()}
        return Places(self.seat.channel, holders, device)


def _transport(
    group: dist.ProcessGroup | None, lines: NDArray[np.int64], number: int, backward: Any
) -> Transport:
    """Within the one of `lines` [groups, ranks of each] in which this rank is `number`."""
    size = lines.shape[1]
    if size == 1 or group is None:
        return Transport(None, 0, 1, backward=backward)
    if len(lines) == 1:
        return Transport(group, number, size, backward=backward)
    return Transport(_own_group(group, lines), number, size, backward=backward)


def _ways(group: dist.ProcessGroup | None, device: torch.device) -> Ways:
    """For the messages of stages on `device`."""
    if group is None or device.type == "cpu":
        return Ways(group, group)
    if "nccl" not in str(dist.get_backend_config(group)):
        return Ways(group, group, host=True)
    every = np.arange(dist.get_world_size(group))[None]
    return Ways(_own_group(group, every, " up"), _own_group(group, every, " down"))


def _own_group(group: dist.ProcessGroup, lines: NDArray[np.int64], use: str = "") -> dist.ProcessGroup:
    """The one of `lines` that this rank is in, for one `use`; all ranks of `group` come here together.

    One that an earlier compile made is taken again: a group is threads and sockets, or a communicator's memory.
    All ranks find it or none does, as they made all lines together; torch keeps it, and forgets it with `group`.
    """
    cut = sha256(lines.tobytes()).hexdigest()[:16]
    desc = f"plait: {group.group_name} in {len(lines)} lines, {cut}{use}"
    made = (g for g in dist.distributed_c10d._world.pg_map if g.group_desc == desc)
    return next(made, None) or _made(group, lines, desc)


def _made(group: dist.ProcessGroup, lines: NDArray[np.int64], desc: str) -> dist.ProcessGroup:
    """Groups of all `lines`; this rank's.

    A part of the world makes its groups without the others. torch names such a group by its ranks
    and by how many groups a process has had, so that ranks with different pasts would wait for each
    other under different names: those that are behind first make groups of their own rank alone.
    """
    ranks, me = dist.get_process_group_ranks(group), dist.get_rank()
    named = [[ranks[r] for r in line] for line in lines.tolist()]
    mine = next(i for i, line in enumerate(named) if me in line)
    if len(ranks) == dist.get_world_size():
        return [dist.new_group(line, group_desc=desc) for line in named][mine]  # type: ignore[no-any-return]
    for _ in range(_behind(group)):
        dist.new_group([me], use_local_synchronization=True)
    return dist.new_group(named[mine], use_local_synchronization=True, group_desc=desc)  # type: ignore[no-any-return]


def _behind(group: dist.ProcessGroup) -> int:
    """How many groups fewer than another rank of `group` this one has had."""
    had: list[int] = [0] * dist.get_world_size(group)
    mine = len(dist.distributed_c10d._world.pg_names)
    dist.all_gather_object(had, mine, group=group)
    return max(had) - mine
