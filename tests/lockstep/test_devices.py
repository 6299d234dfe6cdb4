"""Every model planned for CUDA devices, where there are none: what is chosen there is priced, told and drawn.

Norms and chains are one kernel each, matmuls are packed, moves go through the peers' memory, gradients of
weights wait: whatever of it a plan has, its times add up to its seconds, each collective says what runs
beside it or why nothing does, and it is made again from its JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.cluster import Cluster
from plait.plan import planner
from plait.plan.plan import Plan
from plait.report.explain import explain
from tests import pretend, zoo
from tests.cases import Setup

QUICK = {("llama", True), ("t5", False)}


def prove(setup: Setup, training: bool, n: int = 2) -> None:
    program, options = pretend.trace(setup, training), planner.Options(n, Cluster.of("dgx-h100").subset(range(n)))
    plan = planner.make(program, options).plan
    assert plan.seconds > 0
    assert plait.simulate(plan).end == pytest.approx(plan.seconds, rel=1e-6)
    text = explain(plan).splitlines()
    for placed in plan.collectives:
        (said,) = [line.removeprefix(f"  {placed}; ") for line in text if line.startswith(f"  {placed}; ")]
        assert said.startswith("overlapped with ") or len(said) > len("not overlapped: ")
    again = Plan.from_json(plan.to_json())
    assert again == plan
    planner.replay(program, again, options).local(n - 1)


@pytest.mark.parametrize(
    ("name", "training"),
    [
        pytest.param(name, training, marks=() if (name, training) in QUICK else pytest.mark.full)
        for name in zoo.NAMES
        for training in (True, False)
    ],
)
def test_models(name: str, training: bool) -> None:
    prove(Setup(*zoo.build(name)), training)


class Block(nn.Module):
    def __init__(self, between: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(1024), nn.Linear(1024, 4096), nn.Linear(4096, 1024)
        self.between = between()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.between(self.down(torch.relu(self.up(self.norm(x)))))


@pytest.mark.parametrize("training", (True, False))
@pytest.mark.parametrize("between", (nn.Dropout, partial(nn.BatchNorm1d, 1024)), ids=("draws", "changes buffers"))
def test_what_is_not_the_same_in_every_call(between: Callable[[], nn.Module], training: bool) -> None:
    model = nn.Sequential(Block(between), Block(between)).train()
    prove(Setup(model, (torch.randn(64, 1024),)), training)
