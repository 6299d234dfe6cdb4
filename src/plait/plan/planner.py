"""Planner: Program + Cluster -> Plan, and a Plan back to the strategies it spells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from math import prod

import torch
from torch import fx

from plait.cluster import Cluster
from plait.cluster.software import LAUNCH
from plait.cost.comm import price
from plait.errors import LaidError, PlanError
from plait.passes.chains import computes
from plait.passes.microbatch import Batch
from plait.passes.norms import Norm, inside
from plait.passes.overlap.chunks import Form
from plait.passes.overlap.flow import Flow
from plait.passes.overlap.regions import Region
from plait.passes.overlap.weave import weave
from plait.passes.pack import merge
from plait.passes.partition import BACK, Local, Share, Site, partition
from plait.passes.pipeline import Borders
from plait.passes.rings import find, unfixed
from plait.passes.rings import fixed as fixed_sizes
from plait.plan import direct, overlaps, owed, packing
from plait.plan import work as works
from plait.plan.classes import classes, leaders
from plait.plan.direct import Peers
from plait.plan.kept import kept
from plait.plan.packing import Packed
from plait.plan.plan import Choice, Overlapped, Placed, Plan
from plait.plan.prices import Collective, CostPrices, Rates
from plait.plan.problem import Problem, build
from plait.plan.sharding import solve
from plait.program import Program
from plait.rules.describe import Description
from plait.rules.described import described
from plait.rules.equation import flatten
from plait.rules.layout import Strategy
from plait.rules.moves import Cut

Priced = Callable[[str, float, str], tuple[str, float]]  # algorithm and seconds of (collective, bytes, site)
Watch = Callable[[int, int, int, str], float | None]  # seconds of a matmul as it was timed, if it could be
Held = Mapping[str, Cut | None]  # weights as they are loaded: node -> rows by rank, or whole

# The backend's own collective is kept unless another is cheaper by more than prices err.
NOISE = 1.1
# A split for direct moves is taken if it is predicted this much faster than the best blocking one.
DIRECT_GAIN = 1.03
COPIES = "gradients"  # among a plan's times: their way out of a step's graphs
_SLOWER = "no faster way for it through the peers' memory is known"
# What a move by rows is taken to cost beside a matmul when such a split is looked for.
BESIDE = 0.1


@dataclass(frozen=True)
class Options:
    """What the user asked of the plan. `cluster`: the devices of the tensor-parallel group."""

    tp: int
    cluster: Cluster
    algorithm: str | Mapping[str, str] = "auto"
    objective: str = "latency"
    deterministic: bool = False
    overlap: str | int = "auto"
    crowd: float = 1.0  # groups that share the slowest link, all at once (plan/placement.py)
    graphs: bool = True  # a CUDA device may run it as graphs, with kernels fused
    choice: Choice | None = None  # the joint choice by which tp came about
    watch: Watch | None = field(default=None, repr=False, compare=False)  # of the devices at hand

    def matmul(self, m: float, n: float, k: float, dtype: str) -> float:
        """Seconds of [m, k] x [k, n] in a CUDA graph: as it was timed, else by the device's clock."""
        seen = self.watch(round(m), round(n), round(k), dtype) if self.watch is not None else None
        return seen if seen is not None else self.cluster.device.graphed_matmul(m, n, k, dtype)


