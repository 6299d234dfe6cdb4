"""The watch over a group: when a rank fails, every other one raises `RankError`, naming it.

    watch = Watch(group)                    # on all ranks of the group
    with watch.guard("forward"): ...        # work with collectives; an error of one rank ends the group
    with watch.step("load weights"): ...    # local work: all succeed, or all raise and live on
    watch.exchange("plan", digest)          # [the value of each rank], over the side channel

A rank that hangs in a collective cannot be told anything, so its collective is made to fail: see
`release`. No collective is wrapped, so a watched group is as fast as another.
docs/failures.md tells the whole story.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import secrets
import sys
import threading
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable

from plait.errors import RankError
from plait.runtime.line import ENDING, Door, Failure, Line, Member, open_hub, open_member

log = logging.getLogger("plait")

HEARSAY = 2.0  # seconds to hear which rank is behind an error that a collective raised here
RELEASE = 5.0  # seconds for `release` to be done before the main thread goes on
UNSAID = 2.0  # seconds for an exception of a backward pass to end the program
ALONE = 5.0  # seconds for a backward pass that others have not begun, and now cannot, to end by itself
LAST = 15.0  # seconds that a device kernel may wait for a failed rank before the process exits
_TAG = 2**30 + 7  # of a message that nobody sends


class Watch:
    """One rank's part in the watch; made by all ranks of `group` at the same point.

    `device`: where the group's collectives wait. On a CPU they are released; a device's kernels
    may not be, so there the process exits, non-zero, `LAST` seconds after a failure.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, device: str = "cpu") -> None:
        self._group = group if group is not None else dist.group.WORLD
        assert self._group is not None, "a watch needs a process group"
        self.rank, self.size = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._round = 0
        self._task = -1  # the backward pass that was seen last
        self._pass: weakref.ref[_Pass] | None = None
        self._passes = 0  # that came back through outputs: as many on every rank between two meetings
        self._stumbles = 0
        self.place: object = None  # spells how far this rank has come, where all ranks do the same
        self._line = _connect(self._group)
        self._releaser = _Releaser(self._line, device)
        self.covers(self._group)
        self._line.on_come = self._overtaken
        self._line.start()
        self._end = weakref.finalize(self, self._line.close)
        self._end.atexit = False
        atexit.register(_at_exit, weakref.ref(self._line))

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.report_failure(error)
        self.stop()

    def covers(self, *groups: dist.ProcessGroup) -> None:
        """Collectives of these groups (parts of the watched one) are released too."""
        self._releaser.groups.extend(weakref.ref(g) for g in groups)

    def stop(self) -> None:
        """This rank's goodbye: what it does from now on is no failure."""
        self._end()

    def report_failure(self, error: BaseException) -> None:
        """Tell the others that this rank has failed; the first report of all counts."""
        text = f"failed: {type(error).__name__}: {error}"
        self._releaser.raised.set()
        self._line.say("failed", text=self._line.name(self.rank, text))

    def report_stumble(self, error: Exception) -> None:
        """As `report_failure`, of an error that is none where every rank meets it at this place."""
        self._releaser.raised.set()
        self._stumble(self._here(error), f"failed: {type(error).__name__}: {error}")

    def _stumble(self, at: str, text: str) -> None:
        text = self._line.name(self.rank, text)
        self._line.say("stumbled", at=at, text=text) if at else self._line.say("failed", text=text)

    def _here(self, error: object) -> str:
        """Equal on all ranks that have met the same; "" where it cannot be."""
        if self.place is None:
            return ""
        self._stumbles += 1
        return f"{self._stumbles} {self._round} {self.place} {type(error).__name__}: {error}"

    def check(self, what: str = "") -> None:
        """Raise RankError if a rank has failed."""
        if self._line.failure is not None:
            raise self._releaser.error(self._line.failure, what)
        self._releaser.raised.clear()

    @contextlib.contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Work in which ranks wait for each other; an exception of one rank ends the group's work.

        The exception is this rank's own fault and told to the others, or follows from another's
        (a collective that broke) and becomes a RankError that names it. Where all ranks raise the
        same at the same place, nobody waits for anybody, and the group lives on.
        """
        self.check(what)
        try:
            yield
        except RankError as error:
            cause = self._behind(error)
            if cause is None:
                raise
            raise self._releaser.error(cause, what) from error
        except RuntimeError as error:  # what collectives raise, among much else
            cause = self._cause()
            if cause is not None:
                raise self._releaser.error(cause, what) from error
            self.report_stumble(error)
            raise
        except Exception as error:
            self.report_stumble(error)
            raise
        except BaseException as error:
            self.report_failure(error)
            raise

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """A guard within autograd's engine."""
        self.enter()
        try:
            with self.guard("backward"):
                yield
        except BaseException:
            now = self._pass() if self._pass is not None else None
            if now is not None:
                now.failed = False  # it is told
            raise

    def enter(self, counted: bool = False) -> None:
        """Called in a backward pass: from now on the others are told if the pass does not end.

        `counted`: all ranks begin such a pass.
        """
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self._passes += counted
            now = _Pass(self)
            self._pass = weakref.ref(now)
            Variable._execution_engine.queue_callback(now)  # type: ignore[no-untyped-call]
            self._overtaken()

    def _overtaken(self) -> None:
        """Look again in a while where a backward pass runs here that a rank at the next meeting has not begun."""
        if self._pass is not None and (now := self._pass()) is not None and self._behind_us():
            late = threading.Timer(ALONE, self._still_alone, (weakref.ref(now), self._round))
            late.daemon = True
            late.start()

    def _still_alone(self, then: weakref.ref[_Pass], number: int) -> None:
        behind = self._behind_us()
        if then() is None or self._round != number or not behind or self._line.failure is not None:
            return
        others = ", ".join(f"rank {rank} is at {json.dumps(what)}" for rank, what in behind.items())
        self._line.say("failed", text=(
            f"rank {self.rank} is in a backward pass that others have not begun: {others}. All ranks call "
            "backward, once per forward"
        ))  # fmt: skip

    def _behind_us(self) -> dict[int, str]:
        """Ranks that wait at the next meeting after fewer backward passes than were begun here."""
        come = self._line.rounds.get(self._round, {})
        return {r: m["what"] for r, m in sorted(come.items()) if m["passes"] < self._passes}

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Local work, without collectives, that succeeds on all ranks or raises on all."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        except BaseException as raised:
            self.report_failure(raised)
            raise
        told = None if error is None else f"failed: {type(error).__name__}: {error}"
        outcomes = self.exchange(what, told)
        if error is not None:
            raise error
        failed = [self._line.name(r, text) for r, text in enumerate(outcomes) if text is not None]
        if failed:
            raise RankError(f"{what}: " + "; ".join(failed))

    def exchange(self, what: str, value: Any = None, timeout: float | None = None) -> list[Any]:
        """The JSON values that all ranks brought to the same meeting, in order of rank.

        Raises RankError when a rank fails or leaves, when ranks are at different meetings, and,
        with a timeout, when ranks do not come; it names them.
        """
        self.check(what)
        line, number = self._line, self._round
        self._round += 1
        line.say("come", round=number, what=what, value=value, passes=self._passes)
        with line.changed:
            come = line.rounds[number]
            in_time = line.changed.wait_for(
                lambda: line.failure or len(come) == self.size or line.left - come.keys(), timeout
            )
            absent = [r for r in range(self.size) if r not in come]
            left = sorted(line.left - come.keys())
            line.rounds.pop(number) if not absent else None
        if not absent:
            return self._agreed(come)
        if line.ending.intersection(left):  # its exit status may still come
            self._hearsay()
        self.check(what)
        if in_time:
            raise RankError(f"{what}: {_ranks(left)} ended before coming to it")
        text = f"{_ranks(absent)} did not come to it within {timeout:g} s"
        line.say("failed", text=text)
        raise RankError(f"{what}: {text}")

    def _agreed(self, come: dict[int, dict[str, Any]]) -> list[Any]:
        places = {rank: come[rank]["what"] for rank in range(self.size)}
        if len(set(places.values())) > 1:
            at = ", ".join(f"rank {rank} at {json.dumps(w)}" for rank, w in places.items())
            raise RankError(f"the ranks are not at the same point: {at}")
        return [come[rank]["value"] for rank in range(self.size)]

    def _cause(self) -> Failure | None:
        """The failure of another rank behind an error here; waits a little to hear of it."""
        line = self._line
        self._hearsay()
        with line.changed:  # a process that ends closes its connections before its status is known
            line.changed.wait_for(lambda: line.failure or line.ending <= line.gone, ENDING + 1)
        if line.failure is not None or not line.left:
            return line.failure
        rank = min(line.left)
        return Failure(rank, line.name(rank, "ended while others worked"))

    def _behind(self, error: RankError) -> Failure | None:
        """The failure of a rank behind a broken collective whose own words do not name it."""
        if error.__cause__ is None:  # not of a collective
            return None
        cause = self._cause()
        return None if cause is None or cause.text in str(error) else cause

    def _hearsay(self) -> None:
        """Wait a little for the news of a failure."""
        with self._line.changed:
            self._line.changed.wait_for(lambda: self._line.failure, HEARSAY)


