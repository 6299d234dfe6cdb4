"""Gradients of weights beside the moves of gradients: the same gradients, in whatever way they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.passes.meanwhile import Pay
from plait.plan import overlaps, owed, packing
from plait.plan.plan import Plan
from tests import zoo
from tests.cases import Setup
from tests.compare import demand, differences, gradients, within
from tests.gloo.harness import Pool
from tests.gloo.prove import free


@contextmanager
def wherever() -> Iterator[None]:
    """It is taken wherever it can be, on devices that lose nothing by it."""
    with patch.dict(overlaps._LOSES, loopback=0.0), patch.object(owed, "NOISE", float("-inf")):
        yield


def late(compiled: plait.Compiled) -> int:
    return sum(isinstance(m, Pay) for m in compiled._programs.first.module.modules())


def trained(group: Any, name: str, n: int, pack: bool) -> None:
    model, args, kwargs = zoo.build(name)
    setup = Setup(model, args, kwargs).to(torch.float64)
    options: dict[str, Any] = dict(
        tp=n, group=group, training=True, device="cpu", cluster=free(n), measure=False
    )
    cost = 0.0 if pack else float("inf")
    with wherever(), patch.object(packing.Clock, "together", lambda *_: cost):
        made = plait.compile(setup.model, setup.args, setup.kwargs, **options)
        off = plait.compile(setup.model, setup.args, setup.kwargs, overlap="off", **options)
    assert late(made) == len(owed.sites(made.plan.overlaps)) > 0 and bool(made.plan.packed) == pack
    assert "beside gradients of weights" in made.explain()
    again = plait.compile(
        setup.model, setup.args, setup.kwargs, plan=Plan.from_json(made.plan.to_json()), **options
    )
    assert late(again) == late(made) and not late(off)
    setup.loss(setup.model(*setup.args, **setup.kwargs)).backward()
    want, close = gradients(setup.model), within(dtype=torch.float32)
    for each in (made, again):
        for times in (1, 2):  # they add up
            setup.loss(each(*setup.args, **setup.kwargs)).backward()
            have = {k: None if g is None else g / times for k, g in each.gradients().items()}
            demand(differences(have, want, "gradients", close), about=name)
    mine = dict(made.named_parameters())
    loss = setup.loss(made(*setup.args, **setup.kwargs))
    asked = [p for p in mine.values() if p.requires_grad and p.numel()]
    found = torch.autograd.grad(loss, asked, allow_unused=True)
    there = [None if p.grad is None else p.grad / 2 for p in asked]
    demand(differences(list(found), there, "asked for", close), about=name)
    for p in asked:
        p.grad = None
    loss = setup.loss(made(*setup.args, **setup.kwargs))
    for kept in (True, False):  # two ways back of one way there
        (loss / 2).backward(retain_graph=kept)
    demand(differences(made.gradients(), want, "gradients", close), about=f"{name}, twice")
    with torch.no_grad():
        out = made(*setup.args, **setup.kwargs)
    demand(differences(out, off(*setup.args, **setup.kwargs), "without gradients", close), about=name)


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + nn.functional.dropout(self.down(torch.relu(self.up(self.norm(x)))), 0.5, self.training)
        return x


def drops(group: Any, n: int) -> None:
    torch.manual_seed(0)
    model, x = Drops().double().train(), torch.randn(5, 8, dtype=torch.float64)
    options: dict[str, Any] = dict(tp=n, group=group, training=True, device="cpu", cluster=free(n), measure=False)
    with wherever():
        made = plait.compile(model, (x,), **options)
    off = plait.compile(model, (x,), overlap="off", **options)
    assert late(made) and not late(off)
    for each in (made, off):
        torch.manual_seed(1)
        each(x).square().sum().backward()
    demand(differences(made.gradients(), off.gradients(), "gradients", within(dtype=torch.float64)))


def test_a_program_that_draws(pool: Pool) -> None:
    pool.run(drops, 2, 2)


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("name", "n", "pack"),
    [
        ("qwen2", 3, True),
        pytest.param("t5", 2, False, marks=FULL),
        *(pytest.param(name, n, True, marks=FULL) for name in ("llama", "vit") for n in (2, 3)),
        *(pytest.param(name, n, False, marks=FULL) for name in ("gpt2", "bert", "qwen2") for n in (2, 3)),
    ],
)
def test_training(pool: Pool, name: str, n: int, pack: bool) -> None:
    pool.run(trained, n, name, n, pack)
