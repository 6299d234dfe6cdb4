"""Moves through the peers' memory: what is found in a program, what is chosen, and that a fault shows."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.capture import capture
from plait.cluster import Cluster
from plait.passes import norms, ops
from plait.passes.rings import Route, find, only_norm
from plait.plan import planner, rival
from plait.plan.direct import HOP, RING, routes
from plait.plan.plan import Plan
from plait.program import Program, run_graph
from plait.runtime.executor import layouts


class Root(nn.Module):
    """A root mean square norm, written out."""

    def __init__(self, width: int, rounded: bool) -> None:
        super().__init__()
        self.scale, self.rounded = nn.Parameter(torch.rand(width) + 0.5), rounded

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        rows = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.scale * rows.to(x.dtype) if self.rounded else self.scale * rows


class Half(nn.Module):
    """Twice as large as the norm: not one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-5))


class Layer(nn.Module):
    def __init__(self, width: int, inner: int, norm: Any) -> None:
        super().__init__()
        self.first, self.second = norm(width), norm(width)
        self.up, self.gate = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down, self.out = nn.Linear(inner, width, bias=False), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        x = x + self.down(torch.relu(self.up(h)) * self.gate(h))
        return x + self.out(self.second(x))


def program(
    model: nn.Module, *shape: int, dtype: torch.dtype = torch.float32, training: bool = False
) -> Program:
    device = next(model.parameters()).device
    x = torch.zeros(shape, dtype=dtype, device=device)
    return capture(model, (x,), {}, dynamic=None, training=training)


NORMS = {"layer": nn.LayerNorm, "rms_rounded": lambda w: Root(w, True), "rms": lambda w: Root(w, False)}


@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_and_the_addition_before_it_are_one_node(kind: str) -> None:
    layers = nn.Sequential(*(Layer(16, 48, NORMS[kind]) for _ in range(2)))
    made = program(layers, 1, 6, 16)
    planned = planner.make(made, planner.Options(1, Cluster.of("loopback").subset([0])))
    local = planned.local(0)
    feed = {n.name: torch.randn(n.meta["val"].shape) for n in made.graph.nodes if n.op == "placeholder"}
    before = run_graph(local.graph, feed, local.constants)
    find(made, local)
    fused = [n for n in local.graph.nodes if n.target is ops.add_norm]
    assert [n.args[1] is not None for n in fused] == [False, True, True, True]
    assert {"rms_rounded": "rms"}.get(kind, kind) in str({n.args[-1] for n in fused})
    after = run_graph(local.graph, feed, local.constants)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_what_is_no_norm_is_left() -> None:
    made = program(Layer(16, 48, Half), 1, 6, 16)
    assert not norms.inside(made.graph)
    assert len(norms.inside(program(Layer(16, 48, NORMS["rms"]), 1, 6, 16).graph)) >= 10


@cache
def wide(
    rows: int, overlap: str | int = "auto", cluster: str = "dgx-h200", training: bool = False
) -> planner.Planned:
    """Two layers as wide as those of large models, on two devices."""
    with torch.device("meta"):
        model = nn.Sequential(*(Layer(8192, 7168, lambda w: Root(w, True)) for _ in range(2)))
    made = program(model.to(torch.bfloat16), 1, rows, 8192, dtype=torch.bfloat16, training=training)
    machine = Cluster.of(cluster).subset(range(2))
    return planner.make(made, planner.Options(2, machine, overlap=overlap))


def test_many_rows_are_cut_among_the_ranks_and_move_beside_matmuls() -> None:
    planned = wide(8192)
    found = find(planned.program, planned.local(0))
    for events in found.rings.values():
        assert all(a.kind != b.kind for a, b in pairwise(events))
    (stream,) = (events for shape, events in found.rings.items() if shape.width == 8192)
    assert [len(e.matmuls) for e in stream if e.kind == "scatter"] == [1, 1]
    assert {e.site.name for e in stream} <= set(routes(planned.plan.overlaps))
    assert planned.plan.seconds < wide(8192, "off").plan.seconds


def test_every_sum_on_the_way_is_taken_by_the_norm_that_reads_it() -> None:
    planned = wide(8192)
    local = planned.local(0)
    found = find(planned.program, local).rings
    (stream,) = (events for shape, events in found.items() if shape.width == 8192)
    assert all(only_norm(e.node) is not None for e in stream if e.kind == "scatter")
    fused = [n for n in local.graph.nodes if n.target is ops.add_norm]
    assert fused and all(n.args[1] is not None for n in fused[1:])  # the first may norm the input


