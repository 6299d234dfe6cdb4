"""Schedule: what one rank launches, on which stream and in what order, as lines that parse back.

    compute: linear_3(take_rows, p_w) -> linear_3
    compute: record e0
    comm: wait e0
    comm: move_2_c0 = all_reduce[0-7](linear_3) -> s0:move_2_c0
    comm: record e1
    compute: wait e1
    compute: join_rows(s0:move_2_c0, ...) -> join_rows
    compute: add_4:0:1F2 = send[8](add_4) ->

A stream runs its lines in order; between streams only events order anything. A value in `s0:` lies in
slot 0 of the buffers that transfers write, which are used again as soon as the program allows; what compute makes of
it in the same slot is a view (`s0+s2:` may be one of either). The proof that nobody still reads a slot is check.py's,
not this module's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx

from plait.errors import ScheduleError
from plait.passes.partition import Local, Site

COMPUTE, COMM = "compute", "comm"


SEND, RECEIVE = "send", "receive"


@dataclass(frozen=True)
class Launch:
    """`collective`: done by `ranks` together, each with its own launch of the same name; or SEND to, RECEIVE from the
    one rank of `ranks`. A send waits for nothing, and what it reads is its own until it is received."""

    stream: str
    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    collective: str = ""
    ranks: tuple[int, ...] = ()

    @property
    def message(self) -> bool:
        return self.collective in (SEND, RECEIVE)

    @property
    def key(self) -> str:
        """Of a rank's launches its own: a stage may send to one of the same rank."""
        return f"{self.collective} {self.name}" if self.message else self.name

    def __str__(self) -> str:
        what = self.name
        if self.collective:
            what = f"{self.name} = {self.collective}[{','.join(map(str, self.ranks))}]"
        return f"{self.stream}: {what}({', '.join(self.reads)}) -> {', '.join(self.writes)}"


@dataclass(frozen=True)
class Record:
    stream: str
    event: str

    def __str__(self) -> str:
        return f"{self.stream}: record {self.event}"


@dataclass(frozen=True)
class Wait:
    stream: str
    event: str

    def __str__(self) -> str:
        return f"{self.stream}: wait {self.event}"


Item = Launch | Record | Wait


@dataclass(frozen=True)
class Schedule:
    """Of one rank; `given`: values that are there before the first line (weights, inputs, tables)."""

    items: tuple[Item, ...]
    given: frozenset[str] = frozenset()

    @property
    def launches(self) -> list[Launch]:
        return [i for i in self.items if isinstance(i, Launch)]

    @property
    def streams(self) -> list[str]:
        return list(dict.fromkeys(i.stream for i in self.items))

    def __str__(self) -> str:
        return "\n".join([f"given: {', '.join(sorted(self.given))}", *map(str, self.items)])

    @classmethod
    def parse(cls, text: str) -> Schedule:
        first, *lines = text.splitlines() or [""]
        given = frozenset(_names(first.removeprefix("given:")))
        return cls(tuple(_parse(line) for line in lines if line.strip()), given)

    def twice(self) -> Schedule:
        """Two replays of a captured program, one behind the other, in the same slots."""
        return self.then(self, "'")

    def then(self, other: Schedule, mark: str) -> Schedule:
        """`other` behind this one, in the same slots; `mark` tells its names from those here."""
        later = (_marked(item, other.given, mark) for item in other.items)
        return Schedule((*self.items, *later), self.given | other.given)


def slot(value: str) -> str | None:
    """The buffer in which a value lies, if it is one that is used again: several for a view of one of them."""
    found = re.fullmatch(r"(s\d+(?:\+s\d+)*):.*", value)
    return found[1] if found else None


def slots(value: str) -> list[str]:
    """The same, each by itself."""
    where = slot(value)
    return where.split("+") if where else []


def views_of(launch: Launch) -> list[str]:
    """The values that what it writes is a view of, or may be: those that lie in its slot."""
    if launch.collective or not launch.writes:
        return []
    there = set(slots(launch.writes[0]))
    return [value for value in launch.reads if there.intersection(slots(value))]


def schedule(local: Local, n: int, first: int = 0) -> Schedule:
    """What a woven program launches on its rank, of n from `first` on."""
    return _Writer(local, tuple(range(first, first + n))).write()


def message(kind: str, rank: int, name: str, *reads: object) -> object:
    """In a graph: what is sent to a rank, or received from it."""
    raise AssertionError("it stands for a message, and is not run")


