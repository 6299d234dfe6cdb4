"""The sentry: when a collective does not end, find out why and end it on every rank.

A rank that waits in gloo cannot be told anything. So each rank has a thread that sleeps until a
call lasts longer than `PATIENCE`; then it writes into the group's store which call its rank is in,
and reads where the others are. If one of them asks for something else, has refused, or has not come
within the timeout, it makes its rank's pending transfers fail (`release`). The others lose their
connection to this rank, and read the reason in the store. A call that ends in time never touches
the store. Afterwards the group is unusable, as after any failed collective in torch.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from math import inf
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from plait.errors import CollectiveError, PlaitError, RankError

PATIENCE = 1.0  # seconds that a call may last before the store is asked
TICK = 0.2  # seconds between two looks into the store
GRACE = PATIENCE + 2 * TICK  # seconds after which a rank that came in time has said so
HEARSAY = 2.0  # seconds for all ranks to say where they are, or why a transfer broke
_TAG = 2**30 - 7  # of a message that nobody sends


class Said(NamedTuple):
    """What a rank wrote: it is in call `number`, which asks for `what`; or why it is not."""

    number: int
    what: str
    error: str = ""
    kind: str = ""  # the error's class
    comparing: bool = False  # it exchanges headers, which every rank of the call takes part in
    broken: bool = False  # the rank's connections are closed, so that later calls fail as well


class Sentry:
    """One rank's sentry over a gloo group; every rank of the group has one."""

    def __init__(self, group: dist.ProcessGroup, store: Store) -> None:
        self._group = weakref.ref(group)
        self._store = PrefixStore("plait.collectives", store)
        self.rank, self.size = group.rank(), group.size()
        self._lock = threading.Lock()
        # number, what, since, timeout (None: the group's own)
        self._call: tuple[int, str, float, float | None] | None = None
        self._comparing = False
        self._said = (-1, False)  # the last call that was written into the store, and if comparing
        self._verdict: PlaitError | None = None
        wake = self._wake = threading.Event()
        threading.Thread(target=_watch, args=(weakref.ref(self), wake), daemon=True).start()
        weakref.finalize(self, wake.set)

    @contextlib.contextmanager
    def over(self, number: int, what: str, timeout: float | None) -> Iterator[None]:
        """Watch over a call; what breaks in it is raised as the reason why."""
        self._call = number, what, time.monotonic(), timeout
        self._wake.set()
        try:
            yield
        except PlaitError:
            raise
        except RuntimeError as error:  # what a broken transfer raises
            raise self._reason(number, what, error) from error
        finally:
            self._call = None

    @contextlib.contextmanager
    def comparing(self) -> Iterator[None]:
        """The ranks exchange what they ask for: a difference will be found by all, however late."""
        self._comparing = True
        try:
            yield
        finally:
            self._comparing = False

    def refuse(self, number: int, what: str, error: Exception) -> None:
        """This rank takes no part in the call, so that the others shall not wait for it."""
        self._say(Said(number, what, f"rank {self.rank}: {error}", type(error).__name__))

    def look(self) -> None:
        """Called by the thread, every TICK seconds while the rank is in a call."""
        call = self._call
        if call is None or self._verdict or time.monotonic() - call[2] < PATIENCE:
            return
        number, what, since, timeout = call
        comparing = self._comparing
        if self._said != (number, comparing):
            self._say(Said(number, what, comparing=comparing))
        limit = self._group_timeout() if timeout is None else timeout
        verdict = self._judge(number, what, time.monotonic() - since, limit)
        if verdict is not None and self._call is call:
            self._verdict = verdict
            self._break(number, what, verdict)

    def _group_timeout(self) -> float:
        group = self._group()
        if group is None:
            return inf
        options = group._get_backend(torch.device("cpu")).options
        return float(options._timeout.total_seconds())

    # --- what the store tells ---------------------------------------------------------------------

    def _judge(self, number: int, what: str, waited: float, timeout: float) -> PlaitError | None:
        said = self._heard()
        if told := _told(said, number):
            return told
        come = {rank: s for rank, s in said.items() if s.number == number}
        come[self.rank] = Said(number, what, comparing=self._comparing)
        here = {rank: s.what for rank, s in come.items()}
        patient = waited < PATIENCE + HEARSAY and len(here) < self.size
        compared = all(s.comparing for s in come.values())  # they will all see it, and live on
        if len(set(here.values())) > 1 and not patient and not compared:
            return CollectiveError(differing(number, here))
        if waited < timeout + GRACE:
            return None
        absent = [
            r for r in range(self.size) if r != self.rank and said.get(r, _NONE).number < number
        ]
        late = f"{_ranks(absent)} did not come" if absent else "all ranks came, but it did not end"
        return RankError(f"{what} (call {number} of the group): {late} within {timeout:g} s")

    def _reason(self, number: int, what: str, error: RuntimeError) -> PlaitError:
        """Why a transfer broke here: this sentry's own verdict, or another rank's."""
        end = time.monotonic() + HEARSAY
        reason: PlaitError | None = None
        while reason is None and time.monotonic() < end:
            reason = self._verdict or _told(self._heard(), number)
            time.sleep(0.0 if reason else 0.05)
        if reason is None:
            text = str(error).splitlines()[0]
            reason = RankError(f"{what} (call {number} of the group): a transfer broke: {text}")
        self._break(number, what, reason)
        return reason

    def _break(self, number: int, what: str, reason: PlaitError) -> None:
        """Say why, then close all connections, so that whoever waits for this rank hears of it."""
        self._say(Said(number, what, str(reason), type(reason).__name__, broken=True))
        group = self._group()
        if group is not None:
            release(group)

    def _say(self, said: Said) -> None:
        with self._lock, contextlib.suppress(RuntimeError):  # the store may be gone with its rank
            self._said = said.number, said.comparing
            self._store.set(str(self.rank), json.dumps(said))

    def _heard(self) -> dict[int, Said]:
        heard: dict[int, Said] = {}
        for rank in (r for r in range(self.size) if r != self.rank):
            with self._lock, contextlib.suppress(RuntimeError):
                if self._store.check([str(rank)]):
                    heard[rank] = Said(*json.loads(self._store.get(str(rank))))
        return heard


def release(group: dist.ProcessGroup) -> None:
    """Make all transfers that are pending in this process on a gloo group raise.

    A receive that times out makes gloo close all pairs of the group (`abort` does nothing there).
    It must be posted on a pair that is still open, so every peer is tried.
    """
    for step in range(1, group.size()):
        peer = (group.rank() + step) % group.size()
        with contextlib.suppress(RuntimeError):
            group.recv([torch.empty(1)], peer, _TAG).wait(timedelta(milliseconds=1))


def differing(number: int, asked: dict[int, str]) -> str:
    """The message when ranks ask for different things."""
    listed = "; ".join(f"rank {rank}: {what}" for rank, what in sorted(asked.items()))
    return f"the ranks ask for different collectives in call {number} of the group: {listed}"


def _told(said: dict[int, Said], number: int) -> PlaitError | None:
    """The error that another rank gives as the reason for this call's end."""
    for other in said.values():
        if other.error and (other.number == number or other.broken):
            return (CollectiveError if other.kind == "CollectiveError" else RankError)(other.error)
    return None


def _watch(sentry: weakref.ref[Sentry], wake: threading.Event) -> None:
    while True:
        wake.wait()
        here = sentry()
        if here is None:
            return
        if here._call is None:
            wake.clear()
            if here._call is not None:  # it began between the two lines
                wake.set()
        else:
            here.look()
        del here
        time.sleep(TICK)


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


_NONE = Said(-1, "")
