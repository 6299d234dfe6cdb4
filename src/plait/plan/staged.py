"""Staged: the plan of a pipeline. Micro-batches from the equations, tensor parallelism of each, cuts.

    full program --find--> batch factor, M pieces --planner--> layouts of a piece on its tp ranks
                                                  --cut-----> the first operator of every stage

Pieces differ in rows only (at most two sizes), so they have the same operators in the same order and
one cut serves all. The plan that is kept is that of the first piece, with a `Staged` beside it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import getitem

import numpy as np
from torch import Tensor, fx

from plait.cluster import Cluster
from plait.errors import InputError, PlanError
from plait.passes import microbatch, schedule
from plait.passes.expand import is_random
from plait.passes.microbatch import Batch, Uncut
from plait.passes.partition import Share, partition
from plait.plan import planner, stages
from plait.plan.plan import Plan, Staged, program_digest
from plait.plan.planner import Options, Planned
from plait.plan.prices import CostPrices
from plait.plan.problem import build
from plait.plan.stages import Cuts, Item, Line
from plait.program import Program
from plait.rules.aten import table
from plait.rules.describe import Description, describe

LIGHT = 2**20  # bytes of a value that every stage makes again rather than receives
AUTO = 4  # micro-batches a stage, at most, that `auto` tries: the bubble is then at most 1/5


@dataclass(frozen=True)
class Wish:
    """What the user asked of the pipeline."""

    pp: int
    cluster: Cluster
    micro_batches: int | str = "auto"
    schedule: str = "auto"


@dataclass(frozen=True)
class Pieces:
    """A pipeline's programs: `full` as captured, one `Planned` a micro-batch."""

    full: Program
    description: Description
    batch: Batch | None
    planned: tuple[Planned, ...]

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
    fixed: Mapping[str, str] | None = None,
    homes: Sequence[frozenset[str]] | None = None,
) -> Pieces:
    """The plan; `fixed`, `homes`: layouts of weights, and the weights of every stage, as loaded."""
    options = replace(options, overlap="off")
    description = describe(program, table())
    batch, notes = _batch(program, description, wish, options)
    pieces = batch.pieces if batch is not None else 1
    name = _schedule(wish.schedule, program.training, pieces)
    first, *others = _programs(program, description, batch)
    planned = planner.make(first, options, fixed)
    line, light = _line(planned, options)
    cuts = _cut(line, wish, options.tp, program.training, schedule.STAGES_A_PLACE[name], homes)
    layouts = {s.weight.node: str(s.layout.split or "whole") for s in _shares(planned)}
    rest = [planner.make(p, options, layouts) for p in _new_sizes(batch, others)]
    order = schedule.make(name, wish.pp, pieces, program.training)
    staged = Staged(
        program=program_digest(program),
        rows=tuple(batch.rows(k) for k in range(pieces)) if batch is not None else (),
        factor=batch.split.name if batch is not None else "",
        firsts=tuple(line.items[b].name for b in cuts.bounds[1:-1]),
        light=tuple(light),
        schedule=name,
        seconds=cuts.seconds,
        best=cuts.best,
        crossing=cuts.crossing,
        bubble=schedule.bubble(order, cuts.seconds),
        strategies=tuple(dict(p.plan.strategies) for p in rest),
    )
    plan = replace(
        planned.plan,
        pp=wish.pp,
        staged=staged,
        seconds=_run(order, cuts.seconds),
        seconds_alone=planned.plan.seconds_alone * pieces,
        cluster=str(wish.cluster),
        notes=(*planned.plan.notes, *notes),
    )
    return replay(program, plan, options, wish)


def replay(program: Program, plan: Plan, options: Options, wish: Wish) -> Pieces:
    """The pieces that `plan` spells, for the same program."""
    options = replace(options, overlap="off")
    staged = plan.staged
    if staged is None or plan.pp != wish.pp:
        raise PlanError(f"the plan is for pp={plan.pp}, not pp={wish.pp}")
    if staged.program != program_digest(program):
        raise PlanError(
            f"the plan is for program {staged.program}, this model captures as "
            f"{program_digest(program)}; plan again with plan=None"
        )
    description = describe(program, table())
    batch: Batch | None = None
    if staged.rows:
        found = microbatch.find(program, description, len(staged.rows))
        assert isinstance(found, Batch) and found.split.name == staged.factor
        batch = found
    out, seen = list[Planned](), dict[int, Mapping[str, str]]()
    others = iter(staged.strategies)
    for k, piece in enumerate(_programs(program, description, batch)):
        rows = batch.rows(k) if batch is not None else 0
        if rows not in seen:
            seen[rows] = plan.strategies if k == 0 else next(others)
        own = replace(plan, program=program_digest(piece), strategies=seen[rows])
        planned = planner.replay(piece, own, options)
        out.append(replace(planned, plan=plan) if k == 0 else planned)
    return Pieces(program, description, batch, tuple(out))


