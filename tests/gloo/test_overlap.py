"""Chunked moves between processes: the same outputs and gradients, whatever the forms and the timing."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import plait
from plait.runtime.streams import Beside, Done, Start, Wait, _Start
from plait.runtime.transport import Transport
from tests import zoo
from tests.compare import demand, differences, digest, within
from tests.gloo.harness import Pool


def call(group: Any, name: str, overlap: Any, sleeps: int = 0) -> tuple[dict[str, Any], str, str]:
    """A step on every rank: gradients and loss, the digest of all of it, and what was explained."""
    model, args, kwargs = zoo.build(name, layers=1)
    model = model.double()
    kwargs = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in kwargs.items()}
    compiled = plait.compile(model, args, kwargs, group=group, pp=1, training=True, overlap=overlap)
    with _sleeps(random.Random(sleeps * 97 + torch.distributed.get_rank(group)), sleeps):
        out = compiled(*args, **kwargs)
        first = out[0] if isinstance(out, tuple) else next(iter(out.values()))
        loss = (first * torch.arange(first.numel()).cos().view(first.shape)).sum()
        loss.backward()
    found = {"loss": loss.detach(), **compiled.gradients()}
    woven = sorted(n for n, _ in compiled._first.module.named_modules() if n.endswith(".start"))
    return {k: v for k, v in found.items() if v is not None}, digest(found), " ".join(woven)


@contextmanager
def _sleeps(dice: random.Random, on: int) -> Iterator[None]:
    """Moves take a random time more, and so does what starts and awaits them; the workers are shared, so
    they are put back."""
    slowed = ((Transport, "run"), (Start, "forward"), (Wait, "forward"))
    before = [getattr(owner, name) for owner, name in slowed]

    def slow(run: Any) -> Any:
        def slowly(*args: Any) -> Any:
            time.sleep(dice.random() * 1e-3)
            return run(*args)

        return slowly

    try:
        for (owner, name), run in zip(slowed, before, strict=True):
            if on:
                setattr(owner, name, slow(run))
        yield
    finally:
        for (owner, name), run in zip(slowed, before, strict=True):
            setattr(owner, name, run)


def close(got: dict[str, Any], want: dict[str, Any]) -> list[str]:
    """Norms of transformers compute in float32 whatever the model's dtype: sums in chunks round there."""
    return differences(got, want, close=within(dtype=torch.float32))


SWEEP = [
    ("gpt2", 2, 3), *(pytest.param("llama", *one, marks=pytest.mark.full) for one in ((2, 4), (3, 2))),
    *(
        pytest.param(name, n, count, marks=pytest.mark.full)
        for i, name in enumerate(("bert", "gemma3", "phi3", "t5", "vit", "gptneox"))
        for n, count in ((2, 2 + i % 3), (3, 2 + (i + 1) % 3))
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "n", "count"), SWEEP)
def test_forced_chunks_give_what_none_give(pool: Pool, name: str, n: int, count: int) -> None:
    whole = pool.run(call, n, name, "off", timeout=240.0)
    cut = pool.run(call, n, name, count, timeout=240.0)
    assert cut[0][2] and not whole[0][2], "the first is chunked, the other is not"
    assert len({d for _, d, _ in cut}) == 1, "ranks differ"
    demand(close(cut[0][0], whole[0][0]), about=f"{name} on {n} ranks in {count} chunks")


def many(group: Any, count: int) -> set[str]:
    """The digests of `count` steps, in each of which ranks and streams are held up otherwise."""
    model, args, kwargs = zoo.build("llama", layers=1)
    compiled = plait.compile(model.double(), args, kwargs, group=group, pp=1, training=True, overlap=3)
    assert compiled.plan.overlaps
    found = set()
    for seed in range(1, count + 1):
        compiled.zero_grad()
        with _sleeps(random.Random(seed * 97 + torch.distributed.get_rank(group)), seed):
            out = compiled(*args, **kwargs)
            out.logits.square().sum().backward()
        found.add(digest({"out": out.logits.detach(), **compiled.gradients()}))
    return found


@pytest.mark.parametrize("count", [10, pytest.param(100, marks=pytest.mark.full)])
def test_timing_changes_no_bit(pool: Pool, count: int) -> None:
    digests = set[str]().union(*pool.run(many, 2, count, timeout=240.0))
    assert len(digests) == 1


class Matmuls(TorchDispatchMode):
    """Notes the matmuls that make a weight's gradient, by the weights' shapes."""

    def __init__(self, shapes: set[tuple[int, ...]], log: list[str]) -> None:
        super().__init__()
        self.shapes, self.log = shapes, log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and tuple(out.shape) in self.shapes:
            self.log.append("matmul")
        return out


