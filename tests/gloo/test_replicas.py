"""Replicas on gloo: a batch each, one gradient; against one process with all batches, on every rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plait
from tests.compare import demand, differences, digest, gradients
from tests.gloo import prove
from tests.gloo.harness import Pool

MESHES = [
    (1, 1, 2),
    (1, 1, 3),
    (2, 1, 2),
    (1, 2, 2),
    pytest.param((2, 2, 2), marks=pytest.mark.full),
]


def tower() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)]
    return nn.Sequential(*layers).double()


def rows(replica: int, count: int = 4) -> Tensor:
    """A replica's own batch."""
    generator = torch.Generator().manual_seed(100 + replica)
    return torch.randn(count, 6, generator=generator, dtype=torch.float64)


def compiled(model: nn.Module, args: Any, mesh: Any, group: Any, **options: Any) -> plait.Compiled:
    tp, pp, dp = mesh
    defaults: dict[str, Any] = dict(training=True, measure=False, cluster=prove.free(tp * pp * dp))
    return plait.compile(model, args, tp=tp, pp=pp, dp=dp, group=group, **(defaults | options))


def replica_of(parts: plait.Compiled) -> int:
    return parts.replica


def averaged(model: nn.Module, batches: list[Tensor], loss: Any) -> dict[str, Any]:
    """What DistributedDataParallel makes of it: the mean of the replicas' gradients."""
    for x in batches:
        (loss(model(x)) / len(batches)).backward()
    return gradients(model)


# -- the user's own loop ------------------------------------------------------------------------------


def own_loop(group: Any, mesh: Any, options: dict[str, Any]) -> dict[str, str]:
    """Two backwards that add up, of other batches and then of other sizes; outputs are the replica's."""
    model, dp = tower(), mesh[2]
    parts = compiled(model, (rows(0),), mesh, group, **options)
    mine, plain = replica_of(parts), copy.deepcopy(model)
    assert parts.plan.dp == dp
    for sizes in ([4] * dp, [3 + r for r in range(dp)]):
        batches = [rows(10 * r + sizes[0], n) for r, n in enumerate(sizes)]
        x = batches[mine].clone().requires_grad_()
        out = parts(x)
        out.pow(2).sum().backward()
        want = plain(batches[mine])
        demand(differences(out.detach(), want.detach(), "output"), about=f"{mesh}")
        averaged(plain, batches, lambda out: out.pow(2).sum())
        y = batches[mine].clone().requires_grad_()
        copy.deepcopy(plain)(y).pow(2).sum().backward()
        demand(
            differences(dict(parts.gradients()), gradients(plain), "gradients"),
            differences(x.grad, y.grad, "input"),
            about=f"{mesh} {sizes}",
        )
    return {"gradients": digest(dict(parts.gradients()))}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.sample(2)
def test_gradients_are_averaged(pool: Pool, mesh: Any) -> None:
    tp, pp, dp = mesh
    options = {"micro_batches": 2} if pp > 1 else {}
    prove.alike(pool.run(own_loop, tp * pp * dp, mesh, options))


# -- step ---------------------------------------------------------------------------------------------


def valid_mean(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out, target)


def by_hand(out: Tensor, target: Tensor) -> Tensor:
    """The number of rows is a constant of the program."""
    return (out - F.one_hot(target.clamp(min=0), 3)).pow(2).sum() / out.shape[0]


def total(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out, target, reduction="sum")


LOSSES = {"mean": valid_mean, "by hand": by_hand, "sum": total}


def labels(replica: int, count: int) -> Tensor:
    """Few on the first replica, none on the second."""
    out = torch.arange(count) % 3
    if replica < 2:
        out[0 if replica else 1 :] = -100
    return out


def steps(
    group: Any, mesh: Any, name: str, options: dict[str, Any], twice: bool = False
) -> dict[str, Any]:
    """`step`: loss and gradients of one process with all batches; outputs are the replica's."""
    model, dp = tower(), mesh[2]
    parts = compiled(model, (rows(0),), mesh, group, **options)
    mine, plain = replica_of(parts), copy.deepcopy(model)
    for sizes in ([2 + r for r in range(dp)], [4] * dp)[: 1 + twice]:
        batches = [rows(r, n) for r, n in enumerate(sizes)]
        targets = [labels(r, n) for r, n in enumerate(sizes)]
        want_out = plain(torch.cat(batches))
        want = LOSSES[name](want_out, torch.cat(targets))
        want.backward()
        loss, out = parts.step(batches[mine], target=targets[mine], loss_fn=LOSSES[name])
        demand(
            differences(loss, want.detach(), "loss"),
            differences(out, want_out.detach().split(sizes)[mine], "outputs"),
            differences(dict(parts.gradients()), gradients(plain), "gradients"),
            about=f"{mesh} {name} {sizes}",
        )
    said = [line for line in parts.explain().splitlines() if line.startswith("step: ")]
    assert all(f"over {dp} replicas" in line for line in said), said
    return {"loss": digest(loss), "gradients": digest(dict(parts.gradients()))}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.sample(2)
def test_a_step_is_of_all_batches(pool: Pool, mesh: Any) -> None:
    tp, pp, dp = mesh
    options = {"micro_batches": 2, "schedule": "1f1b"} if pp > 1 else {}
    prove.alike(pool.run(steps, tp * pp * dp, mesh, "mean", options, dp == 3))


@pytest.mark.parametrize("name", [n for n in LOSSES if n != "mean"])
@pytest.mark.sample(1)
def test_a_step_of_any_loss(pool: Pool, name: str) -> None:
    prove.alike(pool.run(steps, 2, (1, 1, 2), name, {}))


@pytest.mark.parametrize(
    "schedule", ["zero-bubble", *(pytest.param(s, marks=pytest.mark.full) for s in ("interleaved", "gpipe"))]
)
def test_a_step_by_any_schedule(pool: Pool, schedule: str) -> None:
    options = {"micro_batches": 2, "schedule": schedule}
    prove.alike(pool.run(steps, 4, (1, 2, 2), "mean", options))


# -- plans --------------------------------------------------------------------------------------------


def planned_again(group: Any) -> dict[str, str]:
    """A saved plan of replicas makes the same ones; the sum of gradients runs as `algorithm` says."""
    model = tower()
    first = compiled(model, (rows(0),), (1, 2, 2), group, algorithm={"gradients": "ring"})
    assert first.plan.gradients.algorithm == "ring"
    assert "over dp=2, in buckets: gradients: all_reduce of weights" in first.explain()
    saved = plait.Plan.from_json(first.plan.to_json())
    assert saved == first.plan
    again = compiled(model, (rows(0),), (1, 2, 2), group, plan=saved)
    for parts in (first, again):
        parts(rows(parts.replica)).pow(2).sum().backward()
    want = averaged(copy.deepcopy(model), [rows(0), rows(1)], lambda out: out.pow(2).sum())
    for parts in (first, again):
        demand(differences(dict(parts.gradients()), want, "gradients"), about="planned")
    return {"plan": again.plan.digest}


def test_a_plan_of_replicas_is_used_again(pool: Pool) -> None:
    prove.alike(pool.run(planned_again, 4))