def _cut(
    line: Line,
    wish: Wish,
    tp: int,
    training: bool,
    a_place: int,
    homes: Sequence[frozenset[str]] | None,
) -> Cuts:
    latency, per_byte = link(wish.cluster, tp, wish.pp)
    return stages.cut(
        line,
        wish.pp * a_place,
        byte_seconds=per_byte * (2 if training else 1),
        send_seconds=latency,
        memory=float(wish.cluster.device.memory),
        homes=homes,
    )


# -- what the cut sees -----------------------------------------------------------------------------


def _line(planned: Planned, options: Options) -> tuple[Line, list[str]]:
    """The operators of a piece with their seconds, and the names of the light ones."""
    seconds = _seconds(planned, options)
    weights = {w.node: w for w in planned.program.weights}
    sizes = {s.weight.node: _held(s) for s in _shares(planned)}
    light = _light(planned)
    nodes = [n for n in planned.program.graph.nodes if n.op == "call_function"]
    at = {n: i for i, n in enumerate(nodes)}
    reads = {n: _reads(n, light, weights.keys()) for n in nodes}
    items = tuple(
        Item(
            n.name,
            seconds.get(n.name, 0.0),
            0.0 if n in light else _nbytes(n),
            max((at[u] for u in _users(n, light) if u in at), default=-1),
            tuple(reads[n]),
            joined=n.target is getitem,
        )
        for n in nodes
    )
    used = {w for names in reads.values() for w in names}
    return Line(items, {w: sizes[w] for w in used}), [n.name for n in light]


def _seconds(planned: Planned, options: Options) -> dict[str, float]:
    """By operator: its work, forward and backward, and the collectives before it."""
    problem = build(planned.program, planned.description, options.tp)
    prices = CostPrices.of(
        problem, planner.rates(options.cluster, planned.program), lambda kind, nbytes: 0.0
    )
    launch = options.cluster.device.launch * (3 if planned.program.training else 1)
    out = {
        node.name: prices.node(choice, choice.strategies.index(planned.strategies[node])) + launch
        for node, choice in problem.choices.items()
        if not choice.weight and node.op == "call_function"
    }
    for placed in planned.plan.collectives:
        out[placed.source] = out.get(placed.source, 0.0) + placed.seconds
    return out


def _light(planned: Planned) -> dict[fx.Node, None]:
    """Values made from inputs, buffers and constants alone, with no gradient and little work:
    every stage makes them again (positions, masks, tables of sines)."""
    out: dict[fx.Node, None] = {}
    graph, learned = planned.program.graph, planned.grads
    trained = {w.node for w in planned.program.weights if w.kind == "parameter"}
    for node in graph.nodes:
        if node.op != "call_function" or node in learned or is_random(node):
            continue
        sources = node.all_input_nodes
        free = all(
            s in out or s.op == "get_attr" or (s.op == "placeholder" and s.name not in trained)
            for s in sources
        )
        if free and _nbytes(node) <= LIGHT:
            out[node] = None
    return out


def _reads(node: fx.Node, light: Mapping[fx.Node, None], weights: Collection[str]) -> list[str]:
    """Weights that a stage with this node needs: its own, and those of light values it reads."""
    found, queue = dict[str, None](), list(node.all_input_nodes)
    while queue:
        source = queue.pop()
        if source.op == "placeholder" and source.name in weights:
            found[source.name] = None
        elif source in light:
            queue += source.all_input_nodes
    return list(found)


def _users(node: fx.Node, light: Mapping[fx.Node, None]) -> list[fx.Node]:
    return [u for u in node.users if u not in light]


def _nbytes(node: fx.Node) -> float:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return 0.0
    return float(prod(int(s) if isinstance(s, int) else 1 for s in value.shape)) * value.dtype.itemsize


def _held(share: Share) -> float:
    rows = 1.0
    if share.cut is not None:
        rows = max(share.cut.counts()) / share.cut.size
    return prod(share.weight.shape) * share.weight.dtype.itemsize * rows