@dataclass(frozen=True)
class Laid:
    """A program with a strategy for every operator."""

    program: Program
    description: Description
    problem: Problem
    tied: Mapping[fx.Node, int]  # nodes that look alike
    strategies: dict[fx.Node, Strategy]
    grads: set[fx.Node]
    prices: CostPrices
    fused: bool  # norms and chains are priced as one kernel each

    @cached_property
    def flow(self) -> Flow:
        return Flow(self.program, self.description, self.strategies, self.grads)

    @cached_property
    def whole(self) -> works.Work:
        """Of the whole batch."""
        return self._work(None)

    def work(self, batch: Batch | None) -> works.Work:
        """`batch`: how it is to be cut, where it can be."""
        return self.whole if batch is None else self._work(batch)

    def _work(self, batch: Batch | None) -> works.Work:
        return works.work(self.flow, self.problem, self.tied, self.prices.rates, batch, self.prices.chained)

    def alone(self) -> float:
        """Seconds of the operators on one device; those that look alike are priced once."""
        members = Counter(self.tied.values())
        each = ((members[c], self.problem.choices[node]) for c, node in leaders(self.tied).items())
        return sum(n * self.prices.node(choice, 0) for n, choice in each if not choice.weight)

    def times(self, packed: Sequence[Packed]) -> Iterator[tuple[str, float, float]]:
        """Seconds there and back of every operator that runs by itself; the inside of a fused norm does not."""
        saved = {name: p.part for p in packed for name in p.matmuls}
        inside = {step.node.name for step in self.whole.steps if self._within(step.node)}
        for name, there, back in self.whole.times():
            if name not in inside:
                left = 1 - saved.get(name, 0.0)
                yield name, left * there, left * back

    def _within(self, node: fx.Node) -> bool:
        choice = self.problem.choices.get(node)
        return choice is not None and self.prices.fused(choice, self.strategies[node])


@dataclass(frozen=True)
class Planned:
    """A plan with the program it belongs to; `local` gives the program of one rank."""

    plan: Plan
    program: Program
    description: Description
    strategies: dict[fx.Node, Strategy]
    grads: set[fx.Node]
    chosen: Mapping[Region, Form] = field(default_factory=dict)  # regions that are cut in time

    @property
    def flow(self) -> Flow:
        borders = self.plan.staged.borders if self.plan.staged is not None else Borders()
        return Flow(self.program, self.description, self.strategies, self.grads, borders)

    def local(self, rank: int) -> Local:
        made = weave(self.flow, self.chosen, rank)
        merge(made, self.plan.packed)
        return made


def lay(
    program: Program,
    options: Options,
    fixed: Held | None = None,
    *,
    like: Laid | None = None,
    fuse: bool = False,
    beside: float = 1.0,
) -> Laid:
    """The cheapest strategies; `fixed` holds weights to layouts that are already loaded.

    `like`: the same choices by other prices. `fuse`: norms, and chains, are one kernel each. `beside`: the part
    of a move by rows that is taken to be left where it stands at a matmul.
    """
    if like is not None:
        description, problem, tied = like.description, like.problem, like.tied
    else:
        description = described(program)
        problem = build(program, description, options.tp)
        _hold(program, problem, fixed or {})
        tied = classes(problem)
    prices = _prices(program, problem, options, fuse)
    if beside < 1:
        prices = prices.hiding(problem, beside)
    strategies = solve(problem, prices, tied).strategies
    return Laid(program, description, problem, tied, strategies, program.differentiable(), prices, fuse)


def repriced(laid: Laid, options: Options, fuse: bool) -> Laid:
    """The same strategies by other prices."""
    return replace(laid, prices=_prices(laid.program, laid.problem, options, fuse), fused=fuse)


def _prices(program: Program, problem: Problem, options: Options, fuse: bool) -> CostPrices:
    norms = inside(program.graph) if fuse else {}
    prices = CostPrices.of(problem, rates(options.cluster, program), collective(options), norms)
    return replace(prices, chained=_chained(program, norms) if fuse else frozenset[fx.Node]())


def _chained(program: Program, norms: Mapping[fx.Node, Norm]) -> frozenset[fx.Node]:
    """What runs in chains; a norm's kernel reads and writes memory."""
    ends = {n for norm in norms.values() for n in (norm.x, norm.last)}
    return frozenset(n for n in program.graph.nodes if computes(n) and n not in norms and n not in ends)


