"""Apart: work in processes beside the ranks' own, which cannot take these with it.

    far = Apart.start(open_up, request, form, seconds=60.0)     open_up(request, form) on one more process a rank
    far.ask("seconds", 60.0)                                    what it returned, called there with "seconds"
    far.stop()

A launch that fails on a device ends every later one in its process, and a kernel that waits for ever
takes the process along. So what may do that is done in processes that form a group of their own, on
the same devices, while the ranks wait.
"""

from __future__ import annotations

import atexit
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from plait.errors import RankError
from plait.runtime.exits import describe
from plait.runtime.processes import default_backend, die_with_parent

LOOK = 0.2  # seconds between two looks at a process that works
GRACE = 5.0  # seconds for the others to end by themselves once one has failed

Answer = Callable[[str], Any]  # pickled on its way: plain values and arrays


def told(value: Any) -> list[Any]:
    """Every rank's value, on every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


@dataclass(frozen=True)
class Apart:
    """This rank's own of the processes. RankError, on all ranks: one of them raised, was killed, or was not
    done in time; then all of them are stopped."""

    process: Any
    pipe: Connection

    @classmethod
    def start(cls, open_up: Callable[..., Answer], *args: Any, seconds: float) -> Apart:
        """Called on all ranks, and so is everything else."""
        rank = dist.get_rank()
        address = told(_address() if rank == 0 else "")[0]
        here, there = get_context("spawn").Pipe()
        place = (rank, dist.get_world_size(), address, torch.get_num_threads())
        process = get_context("spawn").Process(target=_child, args=(place, there, open_up, args))
        process.start()
        atexit.register(process.kill)  # else a rank that fails would wait for it at its end
        there.close()
        made = cls(process, here)
        made._answer(seconds)
        return made

    def ask(self, what: str, seconds: float) -> Any:
        """What this rank's process answers."""
        self.pipe.send(what)
        return self._answer(seconds)

    def stop(self) -> None:
        atexit.unregister(self.process.kill)
        self.process.kill()  # one that waits for another, or does not end
        self.process.join()
        self.pipe.close()

    def _answer(self, seconds: float) -> Any:
        """Once all have answered; all look at once, so that all come to the same end."""
        end = time.monotonic() + seconds
        state: tuple[Any, str] | None = None  # a value and, if it failed, words
        while True:
            state = state or self._look()
            said = told((None if state is None else state[1], time.monotonic() > end))
            failed = [f"rank {r}: {words}" for r, (words, _) in enumerate(said) if words]
            answered = all(words is not None for words, _ in said)
            if answered and not failed:
                assert state is not None
                return state[0]
            if answered or any(late for _, late in said):
                self.stop()
                raise RankError("; ".join(failed) or f"not done after {seconds:.0f} s")
            if failed:
                end = min(end, time.monotonic() + GRACE)

    def _look(self) -> tuple[Any, str] | None:
        if not wait([self.pipe], LOOK):
            return None
        try:
            return self.pipe.recv()  # type: ignore[no-any-return]
        except (EOFError, ConnectionError):
            self.process.join(GRACE)
            code = self.process.exitcode
            if code is None:
                return None, "it runs on, and answers no more"
            return None, describe(-code if code < 0 else code << 8)


def _address() -> str:
    """Where the processes meet: a port of this host that is free now."""
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    with socket.socket() as found:
        found.bind(("", 0))
        return f"tcp://{host}:{found.getsockname()[1]}"


def _child(place: tuple[int, int, str, int], pipe: Connection, open_up: Callable[..., Answer], args: Any) -> None:
    die_with_parent()
    rank, ranks, address, threads = place
    torch.set_num_threads(threads)
    try:
        dist.init_process_group(default_backend(), init_method=address, rank=rank, world_size=ranks)
        answer = open_up(*args)
        pipe.send((None, ""))
        while True:
            pipe.send((answer(pipe.recv()), ""))
    except EOFError:  # nobody asks any more
        os._exit(0)
    except Exception as error:
        pipe.send((None, f"{type(error).__name__}: {error}".splitlines()[0][:200]))
        os._exit(1)  # whatever the device still does
