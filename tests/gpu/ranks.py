"""Run a function on N ranks that share memory: on CUDA devices, or on the host without any.

With CUDA, ranks spread over the devices there are; several may share one (gloo group, symmetric
memory). Without, arenas are files mapped by all processes, signals spin on the host and kernels run
in Triton's interpreter, which shows protocol and arithmetic but no timing.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.multiprocessing as mp

CUDA = torch.cuda.is_available()

PATIENCE = 300.0  # seconds; the interpreter is slow on a busy host

QUIET = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}


def run_ranks(ranks: int, nbytes: int, jobs: Sequence[Callable[..., None]]) -> None:
    """Each of `jobs` (workspace, device), functions of a module, in turn on every rank."""
    os.environ.update(QUIET if CUDA else QUIET | {"TRITON_INTERPRET": "1"})
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        barrier = context.Barrier(ranks)
        mp.spawn(  # type: ignore[no-untyped-call]
            _on_devices if CUDA else _on_host, (ranks, nbytes, folder, barrier, jobs), nprocs=ranks
        )


def _on_host(
    rank: int, ranks: int, nbytes: int, folder: str, barrier: Any, jobs: Sequence[Any]
) -> None:
    import torch.distributed as dist

    from plait.runtime.symmetric import HostSignals, Workspace

    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    _interpret_in_place()
    for i, job in enumerate(jobs):
        barrier.wait(PATIENCE)
        with open(f"{folder}/{i}-{rank}", "wb") as file:
            file.truncate(nbytes)
        barrier.wait(PATIENCE)
        arenas = [
            torch.from_file(f"{folder}/{i}-{r}", shared=True, size=nbytes, dtype=torch.uint8)
            for r in range(ranks)
        ]
        job(
            Workspace(arenas, rank, HostSignals(PATIENCE), partial(barrier.wait, PATIENCE)),
            torch.device("cpu"),
        )
    barrier.wait(PATIENCE)
    dist.destroy_process_group()


def _on_devices(
    rank: int, ranks: int, nbytes: int, folder: str, _: Any, jobs: Sequence[Any]
) -> None:
    import torch.distributed as dist

    from plait.runtime.symmetric import Workspace

    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    for job in jobs:
        begin = time.monotonic()
        job(Workspace.on_group(nbytes, dist.group.WORLD, device), device)
        torch.cuda.synchronize()
        dist.barrier()
        if not rank:
            print(f"{ranks} ranks, {name(job)}: {time.monotonic() - begin:.1f} s", flush=True)
    dist.destroy_process_group()


def name(job: Any) -> str:
    return f"{job.func.__name__}{job.args}" if isinstance(job, partial) else str(job.__name__)


def _interpret_in_place() -> None:
    """Keep the interpreter from copying arguments back.

    It ends by copying each argument's whole storage onto itself, which for an arena in shared
    memory undoes what a peer wrote meanwhile; on the host there is nothing to copy back.
    """
    from triton.runtime import interpreter

    interpreter.GridExecutor._restore_args_dev = lambda *_: None
