"""Pipelines over tiny transformers models on gloo: outputs and gradients on every rank.

The full matrix is every model on every mesh, with one and two micro-batches; schedules take turns, so
that each meets every model and every mesh. `make test` takes a part in which every pair of mesh and
micro-batches, and every schedule with both numbers of micro-batches, occurs, each on another model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import plait
from plait.passes.schedule import SCHEDULES
from tests import zoo
from tests.cases.case import Mesh, Setup
from tests.compare import EXACT, Run, demand, differences, digest, execute, plain
from tests.gloo import prove
from tests.gloo.harness import Pool
from tests.gloo.test_zoo import beyond_noise

FULL = pytest.mark.full
AXES = ((1, 2), (1, 3), (1, 4), (2, 2))
MESHES = tuple(Mesh(tp, pp, pieces) for pieces in (1, 2) for tp, pp in AXES)
RUNS = tuple(SCHEDULES)


def trainings() -> Iterator[Any]:
    for i, name in enumerate(zoo.NAMES):
        for j, mesh in enumerate(MESHES):
            schedule = RUNS[(i + j + j // len(AXES)) % len(RUNS)]
            marks = () if i == 2 * j + 1 else FULL
            yield pytest.param(name, mesh, schedule, id=f"{name}-{mesh}-{schedule}", marks=marks)


def inferences() -> Iterator[Any]:
    for i, name in enumerate(zoo.NAMES):
        for j, mesh in enumerate(MESHES):
            thin = (name, str(mesh)) in (("gemma3", "pp3/1"), ("t5", "tp2xpp2/2"))
            if (i + j) % 2 and not thin:
                continue
            yield pytest.param(name, mesh, id=f"{name}-{mesh}", marks=() if thin else FULL)


def build(name: str, mesh: str, group: Any, **options: Any) -> tuple[Setup, plait.Compiled]:
    model, args, kwargs = zoo.build(name)
    at = Mesh.parse(mesh)
    parts = plait.compile(
        model, args, kwargs, tp=at.tp, pp=at.pp, micro_batches=at.micro_batches or 1, group=group,
        cluster=prove.free(at.size), measure=False, **options,
    )  # fmt: skip
    fewer = [note for note in parts.plan.notes if note.startswith("micro_batches: ")]
    assert parts.plan.micro_batches == at.micro_batches or fewer, "lowered, and not said"
    return Setup(model, args, kwargs), parts


# -- training ------------------------------------------------------------------------------------


def trained(group: Any, name: str, mesh: str, schedule: str) -> prove.Report:
    """The user's own loop, then a step by the schedule, against one process."""
    setup, parts = build(name, mesh, group, training=True, schedule=schedule)
    want = plain(setup)
    loop = replace(prove.run(parts, setup, True), buffers=want.buffers)
    demand(beyond_noise(loop, want, setup), about=f"{name} {mesh} in a loop")
    parts.zero_grad()
    args, kwargs = setup.inputs()
    loss, out = parts.step(*args, loss_fn=setup.loss, **kwargs)
    step = replace(loop, out=out, loss=loss, gradients=dict(parts.gradients()))
    demand(beyond_noise(step, want, setup), about=f"{name} {mesh} by {schedule}")
    (told,) = prove.schedules(parts)
    assert told.startswith(f"step: {schedule}, {parts.plan.micro_batches} micro-batch"), told
    return prove.report(parts, setup.model, loop) | {"step": digest(vars(step))}


@pytest.mark.parametrize(("name", "mesh", "schedule"), trainings())
def test_training(pool: Pool, name: str, mesh: Mesh, schedule: str) -> None:
    prove.alike(pool.run(trained, mesh.size, name, str(mesh), schedule))


# -- inference -----------------------------------------------------------------------------------


def inferred(group: Any, name: str, mesh: str) -> prove.Report:
    """Stages alone give the bits of the module run on the same rows, whole or a micro-batch each."""
    setup, parts = build(name, mesh, group)
    got = prove.run(parts, setup, False)
    if Mesh.parse(mesh).tp == 1:
        want = by_rows(setup, parts.plan.micro_batches)
        demand(differences(got.out, want, close=EXACT), about=f"{name} {mesh}, bits")
    whole = plain(setup, False)
    demand(beyond_noise(replace(got, buffers=whole.buffers), whole, setup), about=f"{name} {mesh}")
    return prove.report(parts, setup.model, got)


def by_rows(setup: Setup, pieces: int) -> Any:
    """The plain module's outputs, of one part of the batch after the other."""

    def rows(k: int) -> dict[str, Any]:
        return {
            name: x.tensor_split(pieces)[k] if isinstance(x, Tensor) else x
            for name, x in setup.kwargs.items()
        }

    def run(k: int) -> Run:
        return execute(setup.model, replace(setup, kwargs=rows(k)))

    outs = [run(k).out for k in range(pieces)]
    return pytree.tree_map(lambda *xs: torch.cat(xs), *outs)


@pytest.mark.parametrize(("name", "mesh"), inferences())
def test_inference(pool: Pool, name: str, mesh: Mesh) -> None:
    prove.alike(pool.run(inferred, mesh.size, name, str(mesh)))