def test_few_rows_are_summed_in_one_hop() -> None:
    forms = [o.form for o in wide(16).plan.overlaps]
    assert HOP in forms, forms


def test_a_training_step_moves_by_rows_there_and_back() -> None:
    planned = wide(4096, training=True)
    local = planned.local(0)
    chosen = routes(planned.plan.overlaps)
    events = [e for events in find(planned.program, local).rings.values() for e in events]
    assert {e.kind for e in events} == {"gather", "scatter"}
    assert {e.site.name for e in events} == set(chosen)
    assert all(route.direct == 0 for route in chosen.values())
    assert planned.plan.seconds < wide(4096, "off", training=True).plan.seconds
    assert not routes(wide(256, training=True).plan.overlaps), "too few rows"


def test_what_a_gather_owes_hides_the_way_back_of_the_scatter_before_it() -> None:
    """A projection of few columns is too short for its gradient's rows; the matmuls behind it are long."""

    class Narrow(Layer):
        def __init__(self) -> None:
            super().__init__(8192, 7168, lambda w: Root(w, True))
            self.inner, self.out = nn.Linear(8192, 2048, bias=False), nn.Linear(2048, 8192, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.out(torch.relu(self.inner(self.first(x))))
            h = self.second(x)
            return x + self.down(torch.relu(self.up(h)) * self.gate(h))

    with torch.device("meta"):
        model = nn.Sequential(Narrow(), Narrow()).to(torch.bfloat16)
    made = program(model, 1, 4096, 8192, dtype=torch.bfloat16, training=True)
    planned = planner.make(made, planner.Options(2, Cluster.of("dgx-h200").subset(range(2))))
    chosen = routes(planned.plan.overlaps)
    assert [route.late for route in chosen.values()].count(1) == 2, chosen


@pytest.mark.full
def test_gradients_that_nobody_computes_hide_nothing() -> None:
    def open_(frozen: bool) -> float:
        with torch.device("meta"):
            layers = [Layer(8192, 7168, lambda w: Root(w, True)) for _ in range(2)]
        for layer in layers:
            layer.gate.requires_grad_(not frozen)
            layer.up.requires_grad_(not frozen)
        made = program(
            nn.Sequential(*layers).to(torch.bfloat16), 1, 4096, 8192, dtype=torch.bfloat16, training=True
        )
        planned = planner.make(made, planner.Options(2, Cluster.of("dgx-h200").subset(range(2))))
        found = find(made, planned.local(0))
        wide = {e.site.name for events in found.rings.values() for e in events if len(e.matmuls) == 2}
        return sum(o.exposed for o in planned.plan.overlaps if wide & {*o.sites})

    assert open_(frozen=True) > open_(frozen=False)


@pytest.mark.parametrize("text", ["0", "0.5", "1", "0.25 in 2", "0 in 4, 1 late", "0, 2 late"])
def test_routes_read_as_they_are_written(text: str) -> None:
    assert str(Route.parse(text)) == text


@pytest.mark.parametrize("text", ["", "in 2", "0 in", "0 late", "0 in 2 1 late", "x"])
def test_what_is_no_route_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no route"):
        Route.parse(text)


@pytest.mark.parametrize(("of_rows", "whole"), [(1.0, False), (0.0, True)])
def test_routes_go_by_what_matmuls_were_timed_to_take(of_rows: float, whole: bool) -> None:
    """Of seconds that go by the rows, pieces cost nothing; of those that do not, every piece costs the whole."""
    asked: set[tuple[int, int, int]] = set()

    def watch(m: int, n: int, k: int, dtype: str) -> float:
        asked.add((m, n, k))
        return 3e-15 * n * k * (of_rows * m + (1 - of_rows) * 2048)

    planned = wide(2048)
    options = planner.Options(2, Cluster.of("dgx-h200").subset(range(2)), watch=watch)
    found = routes(planner.make(planned.program, options).plan.overlaps)
    inner = list(found.values())[:-1]  # no matmul reads the last rows
    assert all(route.direct == 1 for route in inner) if whole else any(route.direct < 1 for route in inner)
    assert {(n, k) for _, n, k in asked} >= {(3584, 8192), (8192, 3584)}
    unseen = planner.make(planned.program, replace(options, watch=lambda *_: None))
    assert unseen.plan == planned.plan


@pytest.mark.parametrize(
    "asked", [(8192, "off", "dgx-h200"), (8192, 1, "dgx-h200"), (512, "auto", "loopback"), (8192, "auto", "pcie4")]
)
@pytest.mark.sample(2)
def test_nothing_is_direct_where_it_is_not_asked_for_or_cannot_be(asked: tuple[int, Any, str]) -> None:
    rows, overlap, cluster = asked
    assert not routes(wide(rows, overlap, cluster).plan.overlaps)


def test_a_plan_keeps_what_is_direct() -> None:
    planned = wide(8192)
    read = Plan.from_json(planned.plan.to_json())
    options = planner.Options(2, Cluster.of("dgx-h200").subset(range(2)))
    again = planner.replay(planned.program, read, options)
    assert routes(again.plan.overlaps) == routes(planned.plan.overlaps)
    assert not again.chosen
    stripped = planner.replay(planned.program, replace(read, overlaps=()), options)
    assert not routes(stripped.plan.overlaps)


# -- what has nothing to hide beside ---------------------------------------------------------------------


class Lone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8192, 8192, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(x))