def make(
    program: Program,
    options: Options,
    fixed: Held | None = None,
    laid: Laid | None = None,
) -> Planned:
    """The cheapest plan; `laid`: the strategies that are cheapest where every move blocks."""
    options, fuse = running(program, options)
    blocking = laid if laid and laid.fused == fuse else lay(program, options, fixed, like=laid, fuse=fuse)
    best = _planned(blocking, options)
    if not fuse or _peers(program, options) is None:
        return best
    rows = _planned(lay(program, options, like=blocking, fuse=True, beside=BESIDE), options)
    margin = DIRECT_GAIN if direct.routes(best.plan.overlaps) else 1.0
    return rows if rows.plan.seconds * DIRECT_GAIN < best.plan.seconds * margin else _slower(best, rows)


def _slower(best: Planned, rows: Planned) -> Planned:
    """`best`, which says of what blocks in it that moves of rows were weighed."""
    plan = best.plan
    if direct.routes(plan.overlaps) or not direct.routes(rows.plan.overlaps):
        return best
    mine, other = (f"{1e3 * p.seconds:.3g} ms" for p in (plan, rows.plan))
    why = f"by rows through the peers' memory a call is predicted to take {other} instead of {mine}"
    names = overlaps.left(plan.collectives, plan.overlaps, whole=False)
    return replace(best, plan=replace(plan, bare=dict.fromkeys(names, why)))


def running(program: Program, options: Options) -> tuple[Options, bool]:
    """With the price of a launch in what runs, as a CUDA graph launches nothing from the host; whether it is fused."""
    if not graphed(program, options):
        return options, fused(program, options)
    return replace(options, cluster=options.cluster.with_launch(LAUNCH["graph"])), True


def graphed(program: Program, options: Options) -> bool:
    """Whether it runs as one CUDA graph."""
    return options.graphs and options.cluster.device.kind == "cuda" and fixed_sizes(program)


def fused(program: Program, options: Options) -> bool:
    """Whether what is element-wise runs in chains, and norms as one kernel each or in these (runtime/fused.py)."""
    training = options.cluster.device.kind == "cuda" and program.training and not program.sizes
    return (options.graphs and training) or graphed(program, options)


def _peers(program: Program, options: Options) -> Peers | None:
    """Devices whose memory the moves may go through, where the user left the choice to us."""
    free = options.overlap == "auto" and options.algorithm == "auto"
    return Peers.of(options.cluster, options.tp, options.matmul) if free and fixed_sizes(program) else None


def _barred(program: Program, options: Options) -> str:
    """Why no move of it goes through the peers' memory, which is what hides moves on CUDA; or ''."""
    if options.overlap != "auto" or options.cluster.device.kind != "cuda" or _peers(program, options) is not None:
        return ""
    if why := unfixed(program):
        return f"{why}, so nothing moves through the peers' memory"
    if options.algorithm != "auto":
        return "its algorithm was asked for, so nothing moves through the peers' memory"
    return "these devices do not reach each other's memory"


def replay(program: Program, plan: Plan, options: Options) -> Planned:
    """The strategies that `plan` spells, for the same program."""
    if plan.program != program.digest:
        raise PlanError(
            f"the plan is for program {plan.program}, this model captures as {program.digest}; "
            "plan again with plan=None"
        )
    description = described(program)
    problem = build(program, description, options.tp)
    strategies = {}
    for node, choice in problem.choices.items():
        label = plan.strategies.get(node.name, "whole")
        by_label = {s.label: s for s in choice.strategies}
        if label not in by_label:
            raise PlanError(f"{node.name} has no strategy {label}; it has {', '.join(by_label)}")
        strategies[node] = by_label[label]
    grads = program.differentiable()
    planned = Planned(plan, program, description, strategies, grads)
    return replace(planned, chosen=overlaps.again(planned.flow, plan))


def rates(cluster: Cluster, program: Program) -> Rates:
    """What one device reaches on the program's own dtype."""
    dtypes = [w.dtype for w in program.weights if w.dtype.is_floating_point]
    dtype = max(set(dtypes), key=dtypes.count) if dtypes else torch.float32
    device = cluster.device
    return Rates(
        device.peak(str(dtype)) * device.tiles[0].share,
        device.bandwidth * device.memory_share,
        device.launch,
        device.kind == "cpu",
    )


