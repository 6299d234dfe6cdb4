"""Every transport and fused kernel against fp64 on one device, for 2, 3 and 4 ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from plait.passes.rings import Route
from tests.gpu.ranks import CUDA, run_ranks

WIDTHS = [64, 80] if not CUDA else [8192, 5120, 80]
DTYPE = torch.bfloat16 if CUDA else torch.float32  # the interpreter's arithmetic is numpy's


def terms(ranks: int, rows: int, width: int, device: Any, seed: int = 0) -> list[torch.Tensor]:
    """What every rank brings; all ranks can make all of it."""
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, width, generator=made).to(device, DTYPE) for _ in range(ranks)]


def in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def normed(row: torch.Tensor, weight: Any, bias: Any, kind: str, eps: float = 1e-5) -> torch.Tensor:
    x, w = row.double(), weight.double()
    if kind == "layer":
        return torch.nn.functional.layer_norm(x, x.shape[-1:], w, bias.double(), eps)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


def close(out: torch.Tensor, ref: torch.Tensor) -> None:
    bound = 1e-2 if out.dtype == torch.bfloat16 else 1e-5
    error = float((out.double() - ref.double()).norm() / ref.double().norm())
    assert error < bound, error  # NaN fails


def repeat(step: Any, device: torch.device, times: int) -> None:
    """Run `step` as it is, then captured and replayed."""
    step()
    if not CUDA:
        for _ in range(min(times, 2)):
            step()
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step()
    for _ in range(times):
        graph.replay()
    torch.cuda.synchronize()


def one_shot(workspace: Any, device: torch.device) -> None:
    from plait.runtime.kernels.oneshot import OneShot

    ranks, rank, times = workspace.ranks, workspace.rank, 50
    kinds = zip(("rms", "rms_rounded", "layer"), (*WIDTHS, WIDTHS[-1]), (8, 1, 5), strict=False)
    shots = {width: OneShot(workspace, 8, width, DTYPE) for width in WIDTHS}
    workspace.ready()
    torch.manual_seed(3)
    for kind, width, rows in kinds:
        shot = shots[width]
        weight, bias = (torch.rand(width).to(device, DTYPE) + 0.5 for _ in range(2))
        parts = terms(ranks, rows, width, device, seed=rows)
        residual = terms(1, rows, width, device, seed=100 + rows)[0]
        outs = [torch.full_like(residual, torch.nan) for _ in range(2)]

        step = partial(
            shot.all_reduce_norm,
            parts[rank],
            residual,
            weight,
            bias if kind == "layer" else None,
            eps=1e-5,
            kind=kind,
            residual_out=outs[0],
            rows_out=outs[1],
        )
        repeat(step, device, times)
        total = (in_order(parts).float() + residual.float()).to(DTYPE)
        assert torch.equal(outs[0], total)
        close(outs[1], normed(total, weight, bias, kind))


def one_shot_nan(workspace: Any, device: torch.device) -> None:
    """A row full of the NaN that marks an empty slot must arrive, not hang."""
    from plait.runtime.kernels.oneshot import OneShot

    shot = OneShot(workspace, 2, 64, DTYPE)
    workspace.ready()
    word = torch.int16 if DTYPE.itemsize == 2 else torch.int32
    x = torch.full((2, 64), -1, dtype=word, device=device).view(DTYPE)
    out = torch.zeros_like(x)
    for _ in range(3):
        shot.all_reduce_norm(x, rows_out=out)
    assert bool(out.isnan().all())


def two_shot(workspace: Any, device: torch.device) -> None:
    from plait.runtime.kernels.twoshot import TwoShot

    shot = TwoShot(workspace, programs=4)
    sizes = (4096 * 5 + 24, 40)
    buffers = [workspace.buffer((size,), DTYPE) for size in sizes]
    workspace.ready()
    for size, data in zip(sizes, buffers, strict=True):
        out = torch.empty(size, dtype=DTYPE, device=device)
        parts = terms(workspace.ranks, 1, size, device)

        def step(data: Any = data, parts: Any = parts, out: Any = out) -> None:
            data.local.copy_(parts[workspace.rank][0])
            shot.all_reduce(data)
            out.copy_(data.local)

        repeat(step, device, 50)
        assert torch.equal(out, in_order(parts)[0])


def block(workspace: Any, device: torch.device) -> None:
    for read, push in ((Route(), Route(1.0)), (Route(0.5, 2), Route(0.5)), (Route(1.0), Route(runs=3))):
        one_block(workspace, device, read, push)


def one_block(workspace: Any, device: torch.device, read: Route, push: Route) -> None:
    """gather_matmul -> matmul_scatter -> finish, against the same on whole rows."""
    from plait.runtime.copy_engine import Lane
    from plait.runtime.pieces import Coming, Linear, Ring, finish, gather_matmul, matmul_scatter

    ranks, rank, rows, width, inner = workspace.ranks, workspace.rank, 52, WIDTHS[-1], 32
    bounds = [rows * r // ranks for r in range(ranks + 1)]
    ring = Ring.of(workspace, bounds, width, DTYPE)
    workspace.ready()
    x = terms(1, rows, width, device, seed=5)[0]
    ups = [w / width**0.5 for w in terms(ranks, inner, width, device, seed=6)]
    downs = [w / inner**0.5 for w in terms(ranks, width, inner, device, seed=7)]
    scale = torch.ones(width, dtype=DTYPE, device=device)
    residual, hidden = x[bounds[rank] : bounds[rank + 1]].clone(), x.new_empty(rows, inner)
    result = torch.empty_like(x)

    def step() -> None:
        compute = Lane.current(device)
        ring.open(compute)
        ring.rows.buffer.local.copy_(x)
        residual.copy_(ring.rows.own)
        coming: Coming = {}
        for turn in range(2):
            up = Linear(ups[rank], hidden)
            gather_matmul(ring, [up], compute, coming, push if turn else Route())
            coming = matmul_scatter(ring, hidden, downs[rank], compute, read)
            coming = finish(
                ring,
                residual,
                scale,
                None,
                compute,
                coming,
                eps=1e-5,
                kind="rms",
                read=read,
                push=push,
            )
        ring.near.drain(list(coming.values()))
        result.copy_(ring.rows.buffer.local)
        ring.close(compute)

    repeat(step, device, 50)
    stream, out = x.double(), x.double()
    for _ in range(2):
        stream = stream + sum(
            out @ u.double().t() @ d.double().t() for u, d in zip(ups, downs, strict=True)
        )
        out = normed(stream, scale, None, "rms")
    close(result, out)


def delayed(workspace: Any, device: torch.device) -> None:
    """Random sleeps between all-reduces; every result must still be the sum of its own turn."""
    import random
    import time

    from plait.runtime.kernels.oneshot import OneShot

    chance = random.Random(workspace.rank)
    shot = OneShot(workspace, 4, 64, DTYPE)
    workspace.ready()
    out = torch.empty(4, 64, dtype=DTYPE, device=device)
    for turn in range(1000 if CUDA else 12):
        parts = terms(workspace.ranks, 4, 64, device, seed=turn)
        if chance.random() < 0.3:
            if CUDA:
                torch.cuda._sleep(chance.randrange(10**6))
            else:
                time.sleep(chance.random() / 100)
        shot.all_reduce_norm(parts[workspace.rank], rows_out=out)
        assert torch.equal(out, in_order(parts)), turn


JOBS = [one_shot, one_shot_nan, two_shot, block, delayed]


@pytest.mark.parametrize("ranks", [2, 3, 4, pytest.param(8, marks=pytest.mark.skipif(not CUDA, reason="slow"))])
def test_transports(ranks: int) -> None:
    run_ranks(ranks, 1 << 24, JOBS)
