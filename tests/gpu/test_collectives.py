"""Every algorithm over NCCL, one process a device: a step's transfers as one batch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from plait import collectives
from plait.collectives import names
from plait.errors import CollectiveError

QUIET = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_every_algorithm_over_nccl(tmp_path: Path) -> None:
    os.environ.update(QUIET)
    ranks = torch.cuda.device_count()
    mp.spawn(work, (ranks, str(tmp_path)), nprocs=ranks)  # type: ignore[no-untyped-call]


def work(rank: int, ranks: int, folder: str) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    for size in (1, ranks, 1001, 3 << 20):
        for dtype in DTYPES:
            reductions(rank, ranks, size, dtype, device)
        moves(rank, ranks, size, device)
    uneven(rank, ranks, device)
    gradients(rank, ranks, device)
    differing(rank, device)
    cpu = collectives.all_reduce(torch.ones(5), algorithm="ring")  # the same group, over gloo
    assert cpu.tolist() == [ranks] * 5
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


def reductions(rank: int, ranks: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    mine = (torch.arange(size, device=device) % (rank + 2)).to(dtype)
    parts = [(torch.arange(size, device=device) % (r + 2)).to(dtype) for r in range(ranks)]
    want = torch.stack(parts).any(0) if dtype == torch.bool else sum(parts[1:], parts[0])
    bounds = [size * r // ranks for r in range(ranks + 1)]
    rows = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
    for name in (*names("all_reduce"), "ring/3", "native"):
        expect(name, collectives.all_reduce(mine.clone(), algorithm=name), want)
        got = collectives.reduce(mine.clone(), ranks - 1, algorithm=name)
        expect(name, got, want if rank == ranks - 1 else mine)
        got = collectives.reduce_scatter(mine, rows, algorithm=name)
        expect(name, got, want[bounds[rank] : bounds[rank + 1]])


def moves(rank: int, ranks: int, size: int, device: torch.device) -> None:
    mine = torch.full((size,), float(rank), device=device)
    every = torch.arange(ranks, device=device).repeat_interleave(size).float()
    for name in (*names("all_gather"), "native"):
        expect(name, collectives.broadcast(mine.clone(), 1, algorithm=name), mine * 0 + 1)
        expect(name, collectives.all_gather(mine, algorithm=name), every)
    for name in (*names("all_to_all"), "native"):
        sent = torch.arange(ranks, device=device).repeat_interleave(size) + rank * ranks
        want = torch.arange(ranks, device=device).repeat_interleave(size) * ranks + rank
        expect(name, collectives.all_to_all(sent, algorithm=name), want)


def uneven(rank: int, ranks: int, device: torch.device) -> None:
    sizes = [(3 * r) % 4 for r in range(ranks)]
    mine = torch.full((sizes[rank], 3), float(rank), device=device)
    every = torch.cat([torch.full((rows, 3), float(r)) for r, rows in enumerate(sizes)]).to(device)
    for name in (*names("all_gather"), "native"):
        expect(name, collectives.all_gather(mine, sizes, algorithm=name), every)
        want = every.split(sizes)[rank] * ranks
        expect(name, collectives.reduce_scatter(every, sizes, algorithm=name), want)


def gradients(rank: int, ranks: int, device: torch.device) -> None:
    for name in ("ring", "native"):
        x = torch.full((4,), float(rank), device=device, requires_grad=True)
        (collectives.all_reduce(x, algorithm=name) * (rank + 1)).sum().backward()
        expect(name, x.grad, torch.full((4,), ranks * (ranks + 1) / 2, device=device))


def differing(rank: int, device: torch.device) -> None:
    for algorithm in ("ring", "native"):
        with pytest.raises(CollectiveError, match="ask for different collectives"):
            collectives.all_reduce(torch.ones(5 + (rank == 1), device=device), algorithm=algorithm)


def expect(name: str, got: Tensor | None, want: Tensor) -> None:
    assert got is not None
    assert got.dtype == want.dtype, name
    assert torch.equal(got, want), (name, got, want)
