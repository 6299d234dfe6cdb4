"""Run a function on N ranks that share memory: on CUDA devices, or on the host without any.

With CUDA, ranks spread over the devices there are; several may share one (gloo group, symmetric
memory). Without, arenas are files mapped by all processes, signals spin on the host and kernels run
in Triton's interpreter, which shows protocol and arithmetic but no timing.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp

CUDA = torch.cuda.is_available()

QUIET = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}


def run_ranks(ranks: int, nbytes: int, job: Callable[..., None], *args: Any) -> None:
    """`job(workspace, device, *args)` on every rank; `job` is a module's function."""
    os.environ.update(QUIET | {} if CUDA else QUIET | {"TRITON_INTERPRET": "1"})
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(ranks):
            with open(f"{folder}/arena{rank}", "wb") as file:
                file.truncate(nbytes)
        mp.spawn(  # type: ignore[no-untyped-call]
            _main, (ranks, nbytes, folder, context.Barrier(ranks), job, args), nprocs=ranks
        )


def _interpret_in_place() -> None:
    """The interpreter ends by copying each argument's whole storage onto itself, which for an arena
    in shared memory undoes what a peer wrote meanwhile; on the host there is nothing to copy back."""
    from triton.runtime import interpreter

    interpreter.GridExecutor._restore_args_dev = lambda *_: None


def _main(
    rank: int, ranks: int, nbytes: int, folder: str, barrier: Any, job: Any, args: Any
) -> None:
    from plait.runtime.symmetric import HostSignals, Workspace

    torch.set_num_threads(1)
    if not CUDA:
        _interpret_in_place()
        arenas = [
            torch.from_file(f"{folder}/arena{r}", shared=True, size=nbytes, dtype=torch.uint8)
            for r in range(ranks)
        ]
        workspace = Workspace(arenas, rank, HostSignals(), lambda: barrier.wait(120))
        job(workspace, torch.device("cpu"), *args)
        return
    import torch.distributed as dist

    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    job(Workspace.on_group(nbytes, dist.group.WORLD, device), device, *args)
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()