def backward(group: Any, overlap: Any) -> list[str]:
    """What a backward does, in its order: moves started and awaited, matmuls of weight gradients."""
    model, args, kwargs = zoo.build("llama", layers=2)
    compiled = plait.compile(model, args, kwargs, group=group, pp=1, training=True, overlap=overlap)
    out = compiled(*args, **kwargs).logits.square().sum()
    log: list[str] = []
    before = (Beside.start, _Start.backward)

    def start(self: Any, step: Any, *rest: Any) -> Any:
        if step.collective is not None:
            log.append("start")
        return before[0](self, step, *rest)

    def awaited(ctx: Any, token: Any) -> Any:
        if not isinstance(ctx.trip.back, Done):
            log.append("wait")
        return before[1](ctx, token)

    parts = {tuple(p.shape) for p in compiled.parameters() if p.dim() == 2}
    Beside.start, _Start.backward = start, staticmethod(awaited)  # type: ignore[method-assign, assignment]
    try:
        with Matmuls(parts, log):
            out.backward()
    finally:
        Beside.start, _Start.backward = before[0], staticmethod(before[1])  # type: ignore[method-assign, assignment]
    return log


def test_sums_of_gradients_run_beside_matmuls_of_weight_gradients(pool: Pool) -> None:
    """Matmuls between the start of a sum of inputs' gradients and its wait; in one piece there are none."""
    log = pool.run(backward, 2, 2, timeout=120.0)[0]
    underway, beside = 0, 0
    for what in log:
        underway += {"start": 1, "wait": -1, "matmul": 0}[what]
        beside += what == "matmul" and underway > 0
    assert underway == 0 and log.count("start") >= 8
    assert beside >= log.count("start") // 2, " ".join(log)


class Pair(nn.Module):
    """A block over a batch and a sequence that differ from call to call, and a width that does not."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.norm, self.first = nn.LayerNorm(width), Wide(width)
        self.second = Wide(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x)))


def dynamic(group: Any, names: dict[int, str], shapes: list[tuple[int, int]], count: int) -> bool:
    """Calls of many sizes, forward and backward, against the module itself; whether anything was in chunks."""
    torch.manual_seed(0)
    model = Pair().double()
    example = torch.randn(6, 10, 12, dtype=torch.float64)
    compiled = plait.compile(
        model, (example,), group=group, pp=1, training=True, overlap=count, dynamic={"x": names}
    )
    for batch, length in shapes:
        x = torch.randn(batch, length, 12, dtype=torch.float64)
        for module in (model, compiled):
            module.zero_grad()
        got, want = compiled(x), model(x)
        demand(differences(got.detach(), want.detach()), about=f"{batch} x {length}")
        for out in (got, want):
            out.cos().sum().backward()
        own = {name: p.grad for name, p in model.named_parameters()}
        demand(differences(compiled.gradients(), own), about=f"gradients of {batch} x {length}")
    woven = [n for n, _ in compiled._first.module.named_modules() if n.endswith(".start")]
    return bool(woven)


DYNAMIC = [  # of the two outer dims one, the other, or both are dynamic
    ({0: "batch"}, [(6, 10), (1, 10), (5, 10)]),
    ({1: "length"}, [(6, 10), (6, 3), (6, 17)]),
    ({0: "batch", 1: "length"}, [(6, 10), (3, 7), (1, 2)]),
]


@pytest.mark.parametrize(("names", "shapes"), DYNAMIC)
def test_sizes_that_differ_from_call_to_call(pool: Pool, names: Any, shapes: Any) -> None:
    """Chunks are of a factor whose size is known: of the other dim, or of the width."""
    assert pool.run(dynamic, 2, names, shapes, 3, timeout=120.0) == [True] * 2


class Wide(nn.Module):
    """A matmul before a sum and one behind it: rows of the one hide rows of the other's transfer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def explained(group: Any, overlap: Any) -> str:
    compiled = plait.compile(Wide(12), (torch.randn(2, 10, 12),), group=group, pp=1, overlap=overlap)
    return compiled.explain()


def test_explain_says_what_runs_beside_what(pool: Pool) -> None:
    forced = pool.run(explained, 2, 4)[0]
    assert "overlapped with" in forced and "rows 4" in forced and "predicted exposed" in forced
    assert "not overlapped: overlap is off" in pool.run(explained, 2, "off")[0]
    assert "not overlapped: " in pool.run(explained, 2, "auto")[0]
