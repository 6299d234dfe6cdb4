"""Staged: the plan of a pipeline. Micro-batches from the equations, tensor parallelism of each, cuts.

    full program --find--> batch factor, M pieces --planner--> layouts of a piece on its tp ranks
                                                  --cut-----> the first operator of every stage

Pieces differ in rows only (at most two sizes), so they have the same operators in the same order and
one cut serves all. The plan that is kept is that of the first piece, with a `Staged` beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from plait.cluster import Cluster
from plait.cluster.presets import grow
from plait.errors import PlanError
from plait.mesh import ORDERS, Mesh
from plait.passes import microbatch, schedule
from plait.passes.microbatch import Batch, Joined
from plait.passes.partition import Local, Share, partition
from plait.passes.schedule import Schedule
from plait.plan import joint, overlaps, planner
from plait.plan.gradients import room, summed
from plait.plan.placement import Placement
from plait.plan.plan import Candidate, Choice, Overlapped, Plan, Staged
from plait.plan.planner import Held, Options, Planned
from plait.plan.recompute import recomputed
from plait.plan.stages import Cuts, Line
from plait.plan.ways import as_graphs, divided, played
from plait.plan.work import Work
from plait.program import Program, module_path
from plait.rules.describe import Description
from plait.rules.described import described


@dataclass(frozen=True)
class Wish:
    """What the user asked of the pipeline."""

    pp: int
    cluster: Cluster
    micro_batches: int | str = "auto"
    schedule: str = "auto"
    recompute: str = "auto"
    dp: int = 1
    order: str = ORDERS[0]
    joined: Joined | None = None  # of a program of all replicas' batches


@dataclass(frozen=True)
class Pieces:
    """A pipeline's programs: `full` as captured, one `Planned` a micro-batch."""

    full: Program
    description: Description
    batch: Batch | None
    planned: tuple[Planned, ...]
    joined: Joined | None = None  # `batch` is cut into the pieces of all replicas, `planned` are this one's

    @property
    def plan(self) -> Plan:
        return self.planned[0].plan

    @property
    def staged(self) -> Staged:
        found = self.plan.staged
        assert found is not None
        return found


def make(
    program: Program,
    options: Options,
    wish: Wish,
    fixed: Held | None = None,
    homes: Sequence[frozenset[str]] | None = None,
) -> Pieces:
    """The pieces by the best plan; `fixed`, `homes`: layouts of weights, and the weights of every stage,
    as loaded."""
    return replay(program, _plan(program, options, wish, fixed, homes), options, wish)


def _plan(
    program: Program,
    options: Options,
    wish: Wish,
    fixed: Held | None = None,
    homes: Sequence[frozenset[str]] | None = None,
) -> Plan:
    wanted, options = options.overlap, replace(options, overlap="off")
    description = described(program)
    choice = _choice(program, wish, options, None if homes is None else len(homes))
    best = choice.winner
    pieces, name = best.micro_batches, best.schedule
    options = replace(options, graphs=as_graphs(name, best.recompute, wish.dp, program.training))
    batch = _batch(program, description, pieces, wish.joined)
    first, *others = _sizes(program, description, batch)
    priced, fuse = planner.running(first, options)
    laid = planner.lay(first, priced, fixed, fuse=fuse)
    planned = planner.make(first, options, laid=laid)
    work = laid.whole
    line = work.line(1.0, planner.collective(options), pieces)
    order = schedule.make(name, wish.pp, pieces, program.training)
    if best.recompute == "full":
        line = recomputed(line, float(schedule.owed(order)) or None)
    cuts = _cut(line, work, _placed(wish, options, best), best, program.training, homes)
    layouts = {s.weight.node: s.cut for s in _shares(planned)}
    rest = [planner.make(p, options, layouts) for p in others]
    firsts = tuple(line.items[b].name for b in cuts.bounds[1:-1])
    modules = {node.name: module_path(node) for node in first.graph.nodes}
    staged = Staged(
        program=program.digest,
        rows=tuple(map(batch.rows, range(batch.pieces))) if batch is not None else (),
        factor=batch.split.name if batch is not None else "",
        firsts=firsts,
        light=work.light,
        schedule=name,
        seconds=cuts.seconds,
        best=cuts.best,
        crossing=cuts.crossing,
        bubble=0.0,
        strategies=tuple(dict(p.plan.strategies) for p in rest),
        memory=cuts.memory,
        recompute=best.recompute,
        segments=tuple(line.items[p].name for p in line.again.starts) if line.again else (),
        modules=tuple(modules.get(name, "") for name in firsts),
    )
    ends = best.parts["gradients"] + best.parts["outputs"]
    held = overlaps.held(wanted, options.cluster.device, best.recompute) if options.tp > 1 else ""
    notes = (f"overlap: off instead of {wanted}: {held}",) if held else ()
    wanted = "off" if held else wanted
    every = [(p, p.local(0)) for p in (planned, *rest)]
    listed = [_overlapped(p, local, staged, wanted, options) for p, local in every]
    staged = _hiding(staged, order, listed)
    on = held or overlaps.asked(wanted)
    bare = overlaps.bare(planned.flow, every[0][1], planned.plan.collectives, listed[0], held) if on else {}
    return replace(
        planned.plan,
        pp=wish.pp,
        dp=wish.dp,
        staged=staged,
        gradients=summed(_placed(wish, options, best), options, work),
        seconds=played(order, staged.seconds, best.recompute) + ends,
        seconds_alone=planned.plan.seconds_alone * pieces,
        cluster=str(wish.cluster),
        notes=(*planned.plan.notes, *choice.notes, *notes),
        overlap=str(wanted),
        overlaps=listed[0],
        bare=bare,
        times=(),
        packed=(),  # a cut may come between them
        choice=choice,
    )


