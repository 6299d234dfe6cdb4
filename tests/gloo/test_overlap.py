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

import plait
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
    """Moves that take a random time more; the workers are shared, so they are put back."""
    run = Transport.run

    def slow(self: Transport, *args: Any) -> torch.Tensor:
        time.sleep(dice.random() * 2e-3)
        return run(self, *args)

    if on:
        Transport.run = slow  # type: ignore[method-assign]
    try:
        yield
    finally:
        Transport.run = run  # type: ignore[method-assign]


def close(got: dict[str, Any], want: dict[str, Any]) -> list[str]:
    """Norms of transformers compute in float32 whatever the model's dtype: sums in chunks round there."""
    return differences(got, want, close=within(dtype=torch.float32))


SWEEP = [
    ("llama", 2, 2), ("llama", 2, 4), ("gpt2", 2, 3), ("llama", 3, 2),
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


def slow_and_quick(group: Any, seed: int) -> str:
    return call(group, "llama", 3, seed)[1]


@pytest.mark.full
def test_timing_changes_no_bit(pool: Pool) -> None:
    digests = {d for seed in range(5) for d in pool.run(slow_and_quick, 2, seed, timeout=240.0)}
    assert len(digests) == 1


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
