"""Chunked moves within the stages of a pipeline: outputs and gradients, whatever the schedule and the timing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import plait
from plait.passes.schedule import SCHEDULES
from plait.runtime.actions import Run
from plait.runtime.streams import Beside
from tests import zoo
from tests.cases import CASES, Case, Mesh
from tests.compare import demand, differences, digest, gradients
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


def log(group: Any, schedule: str) -> list[str]:
    """What this rank starts on its group, action by action, in a step."""
    _, x, parts = deep(group, 4, micro_batches=2, overlap=2, schedule=schedule)
    lines: list[str] = []
    before = (Beside.start, Run._do)

    def start(self: Any, step: Any, *rest: Any) -> Any:
        if step.collective is not None:
            lines.append(f"start {step}")
        return before[0](self, step, *rest)

    def do(self: Any, action: Any, posted: Any) -> None:
        lines.append(str(action))
        before[1](self, action, posted)
        assert self.stages.transport.open == 0

    Beside.start, Run._do = start, do  # type: ignore[method-assign]
    try:
        parts.step(x, loss_fn=lambda out: out.square().sum())
    finally:
        Beside.start, Run._do = before  # type: ignore[method-assign]
    return lines


@pytest.mark.parametrize("schedule", ["zero-bubble", pytest.param("1f1b", marks=pytest.mark.full)])
def test_the_order_on_a_group_is_that_of_its_actions(pool: Pool, schedule: str) -> None:
    """The same on both ranks, and nothing is on its way between two actions, forward or back."""
    ranks = pool.run(log, 4, schedule, timeout=120.0)
    assert ranks[0] == ranks[1] and ranks[2] == ranks[3] and ranks[0] != ranks[2]
    for lines in (ranks[0], ranks[2]):
        starts = dict.fromkeys("FI" if schedule == "zero-bubble" else "FB", 0)
        kind = ""
        for line in lines:
            kind = kind if line.startswith("start") else line.lstrip("0123456789")[0]
            if line.startswith("start"):
                starts[kind] += 1
        assert all(count >= 4 for count in starts.values()), starts


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
