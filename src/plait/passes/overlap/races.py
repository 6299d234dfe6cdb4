"""Races: direct moves of all ranks against each other, with no machine; every fault is listed.

A trace is what one rank does, a line each, in the order in which the host does it:

    compute: mm ?r0:512 (r0:0-256, r0.3:0-64) -> r0.4:0-128 !r1:768
    compute: record e0
    pulls: wait e0

A step waits until its flags (?) are full and empties them, reads and writes spans of bytes, on whatever
rank they lie, and fills flags (!). A lane does its lines in order; between lanes there are events, and
between ranks only flags. As in check.py every step gets a clock, from which follows:

    of two steps that touch the same bytes, one of them writing, one is certainly over before the other begins
    a flag is filled only after whoever waited for it before has emptied it, so no signal is lost
    all lanes come to their end, and flags are then as they were at the beginning

The last makes two replays behind each other (`twice`) stand for any number.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from plait.errors import ScheduleError
from plait.passes.overlap.schedule import Record, Wait

Lane = tuple[int, str]  # (rank, lane)
Clock = dict[Lane, int]


@dataclass(frozen=True)
class Span:
    """Bytes first to last, exclusive, of one piece of memory."""

    memory: str
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.memory}:{self.first}-{self.last}"

    @classmethod
    def parse(cls, text: str) -> Span:
        found = re.fullmatch(r"(\S+):(\d+)-(\d+)", text)
        if found is None:
            raise ScheduleError(f"{text!r} is no span of bytes; one reads like r0:512-1024")
        return cls(found[1], int(found[2]), int(found[3]))

    def meets(self, other: Span) -> bool:
        return self.memory == other.memory and self.first < other.last and other.first < self.last


@dataclass(frozen=True)
class Step:
    stream: str
    name: str
    reads: tuple[Span, ...] = ()
    writes: tuple[Span, ...] = ()
    drains: tuple[str, ...] = ()
    fills: tuple[str, ...] = ()

    def __str__(self) -> str:
        waits, tells = [f"?{flag}" for flag in self.drains], [f"!{flag}" for flag in self.fills]
        reads, writes = (", ".join(map(str, spans)) for spans in (self.reads, self.writes))
        words = [f"{self.stream}: {self.name}", *waits, f"({reads})", "->", writes, *tells]
        return " ".join(word for word in words if word)


Item = Step | Record | Wait
Trace = tuple[Item, ...]
_LINE = re.compile(r"(\w+): (\S+) ((?:\?\S+ )*)\((.*)\) ->((?: [^!\s]\S*)*)((?: !\S+)*)")


def parse(text: str) -> Trace:
    return tuple(_parse(line) for line in text.splitlines())


def spell(trace: Trace) -> str:
    return "\n".join(map(str, trace))


def twice(trace: Trace) -> Trace:
    """Two replays, in the same memory and by the same flags."""
    again = [i if isinstance(i, Step) else replace(i, event=i.event + "'") for i in trace]
    return (*trace, *again)


def check(traces: Sequence[Trace], full: Collection[str] = ()) -> None:
    """ScheduleError with every fault of the traces of ranks 0, 1, ...; `full`: flags that begin full."""
    run = _Run(traces, {flag: {} for flag in full})
    faults = [*run.go(), *run.faults, *_races(run.done)]
    if not run.stuck and set(run.flags) != set(full):
        differ = ", ".join(sorted(set(run.flags) ^ set(full)))
        faults.append(f"flags are not as they were at the beginning: {differ}")
    if faults:
        raise ScheduleError("\n".join(faults))


@dataclass(frozen=True)
class _Done:
    step: Step
    lane: Lane
    index: int
    clock: Clock  # of every lane, the last line that is over when this step begins

    def after(self, other: _Done) -> bool:
        return self.clock.get(other.lane, -1) >= other.index

    def __str__(self) -> str:
        return f"rank {self.lane[0]} {self.lane[1]} {self.index} {self.step.name}"


@dataclass
class _Run:
    traces: Sequence[Trace]
    flags: dict[str, Clock]  # the full ones, with the clock of what filled them
    lines: dict[Lane, list[Item]] = field(default_factory=lambda: defaultdict(list))
    at: dict[Lane, int] = field(default_factory=lambda: defaultdict(int))
    now: dict[Lane, Clock] = field(default_factory=lambda: defaultdict(dict))
    events: dict[tuple[int, str], Clock] = field(default_factory=dict)
    emptied: dict[str, tuple[Lane, int]] = field(default_factory=dict)
    done: list[_Done] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    stuck: list[Lane] = field(default_factory=list)

    def go(self) -> list[str]:
        for rank, trace in enumerate(self.traces):
            for item in trace:
                self.lines[rank, item.stream].append(item)
        while any(self._advance(lane) for lane in self.lines):
            pass
        self.stuck = [lane for lane in self.lines if self.at[lane] < len(self.lines[lane])]
        heads = {lane: self.lines[lane][self.at[lane]] for lane in self.stuck}
        return [f"deadlock: rank {r} {name} stands at `{head}`" for (r, name), head in heads.items()]

    def _advance(self, lane: Lane) -> bool:
        at, now = self.at[lane], self.now[lane]
        if at == len(self.lines[lane]):
            return False
        match self.lines[lane][at]:
            case Wait(_, event):
                if (lane[0], event) not in self.events:
                    return False
                _join(now, self.events[lane[0], event])
                now[lane] = at
            case Record(_, event):
                now[lane] = at
                self.events[lane[0], event] = dict(now)
            case Step() as step:
                if not all(flag in self.flags for flag in step.drains):
                    return False
                self._step(step, lane, at)
        self.at[lane] += 1
        return True

    def _step(self, step: Step, lane: Lane, at: int) -> None:
        now = self.now[lane]
        for flag in step.drains:
            _join(now, self.flags.pop(flag))
            self.emptied[flag] = lane, at
        done = _Done(step, lane, at, dict(now))
        self.done.append(done)
        now[lane] = at
        for flag in step.fills:
            who, when = self.emptied.get(flag, (lane, -1))
            if flag in self.flags or now.get(who, -1) < when:
                self.faults.append(f"{done} may fill {flag} before it is emptied")
            self.flags[flag] = dict(now)


def _join(clock: Clock, other: Clock) -> None:
    for lane, index in other.items():
        clock[lane] = max(clock.get(lane, -1), index)


def _races(done: Sequence[_Done]) -> Iterator[str]:
    touched: dict[str, list[tuple[Span, bool, _Done]]] = defaultdict(list)
    for d in done:
        for spans, writes in ((d.step.reads, False), (d.step.writes, True)):
            for span in spans:
                touched[span.memory].append((span, writes, d))
    for accesses in touched.values():
        for (one, writes, first), (other, overwrites, then) in combinations(accesses, 2):
            apart = not one.meets(other) or not (writes or overwrites)
            if not apart and first is not then and not (then.after(first) or first.after(then)):
                yield f"nothing orders {first} and {then}, which touch {one} and {other}"


def _parse(line: str) -> Item:
    stream, _, rest = line.partition(": ")
    verb, _, event = rest.partition(" ")
    if verb in ("record", "wait"):
        return Record(stream, event) if verb == "record" else Wait(stream, event)
    found = _LINE.fullmatch(line)
    if found is None:
        raise ScheduleError(f"{line!r} is no line of a trace; one reads like `compute: mm ?f (r0:0-256) -> r1:0-9 !g`")
    _, name, drains, reads, writes, fills = found.groups()
    return Step(
        stream, name, _spans(reads), _spans(writes),
        tuple(f[1:] for f in drains.split()), tuple(f[1:] for f in fills.split()),
    )  # fmt: skip


def _spans(text: str) -> tuple[Span, ...]:
    return tuple(Span.parse(word.strip()) for word in text.split(",") if word.strip())
