"""Chunked moves within the stages of a pipeline: outputs and gradients, whatever the schedule and the timing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import plait
from plait.passes.overlap.flow import Flow
from plait.passes.schedule import SCHEDULES
from plait.runtime.actions import Run
from plait.runtime.streams import Beside, _Awaited
from tests import zoo
from tests.cases import CASES, Case, Mesh
from tests.compare import demand, differences, digest, discrepancies, gradients, plain, within
from tests.fuzz import recipe
from tests.gloo import prove
from tests.gloo.harness import Pool
from tests.gloo.test_cases import ask
from tests.gloo.test_overlap import Wide, _sleeps

QUICK = ("b43_chain_of_collectives",)


def grid() -> Iterator[Any]:
    """(case, mesh, chunks): rows that differ where three micro-batches share them."""
    for i, case in enumerate(c for c in CASES.values() if c.exact):
        mesh, count = f"tp2xpp2/{2 + i % 2}", 2 + i // 2 % 2
        marks = () if case.id in QUICK else pytest.mark.full
        yield pytest.param(case, Mesh.parse(mesh), count, id=f"{case.id}-{mesh}-{count}", marks=marks)


@pytest.mark.parametrize(("case", "mesh", "count"), grid())
def test_right(pool: Pool, case: Case, mesh: Mesh, count: int) -> None:
    """In the user's own loop."""
    prove.alike(ask(pool, prove.right, case, mesh, case.dtypes[-1], {"overlap": count}))


STEPS = [
    ("b43_chain_of_collectives", "zero-bubble"),
    *(
        pytest.param(name, schedule, marks=pytest.mark.full)
        for name in ("latent_kv", "b62_blocks_in_three_dims", "heads_that_mix", "two_layers_share_kv")
        for schedule in SCHEDULES
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "schedule"), STEPS)
def test_step(pool: Pool, name: str, schedule: str) -> None:
    answers = ask(pool, prove.stepped, CASES[name], Mesh.parse("tp2xpp2/2"), schedule, 2)
    prove.alike(answers)