def collective(options: Options) -> Collective:
    """Seconds of a collective on the axis, by the algorithm that would run."""

    @cache
    def seconds(kind: str, nbytes: float) -> float:
        return pick(options, kind, nbytes)[1]

    return seconds


def pick(options: Options, kind: str, nbytes: float, site: str = "") -> tuple[str, float]:
    """The algorithm for one collective, and its predicted seconds."""
    wanted = options.algorithm
    if not isinstance(wanted, str):
        wanted = wanted.get(site, "auto")
    best = price(
        kind,
        nbytes * options.crowd,
        range(options.tp),
        options.cluster,
        None if wanted == "auto" else wanted,
        transport=options.cluster.transports[0].name,  # the process group's, which moves run on
        deterministic=options.deterministic,
        noise=NOISE,
    )
    return best.algorithm if wanted == "auto" else wanted, best.seconds


def _hold(program: Program, problem: Problem, fixed: Held) -> None:
    """By the rows that ranks hold, for another program has other names for the same split."""
    wrong: dict[str, str] = {}
    for node, choice in problem.choices.items():
        if not choice.weight or node.name not in fixed:
            continue
        wanted = fixed[node.name]
        (dims,) = choice.results
        cuts = [Cut.of(dims, s.split) if s.split else None for s in choice.strategies]
        others = {i for i, cut in enumerate(cuts) if cut != wanted}
        if len(others) == len(cuts):
            wrong[program.weight(node.name).name] = str(wanted) if wanted is not None else "whole"
        problem.choices[node] = replace(choice, forbidden=frozenset(others))
    if wrong:
        found = ", ".join(f"{name} as it is loaded ({how})" for name, how in wrong.items())
        raise LaidError(
            f"this form of call cannot use {found}: a plait.compile of its own lays its weights out for it"
        )


def _planned(laid: Laid, options: Options) -> Planned:
    program, strategies, flow = laid.program, laid.strategies, laid.flow
    first = partition(program, laid.description, strategies, laid.grads, 0)
    priced = _priced(options)
    placed = tuple(p for site in first.sites.values() for p in _place(site, priced))
    work, copies = laid.whole, _copies(first, options, program)
    rates = laid.prices.rates
    machine = overlaps.machine(options.cluster, options.tp, laid.prices.collective)
    packed = tuple(packing.decide(flow, _clock(program, options)))
    packs = tuple(dict.fromkeys(p.weights for p in packed))
    merge(first, packs)
    listed = _direct(program, first, placed, options)
    chosen: dict[Region, Form] = {}
    if not listed:
        chosen, listed = overlaps.decide(flow, options.overlap, machine, first)
        if options.overlap == "auto" and not chosen:
            listed += owed.weigh(program, first, {p.name: p.seconds for p in placed}, machine)
    barred = _barred(program, options) or (_SLOWER if direct.routes(listed) else "")
    bare = overlaps.bare(flow, first, placed, listed, barred) if overlaps.asked(options.overlap) else {}
    times = (*[(COPIES, 0.0, copies)] * (copies > 0), *laid.times(packed))
    saved = sum(o.whole - o.seconds for o in listed)
    alone = laid.alone() + sum(step.launches for step in work.steps) * rates.launch
    splits = {s.split.name: str(s.split) for s in strategies.values() if s.split is not None}
    plan = Plan(
        program=program.digest,
        tp=options.tp,
        pp=1,
        dp=1,
        cluster=str(options.cluster),
        training=program.training,
        objective=options.objective,
        strategies={n.name: s.label for n, s in strategies.items() if s.label != "whole"},
        splits=splits,
        weights={
            share.weight.name: _spell_share(share) for share in first.shares
        },
        collectives=placed,
        whole={n.name: a.reason for n, a in laid.description.accesses.items() if a.reason},
        kept=kept(first, program.unused, program.graph, laid.description, options.tp),
        bytes_per_rank=tuple(_stored(first.shares, r) for r in range(options.tp)),
        bytes_whole=sum(prod(w.shape) * w.dtype.itemsize for w in program.weights),
        seconds=sum(there + back for _, there, back in times) + sum(p.seconds for p in placed) - saved,
        seconds_alone=alone,
        notes=program.notes,
        overlap=str(options.overlap),
        overlaps=listed,
        bare=bare,
        times=times,
        packed=packs,
        choice=options.choice if options.choice and options.choice.program == program.digest else None,
    )
    return Planned(plan, program, laid.description, strategies, laid.grads, chosen)


