"""Replicas on gloo: a batch each, one gradient; against one process with all batches, on every rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import plait
from plait.errors import InputError
from plait.mesh import ORDERS, Mesh, Seats
from tests import zoo
from tests.compare import demand, differences, digest, gradients, within
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
    return parts._holdings.seat.replicas.number


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
def test_gradients_are_averaged(pool: Pool, mesh: Any) -> None:
    tp, pp, dp = mesh
    options = {"micro_batches": 2} if pp > 1 else {}
    prove.alike(pool.run(own_loop, tp * pp * dp, mesh, options))
