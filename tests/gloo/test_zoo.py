"""Tiny transformers models on gloo: outputs and gradients on every rank, and how much is split."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import plait
from tests import zoo
from tests.cases.case import Setup
from tests.compare import Run, as_good_as, demand, discrepancies, plain, within
from tests.gloo import prove
from tests.gloo.harness import Pool

FULL = pytest.mark.full
SIZES = (2, 3, 4)
GRID = [
    pytest.param(name, tp, id=f"{name}-{tp}", marks=() if tp == SIZES[i % 3] else FULL)
    for i, name in enumerate(zoo.NAMES)
    for tp in SIZES
]
# What is trained is compared in its outputs, too.
UNTRAINED = [
    pytest.param(*one.values, id=one.id, marks=(*one.marks, *[FULL] * bool(i // 3 % 8)))
    for i, one in enumerate(GRID)
]


def right(group: Any, name: str, training: bool) -> tuple[prove.Report, dict[str, Any]]:
    model, args, kwargs = zoo.build(name)
    setup = Setup(model, args, kwargs)
    want = plain(setup, training)
    tp = dist.get_world_size(group)
    parts = plait.compile(
        model, args, kwargs, tp=tp, training=training, group=group, cluster=prove.free(tp)
    )
    demand(prove.saved(parts, model), about=f"state_dict of {name}")
    with torch.set_grad_enabled(training):
        got = prove.run(parts, setup, training)
    demand(beyond_noise(plain_buffers(got, want), want, setup), about=f"{name} tp={tp}")
    held = {n: tuple(p.shape) for n, p in parts.named_parameters()}
    return prove.report(parts, model, got), held


def beyond_noise(got: Run, want: Run, setup: Setup) -> list[str]:
    """What differs by more than the tolerance, and by more than float32 alone does.

    The gradients of some of these models are sums of terms near a hundred, and one process is as
    far from float64 as the tolerance allows.
    """
    lines = discrepancies(got, want, within(dtype=torch.float32))
    if not lines:
        return lines
    exact = plain(setup.to(torch.float64), bool(want.gradients))
    return discrepancies(got, want, as_good_as(vars(want), vars(exact)))


def plain_buffers(got: Any, want: Any) -> Any:
    return replace(got, buffers=want.buffers)


@pytest.mark.parametrize(("name", "tp"), UNTRAINED)
def test_outputs(pool: Pool, name: str, tp: int) -> None:
    prove.alike([report for report, _ in pool.run(right, tp, name, False)])


@pytest.mark.parametrize(("name", "tp"), GRID)
@pytest.mark.sample(9)
def test_gradients(pool: Pool, name: str, tp: int) -> None:
    prove.alike([report for report, _ in pool.run(right, tp, name, True)])
