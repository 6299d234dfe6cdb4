"""The joint choice: tp x pp x dp, micro-batches and schedule of one program on one cluster.

    for every tp         one sharding program of the whole batch, priced where the groups stand
    for every mesh       its placements, numbers of micro-batches, schedules, kept or recomputed
    for each of these    the cut (plan/stages.py), memory by schedule as a hard limit, and the
                         schedule played with the stages' seconds

    seconds a call = compute + collectives + sends + waiting + gradients + outputs

The first three are a place's own, on average; `waiting` is the rest of the schedule: bubbles and stages
of unequal length; `gradients` what a sum over replicas leaves exposed; `outputs` their way from the last
stage to all others. Layers that look alike share the variables of a sharding program (plan/classes.py),
and a size is priced once, so that a model of 80 layers on 64 devices takes seconds.

Objectives: `latency`, the seconds of a call; `throughput`, the seconds between the results of calls that
follow one another (without gradients a pipeline stays full between them), over all replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, inf

from plait.cluster import Cluster
from plait.cluster.presets import grow
from plait.errors import InputError, PlanError
from plait.mesh import ORDERS, Mesh
from plait.passes import microbatch, schedule
from plait.passes.microbatch import Batch, Joined, Uncut
from plait.plan import planner
from plait.plan.gradients import room, summed
from plait.plan.placement import Link, Placement
from plait.plan.plan import Candidate, Choice, Memory, Placed
from plait.plan.planner import Laid, Options
from plait.plan.ways import Group, Way, as_graphs, divided
from plait.plan.work import Work
from plait.program import Program
from plait.rules.described import described

FRONT = 8  # candidates that a plan lists
# Predictions this near each other are one: the one with fewer stages and micro-batches is taken.
CLOSE = 0.02
DEEP = 8  # micro-batches a stage, at most: the bubble is then below 1/9
RECOMPUTE = ("off", "full")
USUAL = {1, 2, 4, 8}  # ranks of tensor parallelism that are tried where nothing fits


@dataclass(frozen=True)
class Ask:
    """What is left to choose, and for which machine."""

    meshes: tuple[Mesh, ...]
    cluster: Cluster
    options: Options  # but for tp and its devices
    micro_batches: int | str = "auto"
    schedules: tuple[str, ...] = tuple(schedule.SCHEDULES)
    orders: tuple[str, ...] = ORDERS
    recompute: tuple[str, ...] = ("off",)
    outputs: str = "all"
    joined: Joined | None = None  # the program is of these replicas' batches together
    stages: int | None = None  # so many, since weights are at home in them


@dataclass(frozen=True)
class Found:
    """What was weighed, and the winner's layouts."""

    choice: Choice
    laid: Laid


def check(
    objective: str, micro_batches: int | str, schedule: str, recompute: str, outputs: str
) -> None:
    """InputError for words that no choice can be made by."""
    words = {
        "objective": (objective, ("latency", "throughput")),
        "recompute": (recompute, ("auto", *RECOMPUTE)),
        "outputs": (outputs, ("all", "last")),
    }
    wrong = [
        f"{name}={value!r}: it takes {', '.join(known[:-1])} or {known[-1]}"
        for name, (value, known) in words.items()
        if value not in known
    ]
    number = isinstance(micro_batches, int) and not isinstance(micro_batches, bool)
    if micro_batches != "auto" and not (number and int(micro_batches) >= 1):
        wrong.append(f"micro_batches={micro_batches!r}: it takes a number from 1, or 'auto'")
    if wrong:
        raise InputError("\n".join(wrong))
    allowed(schedule)


def search(program: Program, ask: Ask) -> Found:
    """The best candidate and those behind it.

    Raises PlanError where none fits the memory: it names the smallest number of devices of the same
    kind on which one would.
    """
    return _Search(program, ask).run()


