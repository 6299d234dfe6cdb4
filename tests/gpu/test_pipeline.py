"""Pipelines whose stages are on a CUDA device, against the module whole; ranks that share one talk through the host."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
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
    for _ in range(2):
        whole.zero_grad()
        parts.zero_grad()
        want = weighed(whole(x))
        want.backward()
        loss, _ = parts.step(x, loss_fn=weighed)
        close(loss, want.detach())
        for name, grad in parts.gradients().items():
            close(grad, whole.get_parameter(name).grad)
    parts.zero_grad()
    weighed(parts(x)).backward()
    for name, grad in parts.gradients().items():
        close(grad, whole.get_parameter(name).grad)
    with torch.no_grad():
        close(parts(x), whole(x))


@here
@pytest.mark.parametrize(("ranks", "schedule"), [(2, "1f1b"), (2, "interleaved"), (3, "zero-bubble")])
def test_stages(ranks: int, schedule: str) -> None:
    run_ranks(ranks, 1 << 20, [partial(job, schedule)])