def settle(program: Program, ask: joint.Ask, found: joint.Found) -> Plan:
    """The whole plan of the joint choice's winner."""
    best = found.choice.winner
    mesh = Mesh(best.tp, best.pp, best.dp)
    group = Placement(ask.cluster, mesh, best.order).tp
    options = replace(
        ask.options, tp=mesh.tp, cluster=group.cluster, crowd=group.crowd, choice=found.choice
    )
    if (best.pp, best.micro_batches, best.recompute) == (1, 1, "off"):
        plan = planner.make(program, options, laid=found.laid).plan
        plan = replace(plan, seconds=plan.seconds + best.parts["gradients"])
    else:
        wish = Wish(
            best.pp, ask.cluster, best.micro_batches, best.schedule, best.recompute, best.dp, best.order
        )
        plan = _plan(program, options, wish)
    return replace(plan, dp=mesh.dp, cluster=str(ask.cluster))


def replay(program: Program, plan: Plan, options: Options, wish: Wish) -> Pieces:
    """The pieces that `plan` spells, for the same program."""
    options = replace(options, overlap="off")
    staged = plan.staged
    if staged is None or plan.pp != wish.pp:
        raise PlanError(f"the plan is for pp={plan.pp}, not pp={wish.pp}")
    if staged.program != program.digest:
        raise PlanError(
            f"the plan is for program {staged.program}, this model captures as "
            f"{program.digest}; plan again with plan=None"
        )
    description = described(program)
    batch: Batch | None = None
    if staged.rows:
        found = microbatch.find(
            program, description, len(staged.rows), factor=staged.factor, rows=staged.rows
        )
        assert isinstance(found, Batch)
        batch = found
    joined = wish.joined
    if joined is not None:
        joined = replace(joined, pieces=len(staged.rows) // len(joined.rows))
    numbers = joined.own if joined is not None else range(len(staged.rows) or 1)
    by_rows = _by_rows(plan, staged)
    out = list[Planned]()
    for k, piece in zip(numbers, _programs(program, description, batch, numbers), strict=True):
        rows = batch.rows(k) if batch is not None else 0
        strategies, chunks = by_rows[rows]
        own = replace(plan, program=piece.digest, strategies=strategies, overlaps=chunks)
        planned = planner.replay(piece, own, options)
        out.append(planned if out else replace(planned, plan=plan))
    return Pieces(program, description, batch, tuple(out), joined)


def _by_rows(plan: Plan, staged: Staged) -> dict[int, tuple[Mapping[str, str], tuple[Overlapped, ...]]]:
    """Strategies and regions by the rows of a micro-batch: the plan's own are those of the first."""
    sizes = dict.fromkeys(staged.rows or (0,))
    strategies, chunks = (plan.strategies, *staged.strategies), (plan.overlaps, *staged.overlaps)
    return dict(zip(sizes, zip(strategies, chunks, strict=True), strict=True))


def _choice(program: Program, wish: Wish, options: Options, stages: int | None) -> Choice:
    """The joint choice that led here, or the choice of micro-batches and schedule alone; of the schedules
    with so many `stages` where weights are at home in them."""
    known = joint.allowed(wish.schedule)
    if options.choice is not None and options.choice.program == program.digest:
        return options.choice
    mesh = Mesh(options.tp, wish.pp, wish.dp)
    ask = joint.Ask(
        (mesh,), _machine(wish.cluster, mesh), options, wish.micro_batches, known,
        orders=(wish.order,), recompute=joint.recompute(wish.recompute), joined=wish.joined, stages=stages,
    )  # fmt: skip
    return joint.search(program, ask).choice


def _overlapped(
    piece: Planned, first: Local, staged: Staged, overlap: str | int, options: Options
) -> tuple[Overlapped, ...]:
    """The regions of all stages, and how they run: each region is in one stage."""
    flow = replace(piece, plan=replace(piece.plan, staged=staged)).flow
    machine = overlaps.machine(options.cluster, options.tp, planner.collective(options))
    return overlaps.decide(flow, overlap, machine, first)[1]


def relisted(plan: Plan, listed: Sequence[tuple[Overlapped, ...]]) -> Plan:
    """The plan with these forms of its regions, of the micro-batches of every number of rows."""
    before = plan.staged
    assert before is not None
    order = schedule.make(before.schedule, plan.pp, plan.micro_batches, plan.training)
    now = _hiding(replace(before, seconds=_exposing(before, plan.overlaps)), order, listed)
    times = (played(order, s.seconds, s.recompute) for s in (now, before))
    return replace(plan, staged=now, overlaps=listed[0], seconds=plan.seconds + next(times) - next(times))


def _hiding(staged: Staged, order: Schedule, listed: Sequence[tuple[Overlapped, ...]]) -> Staged:
    """With what the chunks of each stage gain, of the first micro-batch as all its times are."""
    seconds = tuple(whole - gain for whole, gain in zip(staged.seconds, _gains(staged, listed[0]), strict=True))
    again = staged.recompute != "off"
    bubble = schedule.bubble(order, schedule.forward(order, seconds, again), again)
    return replace(staged, seconds=seconds, bubble=bubble, overlaps=tuple(listed[1:]))


def _exposing(staged: Staged, listed: tuple[Overlapped, ...]) -> tuple[float, ...]:
    """Seconds of every stage without what these gain."""
    return tuple(s + gain for s, gain in zip(staged.seconds, _gains(staged, listed), strict=True))


def _gains(staged: Staged, listed: tuple[Overlapped, ...]) -> list[float]:
    return [sum(o.whole - o.seconds for o in listed if o.stage == s) for s in range(len(staged.seconds))]


def _cut(
    line: Line,
    work: Work,
    placed: Placement,
    best: Candidate,
    training: bool,
    homes: Sequence[frozenset[str]] | None,
) -> Cuts:
    mesh, name = placed.mesh, best.schedule
    memory = placed.cluster.device.memory - room(mesh, work)
    return divided(line, placed.link, memory, mesh.pp, name, best.micro_batches, training, homes)


def _placed(wish: Wish, options: Options, best: Candidate) -> Placement:
    mesh = Mesh(options.tp, wish.pp, wish.dp)
    return Placement(_machine(wish.cluster, mesh), mesh, best.order)


def _machine(cluster: Cluster, mesh: Mesh) -> Cluster:
    """The devices of the mesh: the cluster's first, or as many more of the kind as it lacks."""
    return grow(cluster, mesh.size).subset(range(mesh.size))


# -- micro-batches ---------------------------------------------------------------------------------


def _batch(program: Program, d: Description, pieces: int, joined: Joined | None) -> Batch | None:
    if joined is not None:
        every = replace(joined, pieces=pieces).sizes
        found = microbatch.find(program, d, len(every), factor=joined.factor, rows=every)
    elif pieces == 1:
        return None
    else:
        found = microbatch.find(program, d, pieces)
    assert isinstance(found, Batch)
    return found


def _sizes(program: Program, d: Description, batch: Batch | None) -> list[Program]:
    """The first piece of every number of rows."""
    if batch is None:
        return [program]
    firsts: dict[int, int] = {}
    for k in range(batch.pieces):
        firsts.setdefault(batch.rows(k), k)
    return [microbatch.piece(program, d, batch, k) for k in firsts.values()]


def _programs(
    program: Program, d: Description, batch: Batch | None, numbers: Sequence[int]
) -> list[Program]:
    """The pieces of these numbers; values of one number of rows are sized once."""
    if batch is None:
        return [program]
    first: dict[int, Program] = {}
    out = []
    for k in numbers:
        out.append(microbatch.piece(program, d, batch, k, first.get(batch.rows(k))))
        first.setdefault(batch.rows(k), out[-1])
    return out


def _shares(planned: Planned) -> tuple[Share, ...]:
    return partition(
        planned.program, planned.description, planned.strategies, planned.grads, 0
    ).shares