class _Writer:
    def __init__(self, local: Local, ranks: tuple[int, ...]) -> None:
        self.local, self.ranks = local, ranks
        self.items: list[Item] = []
        self.names: dict[fx.Node, str] = {}
        self.events = 0
        self.arrivals: dict[str, str] = {}  # site -> event of its arrival
        self.free: list[int] = []
        self.slots = 0
        self.held: dict[int, list[int]] = {}  # position of the last reader -> slots free behind it
        self.at = {node: i for i, node in enumerate(local.graph.nodes)}

    def write(self) -> Schedule:
        given = set()
        for node in self.local.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.names[node] = node.name
                given.add(node.name)
            elif node.op == "call_module":
                self._module(node)
            elif node.target is message:
                self._message(node, *node.args[:3])
            elif node.op == "call_function":
                self._launch(COMPUTE, node, node.name, "")
            self.free += self.held.pop(self.at[node], [])
        return Schedule(tuple(self.items), frozenset(given))

    def _module(self, node: fx.Node) -> None:
        """A move or half of one; or work between the halves (`move_3.pay`), which hands what moves on unread."""
        name, _, half = str(node.target).partition(".")
        if name not in self.local.sites:
            self._launch(COMPUTE, node, node.name, "")
        elif half in ("", "start", "wait"):
            self._move(node)
        else:
            self.names[node] = self.names[node.all_input_nodes[0]]

    def _move(self, node: fx.Node) -> None:
        name, _, half = str(node.target).partition(".")
        site = self.local.sites[name]
        kind = site.conversion.forward.collective or ""
        if half == "wait":
            (started,) = node.all_input_nodes
            self.names[node] = self.names[started]
            if name in self.arrivals:
                self.items.append(Wait(COMPUTE, self.arrivals.pop(name)))
        elif not half or not kind:
            self._across(node, site, kind) if kind else self._launch(COMPUTE, node, name, kind)
        else:
            self._across(node, site, kind)
            self.arrivals[name] = self._record(COMM)
        if not half and kind:
            self.items.append(Wait(COMPUTE, self._record(COMM)))

    def _message(self, node: fx.Node, kind: Any, rank: Any, name: Any) -> None:
        reads = tuple(dict.fromkeys(self.names[i] for i in node.all_input_nodes if i in self.names))
        writes = (node.name,) if kind == RECEIVE else ()
        self.names[node] = node.name
        self.items.append(Launch(COMPUTE, name, reads, writes, kind, (rank,)))

    def _across(self, node: fx.Node, site: Site, kind: str) -> None:
        """A transfer: behind what compute has launched so far, into a slot of its own."""
        self.items.append(Wait(COMM, self._record(COMPUTE)))
        self._launch(COMM, node, site.name, kind)

    def _launch(self, stream: str, node: fx.Node, name: str, kind: str) -> None:
        reads = tuple(dict.fromkeys(self.names[i] for i in node.all_input_nodes if i in self.names))
        out = f"s{self._slot(node)}:{name}" if stream == COMM else self._own(node, reads)
        self.names[node] = out
        self.items.append(
            Launch(stream, name, reads, (out,), kind, self.ranks if kind else ())
        )

    def _own(self, node: fx.Node, reads: tuple[str, ...]) -> str:
        """The name of what compute makes: in the slots of what it may be a view of."""
        within = dict.fromkeys(part for value in reads for part in slots(value))
        return f"{'+'.join(within)}:{node.name}" if within and _aliases(node) else node.name

    def _record(self, stream: str) -> str:
        event = f"e{self.events}"
        self.events += 1
        self.items.append(Record(stream, event))
        return event

    def _slot(self, node: fx.Node) -> int:
        """A slot whose readers stand before this start, so before the event that it waits for."""
        if not self.free:
            self.free.append(self.slots)
            self.slots += 1
        found = self.free.pop(0)
        last = max((self.at[r] for r in _readers(node)), default=self.at[node])
        self.held.setdefault(last, []).append(found)
        return found


def _readers(node: fx.Node) -> Iterable[fx.Node]:
    """Those of a moved value: its wait stands for it, and a view may keep it."""
    seen, todo = set(), list(node.users)
    while todo:
        user = todo.pop()
        if user not in seen:
            seen.add(user)
            yield user
            if str(user.target).endswith(".wait") or _aliases(user):
                todo += user.users


def _aliases(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None:  # one of plait's own operators may return a view
        return True
    return any(r.alias_info is not None for r in schema.returns) or "reshape" in str(node.target)


def _marked(item: Item, given: frozenset[str], mark: str) -> Item:
    if not isinstance(item, Launch):
        return type(item)(item.stream, item.event + mark)
    reads = tuple(v if v in given else v + mark for v in item.reads)
    writes = tuple(v + mark for v in item.writes)
    name = item.name if item.message else item.name + mark  # a message has one name at both ends
    return Launch(item.stream, name, reads, writes, item.collective, item.ranks)


_LINE = re.compile(r"(\w+): (?:(record|wait) (\S+)|(\S+)(?: = (\w+)\[([\d,]*)\])?\((.*)\) ->(.*))")


def _parse(line: str) -> Item:
    found = _LINE.fullmatch(line.strip())
    if found is None:
        raise ScheduleError(f"{line!r} is no line of a schedule; one reads like `compute: linear(x, w) -> y`")
    stream, verb, event, name, collective, ranks, reads, writes = found.groups()
    if verb:
        return Record(stream, event) if verb == "record" else Wait(stream, event)
    on = tuple(int(r) for r in (ranks or "").split(",") if r)
    return Launch(stream, name, _names(reads), _names(writes), collective or "", on)


def _names(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


__all__ = [
    "COMM", "COMPUTE", "RECEIVE", "SEND", "Launch", "Record", "Schedule", "Wait", "message", "schedule", "slot",
    "views_of",
]  # fmt: skip
