"""Timelines of plans: they end when the plan says, and show who works beside whom."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import plait
from plait.capture import capture
from plait.cluster import Cluster
from plait.plan import planner
from plait.plan.plan import Plan
from plait.timeline import Timeline


def planned(**asked: object) -> Plan:
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)) for _ in range(4)]
        x = torch.empty(8, 256, 512)
    return plait.plan(nn.Sequential(*blocks), (x,), cluster="dgx-h100[4]", **asked)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "training"),
    [
        pytest.param(asked, training, id=f"{asked}-{training}", marks=() if i % 2 == training else pytest.mark.full)
        for i, asked in enumerate(({"pp": 1}, {"pp": 4}, {"pp": 2}, {"pp": 1, "overlap": 4}))
        for training in (False, True)
    ],
)
def test_a_timeline_ends_with_its_plan(asked: dict[str, int], training: bool) -> None:
    plan = planned(training=training, **asked)
    timeline = plait.simulate(plan)
    assert timeline.end == pytest.approx(plan.seconds, rel=1e-6)
    assert max(event.end for event in timeline.events) == pytest.approx(timeline.end)
    assert plait.simulate(Plan.from_json(plan.to_json())) == timeline
    assert str(Timeline.parse(str(timeline))) == str(timeline)


def test_stages_work_side_by_side() -> None:
    plan = planned(pp=2, micro_batches=4)
    timeline = plait.simulate(plan)
    assert set(timeline.lanes) >= {"place 0", "place 1"}
    together = timeline.busy("place 0") + timeline.busy("place 1") - timeline.busy("place 0", "place 1")
    assert together > 0
    first = {e.name: e for lane in ("place 0", "place 1") for e in timeline.on(lane)}
    assert first["0F1"].begin < first["1F0"].end <= first["1F1"].end


def test_a_timeline_is_drawn() -> None:
    """A row a place; the second begins when the first piece reaches it, and its pieces keep their order."""
    timeline = plait.simulate(planned(pp=2, micro_batches=4))
    first, second, *_ = (row.split("|")[1] for row in timeline.gantt(80).splitlines() if "place" in row)
    assert len(first) == len(second) == 80
    assert first.index("0F0") < first.index("0F1") < first.index("0F3")
    assert second.index("1F0") > first.index("0F0") and second.startswith(".")
    assert timeline.gantt(80).splitlines()[-1].endswith(f"{timeline.end * 1e3:.3f} ms")


def test_collectives_that_nothing_hides_stop_compute() -> None:
    plan = planned(pp=1, overlap="off", training=True)
    timeline = plait.simulate(plan)
    assert timeline.exposed("transfers", ["compute"]) == pytest.approx(
        sum(p.seconds for p in plan.collectives)
    )
    assert len(timeline.on("transfers")) == len(plan.collectives) > 0


def test_a_move_that_takes_less_as_it_is_run_begins_after_what_it_moves() -> None:
    """Small sums go in one hop, without a launch of the library's: that is shorter, and beside nothing."""
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), torch.empty(8, 64)
    plan = plait.plan(model, (x,), cluster="dgx-h100[2]", tp=2, pp=1)
    timeline = plait.simulate(plan)
    assert [o.form for o in plan.overlaps] == ["one hop"]
    (move,) = timeline.on("transfers")
    assert move.begin == pytest.approx(max(event.end for event in timeline.on("compute")))
    assert timeline.end == pytest.approx(plan.seconds)


@pytest.mark.parametrize(("asks", "first"), [(False, 1), (True, 2)])
def test_the_way_back_computes_what_learns(asks: bool, first: int) -> None:
    """A gradient of the data that asks for one, and of the weights that are not frozen."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
        x = torch.empty(256, 512, requires_grad=asks)
    model[2].requires_grad_(False)
    times = plait.plan(model, (x,), tp=1, training=True, cluster="loopback[1]").times
    back = [backward / forward for _, forward, backward in times]
    assert [round(b) for b in back] == [first, 2, 1, 2]
    laid = planner.lay(capture(model, (x,), training=True), planner.Options(1, Cluster.parse("loopback[1]")))
    assert [bool(step.kept(1.0)) for step in laid.whole.steps] == [True, True, False, True]
    model.requires_grad_(False)
    times = plait.plan(model, (x,), tp=1, training=True, cluster="loopback[1]").times
    assert [round(backward / forward) for _, forward, backward in times] == [int(asks)] * 4
