"""The two best choices of overlap and blocking, timed on a CUDA device that the ranks share."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from tests.gpu.ranks import CUDA, run_ranks


class Blocks(nn.Module):
    def __init__(self, width: int = 2048, layers: int = 3) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width, bias=False) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(nn.functional.silu(up(norm(x))))
        return x


def job(training: bool, workspace: Any, device: torch.device) -> None:
    torch.manual_seed(0)
    model = Blocks().to(device, torch.bfloat16).train(training)
    x = torch.randn(1, 8192, 2048, device=device, dtype=torch.bfloat16)
    parts = plait.compile(model, (x,), tp=2, cluster="dgx-h200[2]", training=training, device=device)
    measured = parts.plan.measured
    assert measured is not None and not measured.reason and len(measured.seconds) == 3, measured
    for _ in range(4):
        x = torch.randn_like(x)
        with torch.set_grad_enabled(training):
            got, want = parts(x), model(x)
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("training", [False, True])
def test_the_second_choice_is_timed(training: bool) -> None:
    run_ranks(2, 1 << 20, [partial(job, training)])