def negative(model: Any, rows: int, width: int, cluster: str, n: int, overlap: str) -> Plan:
    with torch.device("meta"):
        made = program(model().to(torch.bfloat16), 1, rows, width, dtype=torch.bfloat16)
    machine = Cluster.of(cluster).subset(range(n))
    return planner.make(made, planner.Options(n, machine, overlap=overlap)).plan


@pytest.mark.parametrize(
    ("rows", "cluster", "n"),
    [
        pytest.param(rows, *where, marks=() if i % 3 == 0 else pytest.mark.full)
        for i, (rows, where) in enumerate(product((16, 64, 128, 256, 512), (("dgx-h200", 2), ("dgx-h100", 8))))
    ],
)
@pytest.mark.sample(2)
def test_few_rows_stay_in_one_piece(rows: int, cluster: str, n: int) -> None:
    def model() -> nn.Module:
        return nn.Sequential(*(Layer(4096, 14336, nn.LayerNorm) for _ in range(2)))

    mine, off = (negative(model, rows, 4096, cluster, n, o) for o in ("auto", "off"))
    assert {o.form for o in mine.overlaps} <= {"whole", HOP, f"{RING} 1"}
    assert mine.seconds <= off.seconds


def test_a_lone_projection_on_eight_devices_stays_in_one_piece() -> None:
    mine, off = (negative(Lone, 8192, 8192, "dgx-h100", 8, o) for o in ("auto", "off"))
    assert {o.form for o in mine.overlaps} <= {"whole"}
    assert mine.seconds <= off.seconds


# -- what they are measured against ----------------------------------------------------------------------


@pytest.mark.parametrize("rows", [16, 8192])
def test_the_rival_of_direct_moves_blocks_over_the_same_weights(rows: int) -> None:
    """It has the split that is cheapest without them, and as near as the weights allow to that of overlap off."""
    planned, off = wide(rows), wide(rows, "off")
    options = planner.Options(2, Cluster.of("dgx-h200").subset(range(2)))
    fixed = layouts(planned.local(0))
    assert rival.overlapped(planned.plan) and rival.unwoven(planned.plan) is None
    blocking = rival.cheapest(planned, options, fixed)
    assert not rival.overlapped(blocking.plan) and blocking.plan.overlap == "auto"
    assert layouts(blocking.local(1)) == fixed
    assert planned.plan.seconds < blocking.plan.seconds <= off.plan.seconds * 1.01
    read = Plan.from_json(blocking.plan.to_json())
    assert planner.replay(planned.program, read, options).plan == blocking.plan


@pytest.mark.parametrize("training", [True, False])
def test_every_move_has_a_second_route_to_be_measured(training: bool) -> None:
    """Of the same moves, and dearer by prediction; one hop has no other."""
    planned = wide(8192, training=training)
    plan, second = planned.plan, rival.second(planned.plan)
    assert second is not None
    first, other = routes(plan.overlaps), routes(second.overlaps)
    assert first.keys() == other.keys() and all(other[s] != route for s, route in first.items())
    assert all(other[s].late == route.late for s, route in first.items())
    assert plan.seconds < second.seconds < rival.seconds(plan)
    assert Plan.from_json(second.to_json()) == second
    woven = rival.rewoven(planned, second)
    assert layouts(woven.local(1)) == layouts(planned.local(1)) and not woven.chosen
    few = wide(16).plan
    assert [o.second for o in few.overlaps if o.form == HOP] == [None] * sum(o.form == HOP for o in few.overlaps)
