"""Pipelines whose stages are on a CUDA device, against the module whole; ranks that share one talk through the host."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.runtime.transport import Transport
from plait.runtime.trips import Trips
from tests.gpu.ranks import CUDA, run_ranks

here = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")


class Tower(nn.Module):
    """Attention, a skip over all stages, and a norm."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(4))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for layer in self.qkv:
            q, k, v = (p.unflatten(-1, (4, -1)).transpose(1, 2) for p in layer(h).chunk(3, -1))
            h = h + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        return self.out(self.norm(h)) + x


def weighed(out: Tensor) -> Tensor:
    return (out * torch.linspace(1, 2, out.shape[-1], device=out.device)).pow(2).mean()


def job(schedule: str, workspace: Any, device: torch.device) -> None:
    torch.manual_seed(0)
    model = Tower().to(device)
    whole = copy.deepcopy(model)
    x = torch.randn(8, 16, 32, device=device)
    parts = plait.compile(
        model, (x,), tp=1, pp=torch.distributed.get_world_size(), training=True, device=device, measure=False,
        micro_batches=4, schedule=schedule,
    )  # fmt: skip
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5, check_device=False)
    for _ in range(6):  # stages are captured meanwhile
        x = torch.randn_like(x)
        whole.zero_grad()
        parts.zero_grad()
        want = weighed(whole(x))
        want.backward()
        loss, _ = parts.step(x, loss_fn=weighed)
        close(loss, want.detach())
        for name, grad in parts.gradients().items():
            close(grad, whole.get_parameter(name).grad)
    for _ in range(2):
        parts.zero_grad()
        weighed(parts(x)).backward()
        for name, grad in parts.gradients().items():
            close(grad, whole.get_parameter(name).grad)
    with torch.no_grad():
        close(parts(x), whole(x))


def inference(workspace: Any, device: torch.device) -> None:
    """Five rows in three micro-batches, of which the last is smaller."""
    torch.manual_seed(0)
    model = Tower().to(device).eval()
    x = torch.randn(5, 16, 32, device=device)
    parts = plait.compile(model, (x,), tp=1, pp=torch.distributed.get_world_size(), device=device, measure=False,
                          micro_batches=3)
    for _ in range(6):
        x = torch.randn_like(x)
        with torch.no_grad():
            torch.testing.assert_close(parts(x), model(x), rtol=1e-4, atol=1e-5, check_device=False)


@here
@pytest.mark.parametrize(("ranks", "schedule"), [(2, "1f1b"), (2, "interleaved"), (3, "zero-bubble")])
def test_stages(ranks: int, schedule: str) -> None:
    run_ranks(ranks, 1 << 20, [partial(job, schedule)])


@here
def test_stages_without_gradients() -> None:
    run_ranks(2, 1 << 20, [inference])


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, weight: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return (torch.tanh(x @ weight),)


@here
def test_each_open_micro_batch_has_graphs_of_its_own() -> None:
    """Three are open at once in every round, and their ways back are asked for in another order."""
    torch.manual_seed(0)
    module = torch.fx.symbolic_trace(Stage())
    weight = torch.randn(8, 8, device="cuda", requires_grad=True)
    trips = Trips.of(module, 1, True, Transport(None, 0, 1))
    for _ in range(6):
        xs = [torch.randn(4, 8, device="cuda", requires_grad=True) for _ in range(3)]
        outs = [trips([weight, x])[0] for x in xs]
        for k in (1, 0, 2):
            got = torch.autograd.grad(outs[k].square().sum(), (weight, xs[k]))
            want = torch.autograd.grad(torch.tanh(xs[k] @ weight).square().sum(), (weight, xs[k]))
            for mine, theirs in zip(got, want, strict=True):
                torch.testing.assert_close(mine, theirs)
    assert len(trips.made) == 3 and all(trip._graphs is not None and not trip.open for trip in trips.made)
