"""A pool of started worker processes, shared by every test of a session.

Starting N processes and a process group takes seconds; a test takes milliseconds. So the workers
stay, and a test sends them a module-level function:

    def body(group, width): ...            # runs on every rank; dist.get_rank(group) is its rank
    results = pool.run(body, 3, 16)        # one result a rank, in order of rank

A failure on any rank is a failed test that shows the traceback of every rank. Ranks that hang are
asked for their stacks, killed, and reported; the next test gets fresh workers.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from plait.errors import RankError
from plait.runtime.processes import die_with_parent

PRELOAD = ["torch", "torch.export", "torch._dynamo", "scipy.optimize", "scipy.sparse"]
PRELOAD += ["transformers", "pytest", "plait"]
SIZES = (4, 8, 16)  # a pool has one of these sizes: few restarts, and idle ranks cost nothing


@dataclass(frozen=True)
class Failure:
    """What one rank raised."""

    rank: int
    kind: str  # the exception's class name
    message: str
    traceback: str
    error: BaseException | None = None  # None where it does not pickle


class RanksFailed(AssertionError):
    """Some rank raised, died or hung; the message shows all of them."""

    def __init__(self, failures: Sequence[Failure], n: int) -> None:
        self.failures = tuple(failures)
        body = "\n".join(f"--- rank {f.rank} of {n}: {f.kind}\n{f.traceback}" for f in failures)
        super().__init__(f"{len(failures)} of {n} ranks failed\n{body}")


@dataclass
class Worker:
    process: BaseProcess
    pipe: Connection
    stacks: Path  # where the worker's stacks go when it is asked for them


@dataclass
class Pool:
    """Workers of one world; `run` uses the first n of them, as a group that may be a part of it."""

    timeout: float = 60.0
    grace: float = 10.0  # how long the others may take once a rank has failed
    workers: list[Worker] = field(default_factory=list)
    folder: tempfile.TemporaryDirectory[str] | None = None

    def run(
        self, fn: Callable[..., Any], n: int, *args: Any, timeout: float | None = None
    ) -> list[Any]:
        """`fn(group, *args)` on n ranks; the results in order of rank, or RanksFailed."""
        answers = self.ask(fn, n, *args, timeout=timeout)
        failures = [a for a in answers if isinstance(a, Failure)]
        if failures:
            raise RanksFailed(failures, n)
        return answers

    def errors(
        self, fn: Callable[..., Any], n: int, *args: Any, timeout: float | None = None
    ) -> list[Failure]:
        """As `run` for a function that must raise on every rank: what each raised."""
        answers = self.ask(fn, n, *args, timeout=timeout)
        fine = [rank for rank, a in enumerate(answers) if not isinstance(a, Failure)]
        assert not fine, f"ranks {fine} of {n} raised nothing"
        return answers

    def close(self) -> None:
        """Kill the workers; the next `run` starts fresh ones."""
        for worker in self.workers:
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()
        self.workers = []
        if self.folder is not None:
            self.folder.cleanup()
            self.folder = None

    def ask(
        self, fn: Callable[..., Any], n: int, *args: Any, timeout: float | None = None
    ) -> list[Any]:
        """As `run`, with a Failure in the place of each rank that failed."""
        limit = timeout or self.timeout
        self._start(n)
        task = pickle.dumps((fn, n, args))
        busy = {}
        for rank, worker in enumerate(self.workers[:n]):
            worker.pipe.send_bytes(task)
            busy[worker.pipe] = rank
        answers: dict[int, Any] = {}
        end = time.monotonic() + limit
        while busy and time.monotonic() < end:
            for pipe in wait(list(busy), timeout=max(0.0, end - time.monotonic())):
                assert isinstance(pipe, Connection)
                rank = busy.pop(pipe)
                answers[rank] = self._answer(rank)
                if isinstance(answers[rank], Failure):
                    end = min(end, time.monotonic() + self.grace)
        hung = set(busy.values())
        answers |= {rank: self._stacks(rank, limit) for rank in hung}
        if hung or not _harmless(list(answers.values())):
            self.close()
        return [answers[rank] for rank in range(n)]

    def _answer(self, rank: int) -> Any:
        worker = self.workers[rank]
        try:
            return pickle.loads(worker.pipe.recv_bytes())
        except EOFError:
            worker.process.join(5)
            code = worker.process.exitcode
            return Failure(rank, "Died", f"exit code {code}", f"the process died: exit code {code}")

    def _stacks(self, rank: int, limit: float) -> Failure:
        worker = self.workers[rank]
        if worker.process.pid is not None:
            os.kill(worker.process.pid, signal.SIGUSR1)
        time.sleep(0.3)
        text = worker.stacks.read_text() if worker.stacks.exists() else "no stack"
        return Failure(rank, "Hung", f"no answer (limit {limit:.0f} s)", text)

    def _start(self, n: int) -> None:
        assert 1 <= n <= SIZES[-1], f"a pool has 1 to {SIZES[-1]} ranks, not {n}"
        if len(self.workers) >= n and all(w.process.is_alive() for w in self.workers):
            return
        self.close()
        size = next(s for s in SIZES if s >= n)
        self.folder = tempfile.TemporaryDirectory(prefix="plait-pool-")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        os.environ["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)  # for what it preloads
        for rank in range(size):
            ours, theirs = context.Pipe()
            stacks = Path(self.folder.name) / f"stacks-{rank}"
            store = f"file://{self.folder.name}/rendezvous"
            process = context.Process(
                target=_work, args=(rank, size, theirs, store, stacks), daemon=True
            )
            process.start()
            theirs.close()
            self.workers.append(Worker(process, ours, stacks))


def _harmless(answers: list[Any]) -> bool:
    """True where every rank raised the same or none did: no collective was left half done.

    But for the error of another rank, which ends the group for all of them.
    """
    failures = [a for a in answers if isinstance(a, Failure)]
    alike = {(f.kind, f.message) for f in failures}
    return not failures or (
        len(failures) == len(answers) and len(alike) == 1 and failures[0].kind not in ("Died", RankError.__name__)
    )


def _work(rank: int, size: int, pipe: Connection, store: str, stacks: Path) -> None:
    die_with_parent()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    with open(stacks, "w") as dump:
        faulthandler.register(signal.SIGUSR1, file=dump)
        dist.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=120)
        )
        groups: dict[int, Any] = {n: dist.new_group(list(range(n))) for n in range(1, size)}
        groups[size] = dist.group.WORLD
        while True:
            try:
                task = pipe.recv_bytes()
            except EOFError:
                return
            pipe.send_bytes(_run(rank, task, groups))


def _run(rank: int, task: bytes, groups: dict[int, Any]) -> bytes:
    try:
        fn, n, args = pickle.loads(task)
        torch.manual_seed(0)
        return pickle.dumps(fn(groups[n], *args))
    except Exception as error:
        return pickle.dumps(_failure(rank, error))


def _failure(rank: int, error: Exception) -> Failure:
    failure = Failure(rank, type(error).__name__, str(error), traceback.format_exc(), error)
    try:
        pickle.loads(pickle.dumps(failure))
    except Exception:
        return Failure(rank, type(error).__name__, str(error), traceback.format_exc())
    return failure
