"""Apart: work in processes beside the ranks' own, which cannot take these with it.

    apart(trial, request, form, seconds=60.0)      trial(request, form) on one more process for each rank

A launch that fails on a device ends every later one in its process, and a kernel that waits for ever
takes the process along. So what may do that is tried in processes that form a group of their own, on
the same devices, while the ranks wait.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from plait.errors import RankError
from plait.runtime.exits import describe
from plait.runtime.processes import default_backend, die_with_parent

LOOK = 0.2  # seconds between two looks at the processes
GRACE = 5.0  # seconds for the others to end by themselves once one has failed


def told(value: Any) -> list[Any]:
    """Every rank's value, on every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def apart(work: Callable[..., Any], *args: Any, seconds: float) -> Any:
    """What `work` returns on the first of the processes (JSON carries it); called on all ranks.

    RankError, on all ranks: one of them raised, was killed, or was not done after `seconds`.
    """
    rank = dist.get_rank()
    address = told(_address() if rank == 0 else "")[0]
    with TemporaryDirectory(prefix="plait-apart-") as folder:
        out = Path(folder)
        place = (rank, dist.get_world_size(), address, torch.get_num_threads())
        process = get_context("spawn").Process(target=_child, args=(place, folder, work, args))
        process.start()
        codes = _watched(process, time.monotonic() + seconds)
        process.kill()  # one that waits for another, or does not end
        process.join()
        said = told((_words(codes[rank], out), _value(out)))
    failed = [f"rank {r}: {words}" for r, (words, _) in enumerate(said) if words]
    if failed:
        raise RankError("; ".join(failed))
    if None in codes:
        raise RankError(f"not done after {seconds:.0f} s")
    return said[0][1]


def _watched(process: Any, end: float) -> list[int | None]:
    """The exit codes of all, once all have ended or it is too late; None of those that run."""
    while True:
        states = told((process.exitcode, time.monotonic() > end))
        codes = [code for code, _ in states]
        if None not in codes or any(late for _, late in states):
            return codes
        if any(codes):
            end = min(end, time.monotonic() + GRACE)
        time.sleep(LOOK)


def _words(code: int | None, out: Path) -> str:
    """How it ended by itself, if not well."""
    if not code:
        return ""
    error = out / "error"
    return error.read_text() if error.exists() else describe(-code if code < 0 else code << 8)


def _value(out: Path) -> Any:
    value = out / "value"
    return json.loads(value.read_text()) if value.exists() else None


def _address() -> str:
    """Where the processes meet: a port of this host that is free now."""
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    with socket.socket() as found:
        found.bind(("", 0))
        return f"tcp://{host}:{found.getsockname()[1]}"


def _child(place: tuple[int, int, str, int], folder: str, work: Callable[..., Any], args: Any) -> None:
    die_with_parent()
    rank, ranks, address, threads = place
    out = Path(folder)
    torch.set_num_threads(threads)
    try:
        dist.init_process_group(default_backend(), init_method=address, rank=rank, world_size=ranks)
        value = work(*args)
    except Exception as error:
        (out / "error").write_text(f"{type(error).__name__}: {error}".splitlines()[0][:200])
        os._exit(1)  # whatever the device still does
    (out / "value").write_text(json.dumps(value))
    dist.barrier()
    os._exit(0)