def link(cluster: Cluster, tp: int, pp: int) -> tuple[float, float]:
    """(seconds to start, seconds a byte) of the slowest transfer between neighbouring stages."""
    if cluster.size < tp * pp or pp == 1:
        return 0.0, 0.0
    ranks = np.arange(tp * (pp - 1))
    levels = [cluster.levels[i] for i in set(cluster.level_of(ranks, ranks + tp).tolist())]
    return (
        max(level.latency for level in levels),
        max(1.0 / (level.bandwidth * level.share) for level in levels),
    )


# -- micro-batches ---------------------------------------------------------------------------------


def _batch(
    program: Program, d: Description, wish: Wish, options: Options
) -> tuple[Batch | None, list[str]]:
    asked = wish.micro_batches
    if asked != "auto" and (not isinstance(asked, int) or asked < 1):
        raise InputError(f"micro_batches={asked!r}: it takes a number from 1, or 'auto'")
    if asked == 1 or (asked == "auto" and wish.pp == 1):
        return None, []
    count = AUTO * wish.pp if asked == "auto" else int(asked)
    found = microbatch.find(program, d, count)
    if isinstance(found, Uncut):
        return None, [f"micro_batches: 1 instead of {asked}: {found.reason}"]
    if asked == "auto":
        return _fastest(program, d, found, wish, options)
    if found.pieces < count:
        return found, [f"micro_batches: {found.pieces} instead of {asked}: there are as many rows"]
    return found, []


def _fastest(
    program: Program, d: Description, most: Batch, wish: Wish, options: Options
) -> tuple[Batch | None, list[str]]:
    """As many micro-batches as pay: a stage's time over the pieces, its launches in each of them."""
    planned = planner.make(program, options)
    line, _ = _line(planned, options)
    passes = 3 if program.training else 1
    least = options.cluster.device.launch * passes
    held = sum(line.weights.values()) / wish.pp
    read = options.cluster.device.memory_seconds(held) * passes
    cuts = _cut(line, wish, options.tp, program.training, 1, None)
    operators = [b - a for a, b in zip(cuts.bounds, cuts.bounds[1:], strict=False)]
    name = _schedule(wish.schedule, program.training, most.pieces)
    times: dict[int, float] = {}
    for count in range(1, most.pieces + 1):
        each = [
            max((t - n * least) / count, read) + n * least + link(wish.cluster, options.tp, wish.pp)[0]
            for t, n in zip(cuts.seconds, operators, strict=True)
        ]
        each = each * schedule.STAGES_A_PLACE[name]
        order = schedule.make(name, wish.pp, count, program.training)
        times[count] = _run(order, each)
    best = min(times, key=lambda count: (times[count], count))
    note = f"micro_batches: {best}, predicted {times[best] * 1e6:.1f} us; one {times[1] * 1e6:.1f} us"
    if best == 1:
        return None, [note]
    found = microbatch.find(program, d, best)
    assert isinstance(found, Batch)
    return found, [note]


def _run(order: schedule.Schedule, each: Sequence[float]) -> float:
    """Seconds of a call; `each`: of one micro-batch in every stage, forward and backward."""
    both = 1.0 + schedule.BACKWARD if order.training else 1.0
    return schedule.seconds(order, [t / both for t in each])


def _programs(program: Program, d: Description, batch: Batch | None) -> list[Program]:
    if batch is None:
        return [program]
    return [microbatch.piece(program, d, batch, k) for k in range(batch.pieces)]


def _new_sizes(batch: Batch | None, others: Sequence[Program]) -> list[Program]:
    """The first program of every size that the first piece does not have."""
    seen: dict[int, Program] = {}
    for k, program in enumerate(others, 1):
        assert batch is not None
        if batch.rows(k) != batch.rows(0):
            seen.setdefault(batch.rows(k), program)
    return list(seen.values())


def _shares(planned: Planned) -> tuple[Share, ...]:
    return partition(
        planned.program, planned.description, planned.strategies, planned.grads, 0
    ).shares


def _schedule(name: str, training: bool, pieces: int) -> str:
    if name == "auto":
        return "1f1b" if training and pieces > 1 else "gpipe"
    if name not in schedule.SCHEDULES:
        raise InputError(f"schedule={name!r}: it takes {', '.join(schedule.SCHEDULES)}, or 'auto'")
    return name