@dataclass
class _Search:
    program: Program
    ask: Ask
    groups: dict[tuple[int, Cluster, float, bool], Group] = field(default_factory=dict)
    sums: dict[tuple[Mesh, str], Placed | None] = field(default_factory=dict)
    weighed: int = 0

    def run(self) -> Found:
        found: list[Candidate] = []
        refused: dict[Mesh, str] = {}
        leading: list[float] = []  # the best of every mesh so far, the least first
        ways = {mesh: self._in_order(mesh) for mesh in self.ask.meshes}
        for mesh in sorted(ways, key=lambda m: ways[m][0][0]):
            mine, why = self._of(mesh, ways[mesh], leading[FRONT - 1] if len(leading) >= FRONT else inf)
            found += mine
            leading = sorted([*leading, *map(self._score, mine[:1])])
            if why:
                refused[mesh] = why
        if not found:
            raise PlanError(self._too_large(refused))
        ranked = sorted(found, key=self._score)
        near = [c for c in ranked if self._score(c) <= self._score(ranked[0]) * (1 + CLOSE)]
        best = min(near, key=self._rank)
        front = [best]
        for c in ranked:  # the best of every other mesh
            if all((c.tp, c.pp, c.dp) != (o.tp, o.pp, o.dp) for o in front):
                front.append(c)
        choice = Choice(
            program=self.program.digest,
            front=tuple(front[:FRONT]),
            weighed=self.weighed,
            reason=self._reason(front),
            refused=tuple(f"{m}: {why}" for m, why in refused.items()),
            notes=self._notes(),
            memory=self._memory(best) if self.program.training else None,
        )
        return Found(choice, self._group(self._where(best), self._graphs(best.schedule, best.recompute, best.dp)).laid)

    def _where(self, c: Candidate) -> Placement:
        return Placement(self.ask.cluster, Mesh(c.tp, c.pp, c.dp), c.order)

    def _memory(self, best: Candidate) -> Memory:
        """Of the fullest rank, with activations kept and recomputed, were there no limit."""
        found = {best.recompute: best.memory}
        for other in {*RECOMPUTE} - {best.recompute}:
            way = self._way(self._where(best), best.micro_batches, best.schedule, other)
            found[other] = self._weigh(way, inf).memory
        limit = float(self.ask.cluster.device.memory)
        return Memory(limit, found["off"], found["full"], best.recompute, len(self.ask.recompute) == 1)

    def _rank(self, c: Candidate) -> tuple[object, ...]:
        """Among candidates as fast as each other: fewest parts first."""
        return c.pp, c.micro_batches, c.recompute != "off", c.memory, self._score(c)

    def _score(self, c: Candidate) -> float:
        return c.seconds if self.ask.options.objective == "latency" else c.period

    # -- candidates --------------------------------------------------------------------------------

    def _in_order(self, mesh: Mesh) -> list[tuple[float, Way]]:
        """With a bound on its score, the least first; one stage runs in one piece if it can."""
        latency = self.ask.options.objective == "latency"
        bounds = [(way.least(latency), way) for way in self._ways(mesh)]
        return sorted(bounds, key=lambda bound: (mesh.pp == 1 < bound[1].pieces, bound[0]))

    def _of(
        self, mesh: Mesh, ways: Sequence[tuple[float, Way]], most: float
    ) -> tuple[list[Candidate], str]:
        """The candidates of a mesh that may be its best, that one first; or why none fits.

        They are taken until the bound passes the best found, or the `most` that a plan lists. One stage
        runs several micro-batches, or operators again, only for want of memory.
        """
        found: list[Candidate] = []
        refused: list[tuple[tuple[int, bool, int], str]] = []  # the way that needs least memory says it best
        for bound, way in ways:
            if bound > most * (1 + CLOSE):
                return found, ""
            self.weighed += 1
            try:
                candidate = self._weigh(way, self.ask.cluster.device.memory)
            except PlanError as error:
                needs = schedule.STAGES_A_PLACE[way.schedule], way.recompute == "off", -way.pieces
                refused.append((needs, str(error)))
                continue
            found = sorted([*found, candidate], key=self._score)
            most = min(most, self._score(candidate))
            if (mesh.pp, way.pieces, way.recompute) == (1, 1, "off"):
                break
        return found, "" if found or not refused else min(refused)[1]

    def _ways(self, mesh: Mesh) -> Iterator[Way]:
        several = min(mesh.pp, mesh.dp) > 1
        for order in self.ask.orders if several else self.ask.orders[:1]:
            placement = Placement(self.ask.cluster, mesh, order)
            for pieces in self._counts(mesh):
                for name in self._names(mesh):
                    for recompute in self.ask.recompute if self.program.training else ("off",):
                        yield self._way(placement, pieces, name, recompute)

    def _names(self, mesh: Mesh) -> tuple[str, ...]:
        """One stage runs alike by all schedules, and forwards alone by all of as many stages."""
        training, stages = self.program.training, self.ask.stages
        names = self.ask.schedules if training else ("gpipe",)
        if stages is not None:
            known = names if training else tuple(schedule.SCHEDULES)
            names = tuple(n for n in known if schedule.STAGES_A_PLACE[n] * mesh.pp == stages)
        return names if training and mesh.pp > 1 else names[:1]

    def _way(self, placement: Placement, pieces: int, name: str, recompute: str) -> Way:
        group = self._group(placement, self._graphs(name, recompute, placement.mesh.dp))
        ends = self._outputs(placement, group)
        return Way(placement, group, pieces, self._share(pieces), name, recompute, ends)

    def _group(self, placement: Placement, graphs: bool) -> Group:
        tp, where = placement.mesh.tp, placement.tp
        # groups in other places are priced alike where devices and links are
        key = tp, replace(where.cluster, places=_moved(where.cluster)), where.crowd
        if (*key, graphs) not in self.groups:
            twin = self.groups.get((*key, not graphs))
            options = replace(self.ask.options, tp=tp, cluster=where.cluster, crowd=where.crowd, graphs=graphs)
            options, fuse = planner.running(self.program, options)
            if twin is not None:
                laid = planner.repriced(twin.laid, options, fuse)
            else:
                laid = planner.lay(self.program, options, fuse=fuse)
            self.groups[*key, graphs] = Group(laid, laid.work(self.batch), planner.collective(options))
        return self.groups[*key, graphs]

    def _graphs(self, schedule: str, recompute: str, dp: int) -> bool:
        return self._fused and as_graphs(schedule, recompute, dp, self.program.training)

    @cached_property
    def _fused(self) -> bool:
        return planner.fused(self.program, replace(self.ask.options, cluster=self.ask.cluster))

    def _weigh(self, way: Way, memory: float) -> Candidate:
        """PlanError where it does not fit."""
        return way.weighed(way.cuts(memory), self._summed(way.placement, way.group.work))

    def _summed(self, placement: Placement, work: Work) -> Placed | None:
        key = placement.mesh, placement.order
        if key not in self.sums:
            self.sums[key] = summed(placement, self.ask.options, work)
        return self.sums[key]

    def _outputs(self, placement: Placement, group: Group) -> float:
        """The last stage sends its whole results to every other."""
        pp = placement.mesh.pp
        if self.ask.outputs == "last" or pp == 1:
            return 0.0
        return placement.link.seconds(group.work.results(1.0)) * (pp - 1)

    # -- micro-batches -----------------------------------------------------------------------------

    @cached_property
    def batch(self) -> Batch | None:
        return self._found if isinstance(self._found, Batch) else None

    @cached_property
    def _found(self) -> Batch | Uncut:
        """The batch, cut as finely as it can be; or why it cannot."""
        if self.ask.micro_batches == 1 and self.ask.joined is None:
            return Uncut("one was asked for")
        factor = self.ask.joined.factor if self.ask.joined is not None else ""
        return microbatch.find(self.program, described(self.program), 2**30, factor=factor)

    def _counts(self, mesh: Mesh) -> list[int]:
        asked = self.ask.micro_batches
        rows = self.batch.pieces if self.batch is not None else 1
        if self.ask.joined is not None:
            rows = min(rows, *self.ask.joined.rows)
        if isinstance(asked, int):
            return [min(asked, rows)]
        most = min(rows, DEEP * mesh.pp) if mesh.pp > 1 else rows
        wanted = {2**k for k in range(most.bit_length())} | {mesh.pp, 2 * mesh.pp, 4 * mesh.pp, most}
        return sorted(n for n in wanted if n <= most)

    def _share(self, pieces: int) -> float:
        """The part of the program's batch that a micro-batch has."""
        rows = self.batch.pieces if self.batch is not None else 1
        own = max(self.ask.joined.rows) if self.ask.joined is not None else rows
        return ceil(own / pieces) / max(rows, own)

    def _notes(self) -> tuple[str, ...]:
        asked = self.ask.micro_batches
        wanted = asked != 1 and (asked != "auto" or any(m.pp > 1 for m in self.ask.meshes))
        if isinstance(self._found, Uncut) and wanted:
            return (f"micro_batches: 1 instead of {asked}: {self._found.reason}",)
        if isinstance(asked, int) and self.batch is not None and self.batch.pieces < asked:
            few = self.batch
            return (f"micro_batches: {few.pieces} instead of {asked}: {few.limit}",)
        return ()

    # -- words -------------------------------------------------------------------------------------

    def _reason(self, front: Sequence[Candidate]) -> str:
        best, *others = front
        what = "a call" if self.ask.options.objective == "latency" else "between results"
        mine = f"{best.name} takes {_ms(self._score(best))} {what}"
        if not others:
            return f"{mine}; nothing else was to be chosen or fits"
        second = others[0]
        gap = self._score(second) - self._score(best)
        more = {k: second.parts[k] - best.parts[k] for k in best.parts}
        top = sorted((k for k in more if more[k] * gap > 0), key=lambda k: -abs(more[k]))[:2]
        why = ", ".join(f"{_ms(more[k], sign=True)} {k}" for k in top)
        if gap <= 0:
            return f"{mine}; {second.name} is as fast within {CLOSE:.0%} and has more parts"
        return f"{mine}; next, {second.name}, {_ms(gap, sign=True)}: {why or 'replicas alone'}"

    def _too_large(self, refused: dict[Mesh, str]) -> str:
        lines = [f"{m}: {why}" for m, why in refused.items()]
        smallest = self._smallest()
        if smallest and smallest[0] <= self.ask.cluster.size:
            can = f"{smallest[1]} can, on {smallest[0]} of its devices"
            return "\n".join([f"no mesh that was asked for can run on {self.ask.cluster.label}; {can}", *lines])
        kind = f"devices like those of {self.ask.cluster.label}"
        nearest = (
            f"the smallest number of {kind} on which it fits is {smallest[0]} ({smallest[1]})"
            if smallest
            else f"no number of {kind} would be enough: an operator alone is too large for one, "
            "or there are too few of them for the stages of the schedule"
        )
        return "\n".join([f"the program does not fit {self.ask.cluster.label}; {nearest}", *lines])

    def _smallest(self) -> tuple[int, str] | None:
        """(devices, mesh): over the sizes of tp that lie in one host or are usual, and any number of stages."""
        dp = min(mesh.dp for mesh in self.ask.meshes)
        best: tuple[int, str] | None = None
        host = max(len(node) for node in self.ask.cluster.nodes)
        sizes = {m.tp for m in self.ask.meshes} | {n for n in range(1, host + 1) if host % n == 0} | USUAL
        for tp in sorted(sizes):
            pp = self._fewest_stages(tp, dp)
            if pp is not None and (best is None or tp * pp * dp < best[0]):
                best = tp * pp * dp, str(Mesh(tp, pp, dp))
        return best

    def _fewest_stages(self, tp: int, dp: int) -> int | None:
        cluster = grow(self.ask.cluster, max(tp, self.ask.cluster.size))
        training = self.program.training
        names = [n for n in ("1f1b", *self.ask.schedules) if n in self.ask.schedules]
        name = names[0] if training else "gpipe"
        counts = self._counts(Mesh(tp, pp=2**10))
        recompute = "full" if "full" in self.ask.recompute and training else "off"
        where = Placement(cluster.subset(range(tp)), Mesh(tp))
        ways = [self._way(where, n, name, recompute) for n in {min(counts), max(counts)}]
        spare = self.ask.cluster.device.memory - room(Mesh(tp, dp=dp), ways[0].group.work)

        def fits(pp: int) -> bool:
            for way in ways:
                with suppress(PlanError):
                    divided(way.line, Link(), spare, pp, name, min(way.pieces, DEEP * pp), training)
                    return True
            return False

        most = int(ways[0].line.legal.sum() - 1) // schedule.STAGES_A_PLACE[name]
        pp = next((p for p in (2**k for k in range(most.bit_length())) if fits(p)), None)
        if pp is None:
            return None
        return next((p for p in range(pp // 2 + 1, pp) if fits(p)), pp)


# -- what is asked ---------------------------------------------------------------------------------


def recompute(asked: str) -> tuple[str, ...]:
    """What `recompute=` leaves to choose among."""
    return RECOMPUTE if asked == "auto" else (asked,)


def allowed(name: str) -> tuple[str, ...]:
    """The schedules that `schedule=` leaves to choose among. Raises InputError for an unknown one."""
    if name == "auto":
        return tuple(schedule.SCHEDULES)
    if name not in schedule.SCHEDULES:
        raise InputError(f"schedule={name!r}: it takes {', '.join(schedule.SCHEDULES)}, or 'auto'")
    return (name,)


def _moved(cluster: Cluster) -> tuple[int, ...]:
    """The places of a cluster, moved to the first host they fit."""
    outer = cluster.spans[-2] if len(cluster.levels) > 1 else cluster.spans[-1]
    first = int(cluster.at.min()) // outer * outer
    return tuple(int(place) - first for place in cluster.at)


def _ms(seconds: float, sign: bool = False) -> str:
    return f"{seconds * 1e3:{'+' if sign else ''}.4g} ms"
