"""Activations computed again in the backward: the bits of gradients stay, and less is held."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plait
from plait.runtime.again import Segment
from tests.cases.case import Mesh
from tests.compare import EXACT, demand, differences, digest
from tests.gloo import prove
from tests.gloo.harness import Pool

FULL = pytest.mark.full


class Block(nn.Module):
    """Attention and a feed-forward network, each with dropout of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)
        x = x + F.dropout(self.out(y.transpose(1, 2).flatten(2)), 0.2)
        return x + F.dropout(self.down(F.gelu(self.up(x))), 0.2)


def model() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    blocks = [Block(12) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(12, 5)), torch.randn(6, 7, 12), torch.randn(6, 7, 5)


def compiled(group: Any, mesh: str, recompute: str, schedule: str = "auto", **more: Any) -> Any:
    at, (net, x, _) = Mesh.parse(mesh), model()
    options = dict(cluster=prove.free(at.size), measure=False) | more
    torch.manual_seed(1)  # of the seeds that calls draw
    return plait.compile(
        net, (x,), tp=at.tp, pp=at.pp, micro_batches=at.micro_batches or 1, group=group,
        training=True, recompute=recompute, schedule=schedule, **options,
    )  # fmt: skip


def gradients(parts: Any, step: bool) -> dict[str, Any]:
    """Of the weights and the input, after two forwards that are open together, or a step."""
    _, x, target = model()
    x.requires_grad_()
    if step:
        loss, out = parts.step(x, target=target, loss_fn=F.mse_loss)
    else:
        outs = [parts(x), parts(2 * x)]
        loss = sum(F.mse_loss(out, target) for out in outs)
        out = outs[0].detach()
        loss.backward()
    return {"loss": loss.detach(), "out": out, "x": x.grad} | dict(parts.gradients())


def bits(group: Any, mesh: str, schedule: str, loop: bool) -> dict[str, str]:
    """Of a step, and of the user's own loop."""
    kept, again = (compiled(group, mesh, how, schedule) for how in ("off", "full"))
    told = {}
    for step in (True, False) if loop else (True,):
        want, got = gradients(kept, step), gradients(again, step)
        demand(differences(got, want, close=EXACT), about=f"{mesh} {schedule} {step}")
        told[f"gradients {step}"] = digest(got)
        kept.zero_grad()
        again.zero_grad()
    assert again.plan.staged.recompute == "full"
    assert "recompute" not in kept.explain() or "if recomputed" in kept.explain()
    assert "activations are recomputed, as asked: " in again.explain()
    memory = again.plan.choice.memory
    if schedule != "zero-bubble":  # two stages of which hold on to all that is open, in halves
        assert memory.again < memory.kept
    return told


@pytest.mark.parametrize(
    "mesh", [*(pytest.param(m, marks=FULL) for m in ("tp2", "pp1/3", "pp3/2", "tp2xpp2/3")), "pp2/3"]
)
def test_gradients_have_the_same_bits(pool: Pool, mesh: str) -> None:
    prove.alike(pool.run(bits, Mesh.parse(mesh).size, mesh, "1f1b", True))


@pytest.mark.parametrize("schedule", [*(pytest.param(s, marks=FULL) for s in ("gpipe", "interleaved")), "zero-bubble"])
@pytest.mark.parametrize("mesh", ["pp2/3", pytest.param("tp2xpp2/3", marks=FULL)])
@pytest.mark.full
def test_by_every_schedule(pool: Pool, mesh: str, schedule: str) -> None:
    prove.alike(pool.run(bits, Mesh.parse(mesh).size, mesh, schedule, False))


# -- what is held -------------------------------------------------------------------------------------


def held(group: Any, mesh: str) -> list[int]:
    """Bytes that operators saved for the backward of a call, kept and recomputed."""
    return [_held(compiled(group, mesh, how, "1f1b")) for how in ("off", "full")]


def _held(parts: Any) -> int:
    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    _, x, _ = model()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = parts(x)
    weights = {p.untyped_storage().data_ptr() for p in parts.parameters()}
    out.sum().backward()
    return sum(n for at, n in saved.items() if at not in weights)


@pytest.mark.parametrize("mesh", ["tp2", "pp2/3"])
@pytest.mark.sample(1)
def test_activations_are_let_go(pool: Pool, mesh: str) -> None:
    for kept, again in pool.run(held, 2, mesh):
        assert again < kept / 4


# -- auto ---------------------------------------------------------------------------------------------


def chosen(group: Any, mesh: str) -> list[str]:
    """What `auto` says on a roomy machine, and on one where activations do not fit."""
    at = Mesh.parse(mesh)
    memory = compiled(group, mesh, "auto", "1f1b").plan.choice.memory
    small = prove.free(at.size)
    said = []
    for limit in (2 * memory.kept, (memory.kept + memory.again) / 2):
        device = replace(small.device, memory=int(limit))
        parts = compiled(group, mesh, "auto", "1f1b", cluster=replace(small, device=device))
        said.append(str(parts.plan.choice.memory))
        assert said[-1] in parts.explain()
        gradients(parts, False)
    return said


@pytest.mark.parametrize("mesh", ["tp2", pytest.param("pp2/3", marks=FULL)])
@pytest.mark.full
def test_auto_goes_by_the_memory_of_a_device(pool: Pool, mesh: str) -> None:
    for roomy, short in pool.run(chosen, 2, mesh):
        assert roomy.startswith("activations are kept, they fit the ")
        assert short.startswith("activations are recomputed, kept they would not fit the ")


# -- what a second run needs --------------------------------------------------------------------------


def changed(group: Any, mesh: str, schedule: str) -> str:
    """An optimizer's step between a forward and its backward would give another forward."""
    parts = compiled(group, mesh, "full", schedule)
    _, x, _ = model()
    loss = parts(x).sum()
    with torch.no_grad():
        for p in parts.parameters():
            p.add_(1.0)
    with pytest.raises(RuntimeError, match="changed in place|modified by an inplace operation"):
        loss.backward()
    return "raised"


@FULL
@pytest.mark.parametrize(("mesh", "schedule"), [("pp1/2", "gpipe"), ("pp1/2", "zero-bubble")])
def test_weights_that_change_before_the_backward_are_refused(fresh: Pool, mesh: str, schedule: str) -> None:
    assert fresh.run(changed, 1, mesh, schedule) == ["raised"]


@pytest.mark.full
def test_segments_run_once_where_no_gradient_is_asked_for() -> None:
    runs = []

    def count(x: Tensor) -> Tensor:
        runs.append(x)
        return x.sin()

    graph = torch.fx.Graph()
    graph.output(graph.call_function(count, (graph.placeholder("x"),)))
    segment = Segment(torch.fx.GraphModule({}, graph), {})
    x = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        segment(x)
    assert len(runs) == 1
    segment(x).sum().backward()
    assert len(runs) == 3
