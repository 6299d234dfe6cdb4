"""A timeline: what ran where, from when to when; and tasks on lanes, which make one.

One line an event, which parses back; seconds first, then the lane, then what it was:

    0.000000e+00 1.250000e-05 nvlink 0 out | step 0: 0 -> 1 chunk 3 add
    1.250000e-05 2.500000e-05 compute | down_proj rows 0:2048

A lane (a stream, a device, a port) runs its tasks one at a time in the order given; a task starts
when its lane is free and all that it is `after` has ended. While tasks run on two lanes at once,
one may slow the other: `play(tasks, slow={("compute", "comm"): 1.15})` is a matmul that loses
multiprocessors to a collective.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from plait.errors import InputError


@dataclass(frozen=True)
class Event:
    begin: float
    end: float
    lane: str
    name: str

    def __str__(self) -> str:
        return f"{self.begin:.6e} {self.end:.6e} {self.lane} | {self.name}"

    @staticmethod
    def parse(line: str) -> Event:
        times, bar, name = line.partition(" | ")
        try:
            begin, end, lane = times.split(" ", 2)
            if not bar:
                raise ValueError("no bar")
            return Event(float(begin), float(end), lane, name)
        except ValueError:
            raise InputError(f"{line!r} is no event; it reads `begin end lane | name`") from None


@dataclass(frozen=True)
class Timeline:
    """Events in order of their begin; `end` may be later than the last event."""

    events: tuple[Event, ...]
    end: float

    def __str__(self) -> str:
        return "\n".join([f"end {self.end:.6e}", *map(str, self.events)])

    @staticmethod
    def parse(text: str) -> Timeline:
        first, *lines = text.strip().splitlines() or [""]
        word, _, end = first.partition(" ")
        try:
            if word != "end":
                raise ValueError("no end")
            seconds = float(end)
        except ValueError:
            raise InputError(f"a timeline begins with `end seconds`, not with {first!r}") from None
        return Timeline(tuple(map(Event.parse, lines)), seconds)

    @cached_property
    def lanes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(event.lane for event in self.events))

    def on(self, lane: str) -> tuple[Event, ...]:
        return tuple(event for event in self.events if event.lane == lane)

    def busy(self, *lanes: str) -> float:
        """Seconds in which at least one of the lanes runs something."""
        return _length(_union((e.begin, e.end) for e in self.events if e.lane in lanes))

    def gantt(self, width: int = 96) -> str:
        """A row a lane, time from left to right; an event's name where there is room for it."""
        scale = width / self.end if self.end > 0 else 0.0
        label = max(map(len, self.lanes), default=0)
        rows = []
        for lane in self.lanes:
            row = ["."] * width
            for e in self.on(lane):
                lo = min(width - 1, round(e.begin * scale))
                hi = max(lo + 1, round(e.end * scale))
                text = e.name if len(e.name) < hi - lo else ""
                row[lo:hi] = text.ljust(hi - lo, "=")[: width - lo]
            rows.append(f"{lane:>{label}} |{''.join(row)}|")
        return "\n".join([*rows, f"{'':>{label}}  0{f'{self.end * 1e3:.3f} ms':>{width - 1}}"])

    def exposed(self, lane: str, under: Sequence[str]) -> float:
        """Seconds in which the lane runs and none of `under` does: transfers that nothing hides."""
        return self.busy(lane, *under) - self.busy(*under)

    def utilisation(self, lane: str) -> float:
        return self.busy(lane) / self.end if self.end else 0.0


@dataclass(frozen=True)
class Task:
    name: str
    lane: str
    seconds: float
    after: tuple[str, ...] = ()  # names of tasks that must have ended


def play(tasks: Sequence[Task], slow: Mapping[tuple[str, str], float] | None = None) -> Timeline:
    """Run the tasks; `slow[a, b]`: how many times longer lane a takes while lane b is busy."""
    _check(tasks)
    queues: dict[str, deque[Task]] = defaultdict(deque)
    for task in tasks:
        queues[task.lane].append(task)
    done: set[str] = set()
    running: dict[str, _Running] = {}
    events: list[Event] = []
    now = 0.0
    while any(queues.values()) or running:
        for lane, queue in queues.items():
            if lane not in running and queue and done.issuperset(queue[0].after):
                task = queue.popleft()
                running[lane] = _Running(task, now, task.seconds)
        if not running:
            waiting = ", ".join(
                f"{q[0].name} after {', '.join(q[0].after)}" for q in queues.values() if q
            )
            raise InputError(f"tasks wait for each other: {waiting}")
        rates = {lane: 1.0 / _slowdown(lane, running, slow or {}) for lane in running}
        step = min(run.left / rates[lane] for lane, run in running.items())
        now += step
        for lane, run in list(running.items()):
            run.left -= step * rates[lane]
            if run.left <= 1e-12 * max(run.task.seconds, 1e-9):
                events.append(Event(run.begin, now, lane, run.task.name))
                done.add(run.task.name)
                del running[lane]
    return Timeline(tuple(sorted(events, key=lambda e: (e.begin, e.end))), now)


@dataclass
class _Running:
    task: Task
    begin: float
    left: float  # seconds of work at full speed


def _slowdown(lane: str, running: Iterable[str], slow: Mapping[tuple[str, str], float]) -> float:
    factor = 1.0
    for other in running:
        factor *= slow.get((lane, other), 1.0)
    return factor


def _check(tasks: Sequence[Task]) -> None:
    names = [task.name for task in tasks]
    twice = (
        sorted({name for name in names if names.count(name) > 1})
        if len(set(names)) < len(names)
        else []
    )
    unknown = sorted({name for task in tasks for name in task.after} - set(names))
    negative = sorted(task.name for task in tasks if not task.seconds >= 0)
    wrong = [
        f"{what}: {', '.join(which)}"
        for what, which in (
            ("named twice", twice),
            ("waited for but not there", unknown),
            ("of negative length", negative),
        )
        if which
    ]
    if wrong:
        raise InputError("tasks that cannot be played: " + "; ".join(wrong))


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in spans)
