"""Random models as pipelines: the user's loop and a step by a schedule, against one process.

Batch dims are merged, moved and cut by what comes after them: a factor either serves for
micro-batches or is refused, and the numbers are those of one process both ways.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import plait
from tests.cases import Mesh
from tests.compare import demand, differences, discrepancies, plain, within
from tests.fuzz import recipe
from tests.gloo import prove
from tests.gloo.harness import Pool

CLOSE = within(1e-9, 1e-10)
RUNS = (
    ("pp2/2", "1f1b", "off"),
    ("tp2xpp2/4", "gpipe", "off"),
    ("pp3/3", "zero-bubble", "off"),
    ("pp2/4", "1f1b", "full"),
)
SEEDS = 96  # in the full matrix
FOUND = (9, 22, 28, 46)  # seeds that were wrong once


def random_pipeline(group: Any, seed: int, mesh: str, schedule: str, recompute: str) -> int:
    """How many micro-batches it had."""
    setup, at = recipe(seed, batch=4), Mesh.parse(mesh)
    want = plain(setup)
    parts = plait.compile(
        setup.model, setup.args, tp=at.tp, pp=at.pp, micro_batches=at.micro_batches or 1,
        group=group, cluster=prove.free(at.size), measure=False, training=True, schedule=schedule,
        recompute=recompute,
    )  # fmt: skip
    about = f"{mesh} {schedule}\n{setup.model}\n"
    got = replace(prove.run(parts, setup, True), buffers=want.buffers)
    demand(discrepancies(got, want, CLOSE), about="in a loop, " + about)
    parts.zero_grad()
    args, _ = setup.inputs()
    loss, out = parts.step(*args, loss_fn=setup.loss)
    demand(
        differences(loss, want.loss, "loss", CLOSE),
        differences(out, want.out, "out", CLOSE),
        differences(dict(parts.gradients()), want.gradients, "gradients", CLOSE),
        about="by a step, " + about,
    )
    return parts.plan.micro_batches


@pytest.mark.parametrize("seed", [*FOUND, *range(100, 100 + SEEDS)])
def test_a_random_model_as_a_pipeline(pool: Pool, seed: int) -> None:
    mesh, *how = RUNS[seed % len(RUNS)]
    assert len(set(pool.run(random_pipeline, Mesh.parse(mesh).size, seed, mesh, *how))) == 1