class _Pass:
    """One backward pass on this rank. The engine calls it at the end, and drops it otherwise.

    What was raised is then on its way to the caller, out of our sight: a hook's error, say. If the
    caller does not catch it, the process tells it as it ends; if it does, all that can be told
    is that there was one, and where.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch, self.failed = watch, True

    def __call__(self) -> None:
        self.failed = False

    def __del__(self) -> None:
        if self.failed and self.watch._line.failure is None:
            at = self.watch._here(None)
            timer = threading.Timer(UNSAID, self.watch._stumble, (at, CAUGHT))
            timer.daemon = True
            timer.start()


CAUGHT = "failed: its backward pass raised an exception, which its program caught"


class _Releaser:
    """Acts on a failure, in whichever thread hears of it."""

    def __init__(self, line: Line, device: str) -> None:
        self.rank, self.device = line.rank, device
        self.groups: list[weakref.ref[dist.ProcessGroup]] = []
        self.raised = threading.Event()  # the main thread knows
        self.released = threading.Event()
        line.on_failure = self

    def __call__(self, failure: Failure) -> None:
        if failure.rank != self.rank:
            log.error("%s", failure.text)
        for group in [ref() for ref in self.groups]:
            if group is not None:
                release(group)
        self.released.set()
        if self.device != "cpu":
            threading.Thread(target=self._last_resort, args=(failure,), daemon=True).start()

    def error(self, failure: Failure, what: str = "") -> RankError:
        # A thread inside a collective's code must not be alive when the interpreter ends.
        self.released.wait(RELEASE)
        self.raised.set()
        return RankError(f"{what}: {failure.text}" if what else failure.text)

    def _last_resort(self, failure: Failure) -> None:
        if not self.raised.wait(LAST):
            print(f"rank {self.rank} waits on a device for a rank that failed: {failure.text}",
                  file=sys.stderr, flush=True)  # fmt: skip
            os._exit(1)


def release(group: dist.ProcessGroup) -> None:
    """Make the collectives that are pending on `group` raise, in whichever thread they wait.

    gloo: a receive that times out makes gloo close all pairs of its context, and every operation
    on them raises ("Application timeout caused pair closure"); `abort` does nothing there.
    Other backends: `abort`.
    """
    try:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
    except ValueError:  # it is destroyed already
        return
    for step in range(1, size):  # it cannot be posted on a pair that is closed, so try every peer
        with contextlib.suppress(Exception):  # the time-out, or no CPU backend, or closed already
            group.recv([torch.empty(1)], (rank + step) % size, _TAG).wait(timedelta(milliseconds=1))
    with contextlib.suppress(Exception):
        group.abort()


def _connect(group: dist.ProcessGroup) -> Line:
    """Rank 0 opens a door and tells the others where, over the group itself."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    members: list[Any] = [None] * size
    try:
        dist.all_gather_object(members, Member.me(rank), group=group)
    except RuntimeError as error:
        raise RankError(f"the process group does not work: {error}. {_AGAIN}") from error
    everybody = tuple(members)
    if rank == 0:
        door = Door(len({m.place for m in everybody}) == 1, secrets.token_hex(16))
        told: list[Any] = [(door.addresses(os.environ.get("MASTER_ADDR")), door.token)]
        dist.broadcast_object_list(told, group=group, group_src=0)
        return open_hub(everybody, door)
    told = [None]
    dist.broadcast_object_list(told, group=group, group_src=0)
    addresses, token = told[0]
    return open_member(everybody, rank, addresses, token)


_AGAIN = "Once a rank has failed its group is of no use: make another group, or start the processes again"


def _at_exit(ref: weakref.ref[Line]) -> None:
    """A process that ends without a goodbye; an uncaught exception is told to the others."""
    line = ref()
    if line is not None:
        error = getattr(sys, "last_value", None)
        if error is not None and not hasattr(sys, "ps1"):
            text = f"failed: {type(error).__name__}: {error}"
            line.say("failed", text=line.name(line.rank, text))
        line.close(ending=True)


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
