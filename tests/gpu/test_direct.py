"""Models compiled for direct moves against themselves whole, on one device or on the host."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from plait.passes.rings import Route
from tests.gpu.ranks import CUDA, run_ranks

DTYPE = torch.bfloat16 if CUDA else torch.float32


def decoder(norm: str = "rms") -> nn.Module:
    """Two layers with residuals; the names of modules play no part."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=8,
        vocab_size=96,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(DTYPE).eval()


class Block(nn.Module):
    """A layer norm with bias, linears with bias, two matmuls that read one norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.other = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.gate = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)
        self.down, self.out = nn.Linear(3 * width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.down(torch.relu(self.up(h)) * self.gate(h))
        return x + self.out(self.other(x))


class Stack(nn.Module):
    def __init__(self, width: int = 48, dtype: torch.dtype = DTYPE) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(4)))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(x)
        return out


def compiled(
    model: nn.Module, args: Any, workspace: Any, device: torch.device, route: Any, training: bool = False
) -> tuple[Any, dict[str, Tensor], Any]:
    """This rank's executable with every ring direct, or every sum of few rows, and its weights."""
    from dataclasses import replace

    import torch.distributed as dist

    from plait.capture import capture
    from plait.cluster import Cluster
    from plait.passes.rings import find
    from plait.plan import planner, prices
    from plait.plan.direct import HOP, RING
    from plait.plan.plan import Overlapped
    from plait.rules.moves import take
    from plait.runtime.executor import executable
    from plait.runtime.transport import Transport

    ranks = workspace.ranks
    program = capture(model, args, {}, dynamic=None, training=training)
    cluster = Cluster.of("dgx-h200").subset(range(ranks))
    # A stand-in for a model that is large enough: the split by rows whatever it gains, or never.
    monkey: dict[str, Any] = {"DIRECT_GAIN": float("inf") if route is None else 0.0, "BESIDE": 1e-6}
    if route is not None:
        monkey["pick"] = lambda _, kind, nbytes, *name: ("native", 1e-6 * nbytes)
    free = patch.multiple(planner, **monkey), patch.object(prices, "OPEN", 0.0)
    with free[0], free[1], patch.object(planner.direct, "weigh", lambda *_: ()):
        planned = planner.make(program, planner.Options(ranks, cluster))
    found = find(program, planned.local(0))
    sites = [e.site.name for events in found.rings.values() for e in events]
    if route is None:
        sites = [f.site.name for f in found.few]
    form = HOP if route is None else f"{RING} {route}"
    direct = [Overlapped(s, form, (s,), 0, 0.0, 0.0, 0.0) for s in sites]
    planned = replace(planned, plan=replace(planned.plan, overlaps=tuple(direct)))
    transport = Transport.of(dist.group.WORLD)
    made = executable(planned, transport, device, lambda *_: workspace)
    state = dict(model.state_dict(keep_vars=True)) | dict(model.named_buffers())
    weights = {}
    for part in made.local.shares:
        value = state[part.weight.name].detach()
        if part.cut is not None:
            value = take(value, part.cut.dim, part.cut.rows[workspace.rank])
        weights[part.weight.name] = value.to(device, copy=True).contiguous().requires_grad_(training)
    return made, weights, sites


def learns(route: Any, make: Any, workspace: Any, device: torch.device) -> None:
    """Gradients of every weight, over ways back in another order than the ways there, and twice over one.

    Held to float64: no further from it than half as much again as the whole model in its own dtype.
    """
    from plait.rules.moves import take

    model, inputs = make()
    exact = copy.deepcopy(model).double()
    made, weights, sites = compiled(model, (inputs[0],), workspace, device, route, training=True)
    called = [str(n.target) for n in made.module.graph.nodes if n.op == "call_module"]
    assert sites, "nothing direct"
    assert not set(sites) & set(called), (sites, called)
    state, ideal = dict(model.named_parameters()), dict(exact.named_parameters())
    for some in (inputs[:1], inputs[:2], *([x] for x in inputs[2:])):
        for p in (*state.values(), *ideal.values(), *weights.values()):
            p.grad = None
        outs = [
            (leaves(made(weights, [x], torch.zeros(0)))[0], leaves(model(x))[0], leaves(exact(wide(x)))[0])
            for x in some
        ]
        for every in outs:
            assert off(every[0], every[2]) < bound(every[1], every[2])
            for loss in every:
                loss.float().square().mean().backward(retain_graph=len(some) == 1)
                if len(some) == 1:
                    loss.float().sin().mean().backward()
        failed = []
        for part in made.local.shares:
            name, cut = part.weight.name, part.cut
            near, best = (s[name].grad if cut is None else take(s[name].grad, cut.dim, cut.rows[workspace.rank])
                          for s in (state, ideal))  # fmt: skip
            got = weights[name].grad
            assert got is not None, name
            if not off(got, best) < bound(near, best):
                failed.append(f"{name}: off by {off(got, best):.3g}, the whole model by {off(near, best):.3g}")
        assert not failed, "\n".join(failed)


def wide(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def bound(near: Tensor, best: Tensor) -> float:
    return 1.5 * off(near, best) + (1e-2 if near.dtype == torch.bfloat16 else 1e-5)


def off(got: Tensor, want: Tensor) -> float:
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    return float((got - want).norm() / want.norm())


def texts() -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(2)
    return decoder().train(), [torch.randint(96, (1, 256 if CUDA else 21)) for _ in range(7 if CUDA else 2)]


def stacks() -> tuple[nn.Module, list[Tensor]]:
    """In float32: in bf16 relus near 0 put the whole model itself 3 % off float64."""
    torch.manual_seed(3)
    rows, calls = (130, 7) if CUDA else (13, 2)
    return Stack(dtype=torch.float32), [torch.randn(rows, 48) for _ in range(calls)]


def same(model: nn.Module, inputs: list[Any], workspace: Any, device: Any, route: Any) -> None:
    made, weights, sites = compiled(model, (inputs[0],), workspace, device, route)
    called = [str(n.target) for n in made.module.graph.nodes if n.op == "call_module"]
    assert sites, "nothing direct"
    assert not set(sites) & set(called), (sites, called)
    for x in inputs:
        got = made(weights, [x], torch.zeros(0))
        with torch.no_grad():
            want = model(x)
        for a, b in zip(leaves(got), leaves(want), strict=True):
            assert off(a, b) < (2e-2 if CUDA else 1e-4)


def leaves(out: Any) -> list[Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, Tensor)]


def rows(route: Any, workspace: Any, device: torch.device) -> None:
    torch.manual_seed(2)
    ids = [torch.randint(96, (1, 256 if CUDA else 21)) for _ in range(6 if CUDA else 2)]
    same(decoder(), ids, workspace, device, route)


def few(workspace: Any, device: torch.device) -> None:
    ids = [torch.randint(96, (1, 5), generator=torch.Generator().manual_seed(i)) for i in range(4)]
    same(decoder(), ids, workspace, device, None)


def others(workspace: Any, device: torch.device) -> None:
    torch.manual_seed(3)
    rows, calls = (130, 4) if CUDA else (13, 1)
    xs = [torch.randn(rows, 48).to(DTYPE) for _ in range(calls)]
    same(Stack(), xs, workspace, device, Route(0.5, 2))


JOBS = [
    partial(rows, Route(runs=2)),
    partial(rows, Route(0.5)),
    few,
    others,
    partial(learns, Route(late=1), texts),
    partial(learns, Route(runs=2), stacks),
]


@pytest.mark.parametrize("ranks", [2, 3])
def test_direct(ranks: int) -> None:
    run_ranks(ranks, 1 << 24, JOBS)
