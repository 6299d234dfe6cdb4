"""Check: the schedules of all ranks, run against each other without a machine; every fault is listed.

Streams advance in order; a wait needs its event, a collective needs every rank of its group at the
same one, a receive needs its send. What cannot advance any more is a deadlock. Each line gets a
clock, for every stream of every rank the last line that is certain to be over before it (vector
clocks; Lamport, Fidge, Mattern), and from the clocks follows:

    every launch, value and event is one of its kind, and a wait is begun by the host after its record: a stream
        that is told to wait for an event that nothing has recorded yet goes on
    a reader comes after the one that wrote its value
    a slot is written only after all readers of what lies in it, of views too
    any two ranks do the collectives that they share in one order, whatever the streams do; and ranks of one
        group send and receive at the same places between these
    what is sent is received, once
    every collective is over when its rank's compute ends: nothing is left open

The last makes programs that follow one another right if each of them is alone, in whatever order,
if only it is the same on all ranks: when one begins no collective of another is on its way, so the
order on the group is that of the programs, and no slot is still read. So it is with the actions of
a pipeline, of which each runs one stage's program forward or back; `closed` asks it of a stage. What
all ranks do in all actions, messages included, is written by places.py and checked here: that it comes
to its end is that one order of all collectives and messages, of all groups, is the order of every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from torch import fx

from plait.errors import ScheduleError
from plait.passes.overlap.schedule import (
    COMPUTE,
    SEND,
    Launch,
    Record,
    Schedule,
    Wait,
    slot,
    views_of,
)

Stream = tuple[int, str]  # (rank, stream)
Clock = dict[Stream, int]


def check(schedules: Sequence[Schedule]) -> None:
    """ScheduleError with every fault of the schedules of ranks 0, 1, ...; None if there is none."""
    faults = [fault for rank, schedule in enumerate(schedules) for fault in _malformed(rank, schedule)]
    if faults:
        raise ScheduleError("\n".join(faults))
    run = _Run(schedules)
    faults = run.go()
    for rank, schedule in enumerate(schedules):
        faults += _values(rank, schedule, run)
        faults += _unordered(rank, run)
        faults += _open(rank, run)
    faults += _orders(run)
    faults += [f"rank {a}: {name} is sent to rank {b}, and not received" for a, b, name in run.underway]
    if faults:
        raise ScheduleError("\n".join(faults))


def _malformed(rank: int, schedule: Schedule) -> Iterator[str]:
    """What no run of the streams can mend."""
    launches = schedule.launches
    written = Counter(value for x in launches for value in x.writes)
    several = [f"launches of {name}" for name, count in Counter(x.key for x in launches).items() if count > 1]
    several += [f"writers of {value}" for value, count in written.items() if count > 1]
    recorded = set[str]()
    for item in schedule.items:
        if isinstance(item, Record):
            several += [f"records of {item.event}"] * (item.event in recorded)
            recorded.add(item.event)
        elif isinstance(item, Wait) and item.event not in recorded:
            yield f"rank {rank}: `{item}` is begun before anything recorded {item.event}"
    for what in several:
        yield f"rank {rank}: there are several {what}"
    for value in sorted(written.keys() & schedule.given):
        yield f"rank {rank}: {value} is given, and written too"
    for x in launches:
        if x.message and len(x.ranks) != 1:
            yield f"rank {rank}: `{x}` has {len(x.ranks)} ranks at its other end; a message has one"
        elif x.collective and not x.message and rank not in x.ranks:
            yield f"rank {rank}: `{x}` is a collective of other ranks"


@dataclass
class _Run:
    """Lines by stream, how far each stream came, and the clock of every line that was reached."""

    schedules: Sequence[Schedule]
    lines: dict[Stream, list[object]] = field(default_factory=dict)
    at: dict[Stream, int] = field(default_factory=dict)
    clocks: dict[tuple[int, str], tuple[Stream, int, Clock]] = field(default_factory=dict)
    events: dict[tuple[int, str], Clock] = field(default_factory=dict)
    now: dict[Stream, Clock] = field(default_factory=dict)
    done: dict[int, list[str]] = field(default_factory=dict)  # collectives by rank, in order of launch
    sent: dict[tuple[int, int, str], list[Clock]] = field(default_factory=dict)  # (from, to, name), on their way

    def __post_init__(self) -> None:
        for rank, schedule in enumerate(self.schedules):
            self.done[rank] = []
            for name in schedule.streams:
                stream = (rank, name)
                self.lines[stream] = [i for i in schedule.items if i.stream == name]
                self.at[stream], self.now[stream] = 0, {}

    def go(self) -> list[str]:
        while any(self._advance(stream) for stream in self.lines):
            pass
        stuck = [s for s in self.lines if self.at[s] < len(self.lines[s])]
        return [f"deadlock: rank {r} {name} stands at `{self._head((r, name))}`" for r, name in stuck]

    def _head(self, stream: Stream) -> object | None:
        lines = self.lines[stream]
        return lines[self.at[stream]] if self.at[stream] < len(lines) else None

    def _advance(self, stream: Stream) -> bool:
        line, rank = self._head(stream), stream[0]
        match line:
            case None:
                return False
            case Record(_, event):
                self._tick(stream)
                self.events[rank, event] = dict(self.now[stream])
            case Wait(_, event):
                if (rank, event) not in self.events:
                    return False
                _join(self.now[stream], self.events[rank, event])
                self._tick(stream)
            case Launch() if line.message:
                return self._message(stream, line)
            case Launch() if line.collective:
                return self._meet(line)
            case Launch():
                self._launch(stream, line)
        return True

    def _launch(self, stream: Stream, line: Launch) -> None:
        self._tick(stream)
        self.clocks[stream[0], line.key] = stream, self.at[stream] - 1, dict(self.now[stream])

    def _message(self, stream: Stream, line: Launch) -> bool:
        """A send waits for nothing, a receive for its send."""
        rank, (other,) = stream[0], line.ranks
        if line.collective == SEND:
            self._launch(stream, line)
            self.sent.setdefault((rank, other, line.name), []).append(dict(self.now[stream]))
            return True
        waiting = self.sent.get((other, rank, line.name))
        if not waiting:
            return False
        _join(self.now[stream], waiting.pop(0))
        self._launch(stream, line)
        return True

    @property
    def underway(self) -> list[tuple[int, int, str]]:
        """What was sent and is not received at the end."""
        return [key for key, clocks in self.sent.items() for _ in clocks]

    def _meet(self, line: Launch) -> bool:
        """A collective runs once all its ranks have come to it."""
        there = {s: self._head(s) for s in self.lines if s[0] in line.ranks}
        met = {
            s for s, head in there.items()
            if isinstance(head, Launch)
            and (head.name, head.collective, head.ranks) == (line.name, line.collective, line.ranks)
        }  # fmt: skip
        if {rank for rank, _ in met} != set(line.ranks):
            return False
        joined: Clock = {}
        for stream in met:
            _join(joined, self.now[stream])
        for stream in met:
            _join(self.now[stream], joined)
            self._tick(stream)
            self.done[stream[0]].append(line.name)
            self.clocks[stream[0], line.name] = stream, self.at[stream] - 1, dict(self.now[stream])
        return True

    def _tick(self, stream: Stream) -> None:
        self.now[stream][stream] = self.at[stream]
        self.at[stream] += 1

    def before(self, rank: int, first: str, then: str) -> bool:
        """Whether launch `first` is certainly over when launch `then` of the same rank begins."""
        if (rank, first) not in self.clocks or (rank, then) not in self.clocks:
            return True  # one of them is in a deadlock, which is told
        stream, index, _ = self.clocks[rank, first]
        _, _, clock = self.clocks[rank, then]
        return clock.get(stream, -1) >= index and first != then


def _join(clock: Clock, other: Clock) -> None:
    for stream, index in other.items():
        clock[stream] = max(clock.get(stream, -1), index)


def _values(rank: int, schedule: Schedule, run: _Run) -> list[str]:
    """Readers after writers, and slots free before they are written again."""
    writer = {value: launch.key for launch in schedule.launches for value in launch.writes}
    readers: dict[str, list[str]] = {value: [] for value in writer}
    views = {value: of for launch in schedule.launches if (of := views_of(launch)) for value in launch.writes}
    faults = []
    for launch in schedule.launches:
        for value in launch.reads:
            if value in schedule.given:
                continue
            if value not in writer:
                faults.append(f"rank {rank}: {launch.key} reads {value}, which nobody writes")
            elif not run.before(rank, writer[value], launch.key):
                faults.append(f"rank {rank}: {launch.key} may read {value} before {writer[value]} wrote it")
            else:
                readers[value].append(launch.key)
    for value, of in reversed(views.items()):  # views of views first
        for seen in of:
            readers.get(seen, []).extend(readers[value])
    latest: dict[str, str] = {}
    for value in writer:
        where = None if value in views else slot(value)
        if where is None:
            continue
        old = latest.get(where)
        users = [writer[old], *readers[old]] if old is not None else []
        faults += [
            f"rank {rank}: {writer[value]} writes {where} while {user} may still use {old} in it"
            for user in dict.fromkeys(users)
            if not run.before(rank, user, writer[value])
        ]
        latest[where] = value
    return faults


def _unordered(rank: int, run: _Run) -> list[str]:
    """Collectives of one rank that may run in either order."""
    names = run.done[rank]
    return [
        f"rank {rank}: nothing orders {a} and {b}"
        for a, b in zip(names, names[1:], strict=False)
        if not run.before(rank, a, b)
    ]


def _open(rank: int, run: _Run) -> list[str]:
    """Collectives of one rank that may be on their way when its compute has come to its end."""
    end = run.now.get((rank, COMPUTE), {})
    own = {name: run.clocks[rank, name][:2] for name in run.done[rank]}
    return [
        f"rank {rank}: {name} is left open at the end"
        for name, (stream, index) in own.items()
        if end.get(stream, -1) < index
    ]


def closed(graph: fx.Graph, name: str) -> None:
    """ScheduleError unless every move that is started in the graph is waited for in it.

    So it is on the way back, where a wait starts the dual move and the start waits for it.
    """
    started: set[str] = set()
    faults = []
    for node in graph.nodes:
        site, _, half = str(node.target).partition(".")
        if node.op == "call_module" and half == "start":
            started.add(site)
        elif node.op == "call_module" and half == "wait":
            faults += [f"{name}: {site} is waited for, and started elsewhere"] * (site not in started)
            started.discard(site)
    faults += [f"{name}: {site} is left open at the end" for site in sorted(started)]
    if faults:
        raise ScheduleError("\n".join(faults))


def _orders(run: _Run) -> list[str]:
    """The order as written, of any two ranks in what they share, and in their messages between that: a transport may
    match by order alone."""
    written = [[x for x in s.launches if x.collective] for s in run.schedules]
    out = []
    for (one, a), (other, b) in combinations(enumerate(written), 2):
        if not any(other in x.ranks and not x.message for x in a):
            a, b = ([x for x in each if not x.message] for each in (a, b))
        first = [x.key for x in a if x.message or other in x.ranks]
        names = [x.key for x in b if x.message or one in x.ranks]
        if names != first:
            differ = (i for i, (x, y) in enumerate(zip(names, first, strict=False)) if x != y)
            i = next(differ, min(len(names), len(first)))
            mine = names[i] if i < len(names) else "nothing"
            theirs = first[i] if i < len(first) else "nothing"
            out.append(f"collective {i} is {mine} on rank {other} and {theirs} on rank {one}")
    return out