class Deep(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Wide(8) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def deep(group: Any, rows: int, **options: Any) -> tuple[nn.Module, torch.Tensor, plait.Compiled]:
    torch.manual_seed(0)
    model, x = Deep().double(), torch.randn(rows, 8, dtype=torch.float64)
    size = dist.get_world_size(group)
    defaults: dict[str, Any] = dict(tp=2, pp=2, training=True, cluster=prove.free(size), measure=False)
    return model, x, plait.compile(model, (x,), group=group, **(defaults | options))


def uneven(group: Any, count: int, training: bool) -> str:
    """Five rows in micro-batches of three and two; inputs of another number of rows are compiled again."""
    model, x, parts = deep(group, 5, micro_batches=2, overlap=count, training=training)
    for rows in (5, 4):
        parts.zero_grad()
        got, want = parts(x[:rows]), model(x[:rows])
        demand(differences(got.detach(), want.detach()), about=f"{rows} rows")
        if training:
            model.zero_grad()
            for out in (got, want):
                out.square().sum().backward()
            demand(differences(dict(parts.gradients()), gradients(model)), about=f"gradients of {rows} rows")
    return parts.explain()


@pytest.mark.parametrize("training", [False, pytest.param(True, marks=pytest.mark.full)])
def test_rows_that_differ(pool: Pool, training: bool) -> None:
    told = pool.run(uneven, 4, 3, training, timeout=120.0)
    assert len({text.partition("regions: ")[2] for text in told}) == 1, "ranks differ"
    assert all(f"stage {stage}, " in told[0] for stage in (0, 1))
    assert "rows 3" in told[0]
    assert training or "of 2 rows: stage " in told[0]  # they run in chunks of the columns


def replicas(group: Any) -> str:
    """One stage with a replica beside it: the same programs of stages, sums of gradients on another group."""
    model, x, parts = deep(group, 4, pp=1, dp=2, micro_batches=2, overlap=2)
    mine = x if dist.get_rank(group) < 2 else x * 2
    parts(mine).square().sum().backward()
    for rows in (x, x * 2):
        (model(rows).square().sum() / 2).backward()
    demand(differences(dict(parts.gradients()), gradients(model)), about="gradients")
    return parts.explain()


def test_replicas(pool: Pool) -> None:
    assert "overlapped with " in pool.run(replicas, 4, timeout=120.0)[0]


def elsewhere(group: Any) -> None:
    """Micro-batches of one row and of two, of which one gives an output from another stage."""
    setup = recipe(6031)
    want = plain(setup)
    parts = plait.compile(
        setup.model, setup.args, setup.kwargs, group=group, tp=2, pp=2, micro_batches=2, training=True,
        overlap=3, cluster=prove.free(4), measure=False, schedule="zero-bubble",
    )  # fmt: skip
    homes = {tuple(parts._first.stages.owner(i, k) for i in parts._first.stages.wanted()) for k in range(2)}
    assert len(homes) == 2, homes
    demand(discrepancies(prove.run(parts, setup, True), want, within(1e-9, 1e-10)))


def test_an_output_may_come_from_another_stage_in_each_micro_batch(pool: Pool) -> None:
    pool.run(elsewhere, 4)


class Matmuls(TorchDispatchMode):
    """Notes every product of two matrices."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines = lines

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.lines.append("matmul")
        return func(*args, **(kwargs or {}))


def log(group: Any, schedule: str) -> list[str]:
    """What this rank starts, awaits and multiplies, action by action, in a step."""
    _, x, parts = deep(group, 4, micro_batches=2, overlap=2, schedule=schedule)
    lines: list[str] = []
    before = (Beside.start, _Awaited.wait, Run._do)

    def start(self: Any, step: Any, *rest: Any) -> Any:
        lines.append(f"start {step}" if step.collective is not None else "within the rank")
        return before[0](self, step, *rest)

    def wait(self: Any) -> Any:
        lines.append("wait")
        return before[1](self)

    def do(self: Any, action: Any, posted: Any) -> None:
        lines.append(f"action {action}")
        with Matmuls(lines):
            before[2](self, action, posted)

    Beside.start, _Awaited.wait, Run._do = start, wait, do  # type: ignore[method-assign]
    try:
        parts.step(x, loss_fn=lambda out: out.square().sum())
    finally:
        Beside.start, _Awaited.wait, Run._do = before  # type: ignore[method-assign]
    return lines


@pytest.mark.parametrize("schedule", ["zero-bubble", pytest.param("1f1b", marks=pytest.mark.full)])
def test_the_order_on_a_group_is_that_of_its_actions(pool: Pool, schedule: str) -> None:
    """The same on both ranks. No move is on its way between two actions; within them matmuls run beside moves,
    forward and back."""
    ranks = pool.run(log, 4, schedule, timeout=120.0)
    assert ranks[0] == ranks[1] and ranks[2] == ranks[3] and ranks[0] != ranks[2]
    for lines in (ranks[0], ranks[2]):
        beside = dict.fromkeys("FI" if schedule == "zero-bubble" else "FB", 0)
        kind, underway = "", 0
        for line in lines:
            if line.startswith("action"):
                assert underway == 0, f"{underway} moves are on their way at {line}"
                kind = line.split()[1].lstrip("0123456789")[0]
            underway += {"start": 1, "wait": -1}.get(line.split()[0], 0)
            beside[kind] = beside.get(kind, 0) + (line == "matmul" and underway > 0)
        assert underway == 0
        assert all(beside[k] >= 2 for k in beside if k != "W"), beside


def astray(group: Any) -> None:
    """As if regions knew no borders: the whole of this model would be one."""
    layers = [nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(4)]
    borders = Flow.stages
    Flow.stages = property(lambda flow: dict.fromkeys(flow.program.graph.nodes, 0))  # type: ignore[assignment, misc]
    try:
        plait.compile(
            nn.Sequential(*layers), (torch.randn(4, 8),), group=group, tp=2, pp=2, micro_batches=1, overlap=2,
            cluster=prove.free(4), measure=False,
        )  # fmt: skip
    finally:
        Flow.stages = borders  # type: ignore[method-assign]


def test_a_stage_that_would_leave_a_move_open_is_refused_on_every_rank(pool: Pool) -> None:
    for failure in pool.errors(astray, 4):
        assert "ScheduleError" in failure.kind and "is left open at the end" in failure.message


def many(group: Any, count: int) -> set[str]:
    """The digests of `count` steps, in each of which ranks and lines are held up otherwise."""
    model, args, kwargs = zoo.build("llama")
    parts = plait.compile(
        model.double(), args, kwargs, group=group, tp=2, pp=2, micro_batches=2, training=True, overlap=3,
        cluster=prove.free(4), measure=False,
    )  # fmt: skip
    assert any(o.form != "whole" for o in parts.plan.overlaps)
    found = set()
    for seed in range(1, count + 1):
        parts.zero_grad()
        with _sleeps(random.Random(seed * 97 + dist.get_rank(group)), seed):
            out = parts(*args, **kwargs)
            out.logits.square().sum().backward()
        found.add(digest({"out": out.logits.detach(), **parts.gradients()}))
    return found


@pytest.mark.parametrize("count", [3, pytest.param(50, marks=pytest.mark.full)])
def test_timing_changes_no_bit(pool: Pool, count: int) -> None:
    digests = set[str]().union(*pool.run(many, 4, count, timeout=300.0))
    assert len(digests) == 1