def _copies(first: Local, options: Options, program: Program) -> float:
    """Seconds of gradients on their way out of a step's graphs (runtime/round_trip.py)."""
    if not (program.training and graphed(program, options)):
        return 0.0
    nbytes = _stored((share for share in first.shares if share.weight.requires_grad), 0)
    return 2 * nbytes / options.cluster.device.bandwidth


def _clock(program: Program, options: Options) -> packing.Clock:
    """Matmuls come in as many pieces as there are ranks where moves go through the peers' memory."""
    pieces = options.tp if _peers(program, options) is not None else 1
    return packing.Clock(options.cluster.device, pieces, options.matmul if graphed(program, options) else None)


def _direct(
    program: Program, rank: Local, placed: tuple[Placed, ...], options: Options
) -> tuple[Overlapped, ...]:
    peers = _peers(program, options)
    if peers is None:
        return ()
    return direct.weigh(find(program, rank), {p.name: p.seconds for p in placed}, peers)


def _priced(options: Options) -> Priced:
    """`pick`, remembered: by the site's name only where algorithms are given by names."""
    found = cache(partial(pick, options))
    if isinstance(options.algorithm, str):
        return lambda kind, nbytes, _: found(kind, nbytes)
    return found


def _place(site: Site, priced: Priced) -> list[Placed]:
    out = []
    nbytes = prod(site.shape) * site.dtype.itemsize
    steps = [(site.name, site.conversion.forward)]
    if site.grad:
        steps.append((f"{site.name}{BACK}", site.conversion.backward))
    for name, step in steps:
        if step.collective is not None:
            algorithm, seconds = priced(step.collective, nbytes, name)
            out.append(
                Placed(name, step.collective, nbytes, algorithm, seconds, site.source, site.module)
            )
    return out


def _spell_share(share: Share) -> str:
    """`shard(f7) on dim 0`; of heads that several ranks hold, who holds which."""
    split = share.layout.split
    if split is None:
        return "whole"
    at = split.dim(share.dims)
    assert at is not None and share.cut is not None
    text, g = f"shard({split.name}) on dim {at}", split.factors[0]
    alone = not any(split.touches(f) for f in flatten(share.dims[at]) if f.root() is not g.root())
    if share.cut.disjoint or not alone:
        return text
    rows = share.dims[at].size // g.size
    held = [(r[0][0] // rows, r[-1][1] // rows) for r in share.cut.rows]
    return f"{text}, heads {' | '.join(f'{lo}:{hi}' for lo, hi in held)} of {g.size}, {_twice(held)}"


def _twice(held: Sequence[tuple[int, int]]) -> str:
    """`head 1 on ranks 0 and 1`."""
    found: dict[int, list[int]] = {}
    for rank, (lo, hi) in enumerate(held):
        for head in range(lo, hi):
            found.setdefault(head, []).append(rank)
    return ", ".join(
        f"head {head} on ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
        for head, ranks in sorted(found.items())
        if len(ranks) > 1
    )


def _stored(shares: Iterable[Share], rank: int) -> int:
    """Bytes of weights that `rank` holds."""
    total = 0
    for share in shares:
        rows = 1.0
        if share.layout.split is not None:
            dim = share.layout.split.dim(share.dims)
            assert dim is not None
            rows = share.layout.split.size(share.dims[dim], rank) / share.dims[dim].size
        total += round(prod(share.weight.shape) * rows) * share.weight.dtype.itemsize
    return total
