"""Chunks within the stages of a pipeline: regions keep to their stage, and nothing is open at its end.

Every model is planned as a pipeline with overlap forced. Its program in chunks is run as pretend ranks in
lockstep, as for one stage; each stage's program is proven, alone and in the order in which the places of a
schedule run it for several micro-batches. Faults are seeded: a stage that leaves a start open, and a region
that goes over a border.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import fx

import plait
from plait.cluster import Cluster, Device, Level, Protocol, Transport
from plait.errors import ScheduleError
from plait.passes import schedule as orders
from plait.passes.overlap import places
from plait.passes.overlap.check import check, closed
from plait.passes.overlap.schedule import RECEIVE, SEND, Item, Launch, Schedule, schedule
from plait.passes.overlap.weave import weave
from plait.passes.partition import Local
from plait.passes.pipeline import Borders, Stage, split
from plait.plan import planner, staged
from plait.plan.plan import Plan
from plait.plan.planner import Planned
from plait.plan.staged import Pieces
from plait.program import Program
from plait.report.explain import explain
from tests import pretend, zoo
from tests.cases import CASES, Setup
from tests.compare import demand, plain, within
from tests.fuzz import recipe
from tests.gloo.prove import free
from tests.lockstep.test_overlap_forced import NARROW, halved, left_whole, prove, told

N = 2  # ranks of a stage


def pieces(program: Program, pp: int, count: int, micro_batches: int = 1, name: str = "gpipe") -> Pieces:
    options = planner.Options(N, free(N), overlap=count)
    return staged.make(program, options, staged.Wish(pp, free(N * pp), micro_batches, name, "off"))


def stages(planned: Planned, rank: int) -> tuple[Local, tuple[Stage, ...]]:
    local = planned.local(rank)
    return local, split(local, planned.flow.borders, planned.program.graph)


def programs(planned: Planned) -> list[list[Schedule]]:
    """[stage][rank]: what each launches."""
    ranks = [stages(planned, rank) for rank in range(N)]
    alone = [[schedule(replace(local, graph=s.graph), N) for s in cut] for local, cut in ranks]
    return [list(of) for of in zip(*alone, strict=True)]


MODELS = [
    pytest.param(
        name, pp, count, id=f"{name}-pp{pp}-{count}", marks=() if i % 12 == 5 * (pp - 2) else pytest.mark.full
    )
    for i, name in enumerate(zoo.NAMES)
    for pp, count in ((2, 2 + i % 2), (3, 3 - i % 2))
]


@pytest.mark.parametrize(("name", "pp", "count"), MODELS)
@pytest.mark.sample(2)
def test_models(name: str, pp: int, count: int) -> None:
    model, args, kwargs = zoo.build(name)
    setup = Setup(model, args, kwargs).to(torch.float32 if name in NARROW else torch.float64)
    made = pieces(pretend.trace(setup, True), pp, count)
    (planned,) = made.planned
    demand(list(left_whole(planned, N, count)), about=name)
    told(planned)
    prove(planned, setup, N, True, plain(setup), within(dtype=torch.float32))
    local, cut = stages(planned, 0)
    for stage in cut:
        closed(stage.graph, f"stage {stage.index}")
    for ranks in programs(planned):
        check([s.twice() for s in ranks])
    started = [sum(str(n.target).endswith(".start") for n in s.graph.nodes) for s in cut]
    assert sum(started) == len(halved(local)) and sum(map(bool, started)) > 1, started
    where = planned.flow.stages
    for region in planned.chosen:
        assert len({where[node] for node in region.nodes}) == 1
    assert {o.stage for o in made.plan.overlaps if o.form != "whole"} == {where[r.nodes[0]] for r in planned.chosen}
    assert Plan.from_json(made.plan.to_json()) == made.plan


@pytest.mark.parametrize("seed", range(4000, 4064))
def test_a_random_model_in_stages(seed: int) -> None:
    setup, pp, count = recipe(seed), 2 + seed % 3, 2 + seed % 2
    made = pieces(pretend.trace(setup, True), pp, count, 1 + seed % 2)
    for planned in made.planned:
        demand(list(left_whole(planned, N, count)), about=str(setup.model))
        for stage in stages(planned, 0)[1]:
            closed(stage.graph, f"stage {stage.index}")
        for ranks in programs(planned):
            check([s.twice() for s in ranks])
    if len(made.planned) == 1:
        prove(made.planned[0], setup, N, True, plain(setup), within(1e-9, 1e-10))


# -- the order of actions ----------------------------------------------------------------------------


@cache
def uneven() -> Pieces:
    """Three micro-batches of five rows: of two and of one."""
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    model = torch.nn.Sequential(*(layer for _ in range(4)))
    setup = Setup(model.double(), (torch.randn(5, 6, 8, dtype=torch.float64),))
    return pieces(pretend.trace(setup, True), 2, 3, micro_batches=3, name="interleaved")


def alone(order: orders.Schedule, known: list[list[list[Schedule]]]) -> list[list[Schedule]]:
    """[place][rank]: the forwards of all micro-batches, behind each other as the schedule has them."""
    out = []
    for actions in order.places:
        ranks = []
        for rank in range(N):
            line = Schedule(())
            for a in (a for a in actions if a.kind == "F"):
                line = line.then(known[a.piece][a.stage][rank], f"@{a}")
            ranks.append(line)
        out.append(ranks)
    return out


@pytest.mark.parametrize("name", ("interleaved", "zero-bubble"))
def test_stages_that_end_closed_follow_each_other_in_any_order(name: str) -> None:
    made = uneven()
    known = [programs(planned) for planned in made.planned]
    assert {p.flow.borders for p in made.planned} == {made.staged.borders}
    count = len(known[0])
    assert count == 4
    if name == "interleaved":
        order = orders.make(name, 2, 3)
    else:  # every stage on a place of its own
        order = orders.make(name, count, 3)
    for ranks in alone(order, known):
        check(ranks)
        assert [Schedule.parse(str(s)) for s in ranks] == ranks


def test_an_order_of_actions_that_differs_between_ranks_is_found() -> None:
    known = [programs(planned) for planned in uneven().planned]
    orders = ((0, 1), (1, 0))
    one, other = (
        Schedule(()).then(known[a][0][rank], f"@{a}").then(known[b][0][rank], f"@{b}")
        for rank, (a, b) in enumerate(orders)
    )
    with pytest.raises(ScheduleError, match="deadlock|collective \\d+ is"):
        check([one, other])


# -- messages ----------------------------------------------------------------------------------------


@cache
def together(name: str) -> tuple[Schedule, ...]:
    """All that every rank launches in a step of three micro-batches, both ways."""
    made = uneven()
    count = len(made.staged.borders.firsts) + 1
    order = orders.make(name, count // orders.STAGES_A_PLACE[name], 3)
    found = tuple(places.schedules(order, [[stages(p, rank) for rank in range(N)] for p in made.planned]))
    assert len(found) == len(order.places) * N
    return found


def messages(s: Schedule) -> list[int]:
    return [i for i, x in enumerate(s.items) if isinstance(x, Launch) and x.message]


def in_place_of(all_: tuple[Schedule, ...], rank: int, items: list[Item]) -> list[Schedule]:
    return [replace(s, items=tuple(items)) if r == rank else s for r, s in enumerate(all_)]


@pytest.mark.parametrize("name", orders.SCHEDULES)
def test_stages_and_their_messages_come_to_one_order(name: str) -> None:
    """Of every schedule of a pipeline, forward and back."""
    ranks = together(name)
    check(ranks)
    assert [Schedule.parse(str(s)) for s in ranks] == list(ranks)
    assert all({x.collective for x in s.launches if x.message} == {SEND, RECEIVE} for s in ranks)
    joint = {x.name.partition("@")[2] for s in ranks for x in s.launches if x.collective and not x.message}
    assert {name[1] for name in joint} > {"F"}, "collectives of both ways"
    assert sum(map(len, map(messages, ranks))) == 2 * 2 * N * 3 * 3  # ends, ways, ranks, borders, micro-batches


@pytest.mark.parametrize("name", orders.SCHEDULES)
@pytest.mark.parametrize("rank", (0, 3))
@pytest.mark.sample(2)
def test_a_message_that_is_left_out_is_found(name: str, rank: int) -> None:
    ranks = together(name)
    for at in messages(ranks[rank]):
        gone = ranks[rank].items[at]
        assert isinstance(gone, Launch)
        why = f"{gone.name} is sent to rank {rank}, and not received" if gone.collective == RECEIVE else "deadlock"
        with pytest.raises(ScheduleError, match=why):
            check(in_place_of(ranks, rank, [x for i, x in enumerate(ranks[rank].items) if i != at]))


@pytest.mark.parametrize("name", orders.SCHEDULES)
@pytest.mark.parametrize("rank", (0, 3))
@pytest.mark.sample(2)
def test_a_message_on_the_other_side_of_a_collective_is_found(name: str, rank: int) -> None:
    """Of the one before it and the one behind it, on one rank of a place."""
    ranks, found = together(name), 0
    mine = list(ranks[rank].items)
    joint = [i for i, x in enumerate(mine) if isinstance(x, Launch) and x.collective and not x.message]
    for at in messages(ranks[rank]):
        for other in (max((i for i in joint if i < at), default=None), min((i for i in joint if i > at), default=None)):
            if other is None:
                continue
            items = [x for i, x in enumerate(mine) if i != at]
            items.insert(other, mine[at])  # before it where it stood behind it, and behind it where it stood before
            with pytest.raises(ScheduleError):
                check(in_place_of(ranks, rank, items))
            found += 1
    assert found > 6


@pytest.mark.parametrize("name", orders.SCHEDULES)
@pytest.mark.parametrize("rank", (0, 3))
@pytest.mark.sample(2)
def test_messages_in_another_order_on_one_rank_are_found(name: str, rank: int) -> None:
    ranks = together(name)
    mine = ranks[rank].items
    for a, b in pairwise(messages(ranks[rank])):
        items = list(mine)
        items[a], items[b] = items[b], items[a]
        with pytest.raises(ScheduleError):
            check(in_place_of(ranks, rank, items))


def test_a_schedule_that_locks_is_found_whatever_its_ranks_agree_on() -> None:
    """Both ranks of place 0 wait for a gradient before they send what it is made of."""
    made = uneven()
    order = orders.make("1f1b", 4, 3)
    line = list(order.places[0])
    at = line.index(orders.Action(0, "B", 0))
    before = line.index(orders.Action(0, "F", 0))
    line.insert(before, line.pop(at))
    wrong = replace(order, places=(tuple(line), *order.places[1:]))
    known = [[stages(p, rank) for rank in range(N)] for p in made.planned]
    with pytest.raises(ScheduleError, match="deadlock: rank 0 compute stands at `compute: .*0B0 = receive"):
        check(places.schedules(wrong, known))


def test_rows_that_differ_are_cut_as_they_can_be() -> None:
    plan = uneven().plan
    assert plan.staged is not None and plan.staged.rows == (2, 2, 1)
    (single,) = plan.staged.overlaps
    assert {o.stage for o in plan.overlaps} == {o.stage for o in single} == set(range(4))
    text = explain(plan)
    assert all(f"stage {o.stage}, {o.region}: {o.form}" in text for o in plan.overlaps)
    own = {(o.region, o.form) for o in plan.overlaps}
    assert all(f"of 1 rows: stage {o.stage}, {o}" in text for o in single if (o.region, o.form) not in own)


# -- faults ------------------------------------------------------------------------------------------


def woven_stages() -> list[Stage]:
    (planned,) = pieces(pretend.trace(CASES["b43_chain_of_collectives"].setup(), True), 2, 2).planned
    return [s for s in stages(planned, 0)[1] if any(str(n.target).endswith(".start") for n in s.graph.nodes)]


def without(graph: fx.Graph, gone: fx.Node) -> fx.Graph:
    """The graph with the operand of `gone` in its place."""
    copy, known = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        known[node] = known[gone.args[0]] if node is gone else copy.node_copy(node, known.__getitem__)  # type: ignore[index]
    return copy


def test_a_stage_that_leaves_a_start_open_is_refused() -> None:
    for stage in woven_stages():
        closed(stage.graph, "the stage")
        for node in stage.graph.nodes:
            name, _, half = str(node.target).partition(".")
            if node.op == "call_module" and half == "wait":
                with pytest.raises(ScheduleError, match=f"the stage: {name} is left open at the end"):
                    closed(without(stage.graph, node), "the stage")
            elif node.op == "call_module" and half == "start":
                with pytest.raises(ScheduleError, match=f"the stage: {name} is waited for, and started elsewhere"):
                    closed(without(stage.graph, node), "the stage")


def test_a_region_over_a_border_is_refused() -> None:
    """The regions of one stage, cut at every node in turn: what parts a start from its wait is found."""
    setup = CASES["b43_chain_of_collectives"].setup()
    planned = planner.make(pretend.trace(setup, True), planner.Options(N, free(N), overlap=2))
    local = weave(planned.flow, planned.chosen, 0)
    assert halved(local)
    parted = 0
    for first in [n for n in planned.program.graph.nodes if n.op == "call_function"][1:]:
        borders = Borders((first.name,))
        cut = split(local, borders, planned.program.graph)
        waits = [{str(n.target) for n in s.graph.nodes if str(n.target).endswith(".wait")} for s in cut]
        starts = [{str(n.target) for n in s.graph.nodes if str(n.target).endswith(".start")} for s in cut]
        apart = any({x.replace(".start", ".wait") for x in a} != b for a, b in zip(starts, waits, strict=True))
        found = 0
        for stage in cut:
            try:
                closed(stage.graph, f"stage {stage.index}")
            except ScheduleError:
                found += 1
        assert bool(found) == apart, first.name
        parted += apart
    assert parted, "no border parted a start from its wait"


# -- the choice --------------------------------------------------------------------------------------


def hosts() -> Cluster:
    """CPUs of which two share a slow line, and no memory."""
    device = Device("cpu", "cpu", (("float32", 1e12),), 1e11, 2**36, 1e-6)
    gloo = Transport("gloo", (Protocol("plain"),), ("one_shot", "ring"))
    levels = (Level("line", 2, 2e9, 5e-5), Level("net", 2, 1e9, 5e-5))
    return Cluster("hosts", device, levels, (gloo,))


def chosen(rows: int, **options: object) -> Plan:
    layers = [torch.nn.Sequential(torch.nn.Linear(2048, 8192), torch.nn.Linear(8192, 2048)) for _ in range(4)]
    x = torch.empty(rows, 2048, device="meta")
    return plait.plan(
        torch.nn.Sequential(*layers).to("meta"), (x,), cluster=hosts(), tp=2, pp=2, micro_batches=2, **options
    )  # type: ignore[arg-type]


def test_auto_weighs_chunks_in_every_stage() -> None:
    """They hide transfers where there are rows enough, and the predicted call is shorter; a few stay whole."""
    many, whole, few = chosen(8192), chosen(8192, overlap="off"), chosen(16)
    assert {o.stage for o in many.overlaps if o.form != "whole"} == {0, 1}
    assert many.seconds < whole.seconds and not whole.overlaps
    assert many.staged is not None and whole.staged is not None
    gained = [a - b for a, b in zip(whole.staged.seconds, many.staged.seconds, strict=True)]
    told = [sum(o.whole - o.seconds for o in many.overlaps if o.stage == s) for s in range(2)]
    assert gained == pytest.approx(told)
    assert few.overlaps and all(o.form == "whole" and o.reason for o in few.overlaps)
    assert "stage 1, " in explain(few)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"cluster": "dgx-h100[4]"}, "stages on CUDA devices run without chunks"),
        ({"cluster": "loopback[4]", "training": True, "recompute": "full"}, "activations are computed again"),
    ],
)
def test_what_runs_without_is_said(options: dict[str, object], why: str) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    plan = plait.plan(model, (torch.empty(8, 64),), tp=2, pp=2, overlap=2, **options)  # type: ignore[arg-type]
    assert f"overlap: off instead of 2: {why}" in plan.notes and not plan.overlaps


def test_chunks_that_are_asked_for_leave_the_mesh_to_the_choice() -> None:
    """But on CUDA devices, whose stages run without."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))

    def meshes(cluster: str) -> set[int]:
        plan = plait.plan(model, (torch.empty(8, 64),), cluster=cluster, overlap=2)
        assert plan.choice is not None
        return {c.pp for c in plan.choice.front}

    assert len(meshes("loopback[4]")) > 1 and meshes("dgx-h100[4]") == {1}
