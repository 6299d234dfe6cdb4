"""Local worker processes: start N of them, watch them, leave none behind.

    launch(main, 2, "hello")     # main("hello") on ranks 0 and 1 of a process group

Each worker has torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK ...) and a process group of its
own making, so that the same function runs under torchrun as well: see `world`. Rank 0 speaks for
all; what the others print is kept, and shown when they fail.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from plait.errors import InputError, PlaitError, RankError
from plait.runtime.exits import describe

GRACE = 20.0  # seconds for the others to raise by themselves once a rank has failed
MANNERS = 3.0  # seconds between SIGTERM and SIGKILL
TICK = 0.05
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_TAIL = 4000  # characters of a worker's own output that a failure shows


def launch(target: Callable[..., None], nproc: int, *args: Any) -> None:
    """Run `target(*args)` on `nproc` local processes; RankError names the first that failed.

    `target` is a function of a module, for the workers import it. Returns when all have ended.
    """
    if nproc < 1:
        raise InputError(f"nproc is {nproc}; it takes at least 1 process")
    with tempfile.TemporaryDirectory(prefix="plait-") as folder:
        context = start_processes(  # type: ignore[no-untyped-call]
            _work, (nproc, folder, target, args), nprocs=nproc, join=False, start_method="spawn"
        )
        assert context is not None
        crew = Crew(context.pids(), Path(folder))
        try:
            crew.wait()
        finally:
            crew.end()
            for process in context.processes:
                process.join()
        crew.judge()


def members(group: dist.ProcessGroup | None) -> tuple[dist.ProcessGroup | None, int]:
    """The group to work in, by default all processes, and its size; (None, 1) for a process alone."""
    found = world()[0] if group is None else group
    return found, 1 if found is None else dist.get_world_size(found)


def beside(ranks: int) -> int:
    """How many of so many ranks share this host: as many as torchrun says, else all."""
    return min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))


def world(backend: str | None = None) -> tuple[dist.ProcessGroup | None, bool]:
    """The process group to work in, and whether it was made here.

    The user's own group if there is one; else one made from torchrun's variables, which ends with
    the process; else none, for a process that is alone.
    """
    if dist.is_initialized():
        return dist.group.WORLD, False
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return None, False
    dist.init_process_group(backend or default_backend())
    atexit.register(_end_world)
    return dist.group.WORLD, True


def default_backend() -> str:
    """NCCL for devices where each local rank has one, gloo for everything else."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    if torch.cuda.is_available() and torch.cuda.device_count() >= local:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        return "cpu:gloo,cuda:nccl"
    return "gloo"


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, however it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


# --- the parent's side ----------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How a worker ended: its wait status, and when it was seen."""

    rank: int
    status: int
    when: float


class Crew:
    """The workers, seen from their parent. It reaps none of them before the end, so that the
    others can still read in /proc how one died."""

    def __init__(self, pids: list[int], folder: Path) -> None:
        self.pids, self.folder = pids, folder
        self.ended: dict[int, Ended] = {}

    def wait(self) -> None:
        """Until all have ended, or for GRACE seconds after the first failure."""
        deadline = float("inf")
        while len(self.ended) < len(self.pids) and time.monotonic() < deadline:
            self._look()
            if any(e.status for e in self.ended.values()):
                deadline = min(deadline, time.monotonic() + GRACE)
            time.sleep(TICK)

    def end(self) -> None:
        """End whoever is left."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            self._look()
            for rank, pid in enumerate(self.pids):
                if rank not in self.ended:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, sign)
            end = time.monotonic() + MANNERS
            while len(self.ended) < len(self.pids) and time.monotonic() < end:
                self._look()
                time.sleep(TICK)

    def judge(self) -> None:
        """Raise RankError if a worker failed: the first, unless it only named another."""
        failed = sorted((e for e in self.ended.values() if e.status), key=lambda e: e.when)
        if not failed:
            return
        first = min(failed, key=lambda e: (self._raised(e.rank).startswith("RankError"), e.when))
        words = self._words(first)
        others = [e for e in failed if self._words(e) != words and not self._repeats(e, first)]
        alike = [f"{rank}" for rank in sorted(e.rank for e in failed if self._words(e) == words)]
        who = f"rank {alike[0]}" if len(alike) == 1 else f"ranks {', '.join(alike)}"
        text = [f"{who} of {len(self.pids)} {words}"]
        text += [f"  then rank {e.rank} {self._words(e)}" for e in others]
        detail = self._read(f"trace-{first.rank}") or self._read(f"output-{first.rank}")
        raise RankError("\n".join([*text, detail[-_TAIL:].rstrip()]).rstrip())

    def _look(self) -> None:
        for rank, pid in enumerate(self.pids):
            if rank not in self.ended:
                with contextlib.suppress(ChildProcessError):
                    result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                    if result is not None:
                        killed = result.si_code != os.CLD_EXITED
                        status = result.si_status if killed else result.si_status << 8
                        self.ended[rank] = Ended(rank, status, time.monotonic())

    def _words(self, ended: Ended) -> str:
        raised = self._raised(ended.rank)
        return f"raised {raised}" if raised else describe(ended.status)

    def _raised(self, rank: int) -> str:
        return self._read(f"error-{rank}")

    def _repeats(self, ended: Ended, first: Ended) -> bool:
        """Whether it only says again what a user's mistake, which needs no trace, was."""
        told = self._raised(first.rank)
        return bool(told) and not self._read(f"trace-{first.rank}") and told in self._words(ended)

    def _read(self, name: str) -> str:
        path = self.folder / name
        return path.read_text(errors="replace") if path.exists() else ""


# --- the worker's side ----------------------------------------------------------------------


def _work(rank: int, nproc: int, folder: str, target: Callable[..., None], args: Any) -> None:
    die_with_parent()
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
    }
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if rank > 0:
        _to_file(Path(folder) / f"output-{rank}")
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cpus // nproc))
    store = f"file://{folder}/rendezvous"
    dist.init_process_group(default_backend(), init_method=store, rank=rank, world_size=nproc)
    try:
        target(*args)
    except Exception as error:
        if not isinstance(error, PlaitError):  # whose message is enough
            (Path(folder) / f"trace-{rank}").write_text(traceback.format_exc())
        (Path(folder) / f"error-{rank}").write_text(f"{type(error).__name__}: {error}")
        sys.exit(1)
    dist.destroy_process_group()
    _leave()


def _leave() -> NoReturn:
    """End as a success, without taking the interpreter apart: a thread of torch's that asks for it meanwhile, to let
    go of a tensor, would abort the process; and it takes a second."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _to_file(path: Path) -> None:
    """Send this process's output to a file, libraries' included."""
    with open(path, "wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)


def _end_world() -> None:
    if dist.is_initialized() and getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()
