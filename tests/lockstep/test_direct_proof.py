"""Direct moves, proven: what every rank's lowered program does on a device that is not there (tests/tape.py).

Two replays of all ranks are checked for races, lost signals and deadlocks. Then faults are seeded, and an
adversary who knows nothing of clocks says which of them are faults: it holds one step back for ever, lets all
else run as far as it gets, and sees whether a step begins that has to come later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from plait.capture import capture
from plait.cluster import Cluster
from plait.errors import ScheduleError
from plait.passes.overlap.races import Item, Step, Trace, check, parse, spell, twice
from plait.passes.overlap.schedule import Record, Wait
from plait.passes.rings import Route
from plait.plan import planner, prices
from plait.plan.planner import Planned
from tests import tape
from tests.gloo.prove import free

MOST = 12  # seeded faults of one kind: the adversary tries every step against each


class Block(nn.Module):
    """Two sums and two norms; matmuls that share an input."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.norm, self.other = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.gate = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)
        self.down, self.out = nn.Linear(3 * width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.down(torch.relu(self.up(h)) * self.gate(h))
        return x + self.out(torch.relu(self.other(x)))


def planned(model: nn.Module, args: Any, kwargs: Any, n: int, training: bool) -> Planned:
    """The split by rows, whatever it gains: what is proven is small, what it stands for is large."""
    program = capture(model, args, kwargs, training=training)
    cluster = Cluster.of("dgx-h200").subset(range(n))
    free: dict[str, Any] = {"DIRECT_GAIN": 0.0, "BESIDE": 1e-6, "pick": lambda *a: ("native", 1e-6 * a[2])}
    hidden = patch.multiple(planner, **free), patch.object(prices, "OPEN", 0.0)
    with hidden[0], hidden[1], patch.object(planner.direct, "weigh", lambda *_: ()):
        return planner.make(program, planner.Options(n, cluster))


def blocks() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(Block(), Block()), torch.zeros(13, 48)


def decoder() -> tuple[nn.Module, Tensor]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, head_dim=8, vocab_size=96, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config), torch.zeros(1, 21, dtype=torch.int64)


@cache
def traces(
    name: str, n: int, route: Route, alone: bool = False, training: bool = False
) -> tuple[tuple[Trace, ...], tuple[str, ...]]:
    model, x = blocks() if name == "blocks" else decoder()
    more = {"logits_to_keep": 1} if name == "last row" else {}
    made = planned(model.train(training), (x,), more, n, training)
    found, full = tape.record(made, n, route, alone=alone)
    return tuple(found), tuple(full)


ROUTES = (Route(), Route(runs=3), Route(0.5), Route(0.5, 2), Route(1.0))
USUAL = [
    ("blocks", 2, Route()),
    ("blocks", 2, Route(1.0)),
    ("blocks", 3, Route(0.5, 2)),
    ("decoder", 2, Route(0.5)),
    ("decoder", 4, Route(runs=3)),
    ("last row", 2, Route(0.5)),
]
GRID = [
    pytest.param(*one, id="-".join(map(str, one)), marks=() if one in USUAL else pytest.mark.full)
    for one in product(("blocks", "decoder", "last row"), (2, 3, 4), ROUTES)
]


@pytest.mark.parametrize(("name", "n", "route"), GRID)
@pytest.mark.sample(3)
def test_two_replays_are_safe(name: str, n: int, route: Route) -> None:
    found, full = traces(name, n, route)
    steps = [i for i in found[0] if isinstance(i, Step)]
    assert sum(bool(s.drains) for s in steps) >= 4, "nothing waits for a peer"
    assert len({s.stream for s in steps}) == 2
    check([twice(t) for t in found], full)
    assert all(parse(spell(t)) == t for t in found)


STEPS = [("blocks", 2, Route()), ("blocks", 3, Route(runs=2, late=1))]
LEARNING = [
    pytest.param(*one, id="-".join(map(str, one)), marks=() if one in STEPS else pytest.mark.full)
    for one in product(("blocks", "decoder"), (2, 3, 4), (Route(), Route(runs=2), Route(late=1), Route(runs=2, late=1)))
]


@pytest.mark.parametrize(("name", "n", "route"), LEARNING)
def test_two_steps_there_and_back_are_safe(name: str, n: int, route: Route) -> None:
    there, _ = traces(name, n, route)
    found, full = traces(name, n, route, training=True)
    waits, again = (sum(bool(i.drains) for i in t[0] if isinstance(i, Step)) for t in (there, found))
    assert again > waits, "a way back that waits for nobody"
    check([twice(t) for t in found], full)


@pytest.mark.parametrize("route", [Route(), Route(0.5, 2)], ids=str)
@pytest.mark.sample(1)
def test_the_floor_is_the_same_program_without_its_transfers(route: Route) -> None:
    moving, _ = traces("decoder", 2, route)
    still, full = traces("decoder", 2, route, alone=True)
    check(still)
    assert not full
    for with_them, without in zip(moving, still, strict=True):
        steps = [i for i in without if isinstance(i, Step)]
        assert not any(s.drains or s.fills for s in steps)
        own = [i for i in with_them if isinstance(i, Step) and i.stream == "compute"]
        assert [s.name for s in steps if not waits(s)] == [s.name for s in own if not waits(s)]


def waits(step: Step) -> bool:
    """For peers, and nothing else."""
    return step.name in ("drain", "fill", "enter", "leave")


class Shrinks(nn.Module):
    """Sums of many rows, then of the first few of them, then of many again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Block(), Block(), Block()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        return self.second(x[:3]), self.third(x)


@cache
def hops(name: str, n: int, banks: int = 2) -> tuple[tuple[Trace, ...], tuple[str, ...]]:
    """Two calls of a program with one-hop sums; in `both` beside the rings of a split by rows."""
    model, x = decoder() if name in ("decoder", "both") else blocks()
    if name == "shrinks":
        model, x = Shrinks(), x[:7]
    if name == "few":
        x = x[:2]
    cluster = free(n) if name == "both" else Cluster.of("dgx-h200").subset(range(n))
    made = planner.make(capture(model.eval(), (x,), {}), planner.Options(n, cluster, overlap="off"))
    with patch.object(tape, "BANKS", banks):
        found, full = tape.record(made, n, Route(0.5), calls=2)
    return tuple(found), tuple(full)


HOPS = [("blocks", 2), ("shrinks", 3), ("both", 2)]


@pytest.mark.parametrize(
    ("name", "n"),
    [
        pytest.param(name, n, marks=() if (name, n) in HOPS else pytest.mark.full)
        for name, n in product(("blocks", "shrinks", "decoder", "both"), (2, 3, 4))
    ],
)
@pytest.mark.sample(2)
def test_one_hop_sums_are_safe(name: str, n: int) -> None:
    """Two calls behind each other, twice: after two of them the banks are as they were."""
    found, full = hops(name, n)
    steps = [i for i in found[0] if isinstance(i, Step)]
    assert sum(s.name == "push" for s in steps) >= 4, "nothing goes by one hop"
    assert any(s.stream.startswith("lane") for s in steps) == (name == "both"), "copies of rings"
    check([twice(t) for t in found], full)
    assert all(parse(spell(t)) == t for t in found)


def test_one_bank_is_not_enough() -> None:
    """A peer that has gone on to the next sum would put its terms in the place of those of this one."""
    found, full = hops("few", 2, banks=1)
    with pytest.raises(ScheduleError, match="may fill .* before it is emptied"):
        check([twice(t) for t in found], full)


# -- the adversary -------------------------------------------------------------------------------------

Place = tuple[int, str, int]  # rank, lane, line


class Machine:
    """Runs traces with one step held back: before it begins (`begun` False), or for ever in the middle."""

    def __init__(self, traces: Sequence[Trace], full: Sequence[str], held: Place | None, begun: bool) -> None:
        self.lines: dict[tuple[int, str], list[Item]] = {}
        for rank, trace in enumerate(traces):
            for item in trace:
                self.lines.setdefault((rank, item.stream), []).append(item)
        self.at, self.flags = dict.fromkeys(self.lines, 0), set(full)
        self.events: set[tuple[int, str]] = set()
        self.held, self.begun, self.during = held, begun, False
        self.wrong = ""

    def run(self) -> Machine:
        step = self.step_of(self.held)
        moved = True
        while moved and not self.wrong:
            moved = any(self.advance(lane, step) for lane in self.lines)
        return self

    def step_of(self, place: Place | None) -> Step | None:
        found = self.lines[place[:2]][place[2]] if place is not None else None
        assert found is None or isinstance(found, Step)
        return found

    def advance(self, lane: tuple[int, str], held: Step | None) -> bool:
        at = self.at[lane]
        if at == len(self.lines[lane]):
            return False
        item = self.lines[lane][at]
        if isinstance(item, Wait) and (lane[0], item.event) not in self.events:
            return False
        if isinstance(item, Step) and not set(item.drains) <= self.flags:
            return False
        if (*lane, at) == self.held:
            changed, self.during = self.begun and not self.during, self.begun
            self.flags -= set(item.drains) if changed and isinstance(item, Step) else set()
            return changed
        if isinstance(item, Record):
            self.events.add((lane[0], item.event))
        if isinstance(item, Step):
            if self.during and held is not None and touch(item, held):
                self.wrong = f"{lane} {item} runs beside {self.held} {held}"
            self.flags -= set(item.drains)
            if self.flags & set(item.fills):
                self.wrong = f"{lane} {item} is lost while {self.held} waits"
            self.flags |= set(item.fills)
        self.at[lane] += 1
        return True

    @property
    def over(self) -> bool:
        return all(self.at[lane] == len(lines) for lane, lines in self.lines.items())


def touch(one: Step, other: Step) -> bool:
    def hits(some: Sequence[Any], others: Sequence[Any]) -> bool:
        return any(a.meets(b) for a in some for b in others)

    return hits(one.writes, (*other.reads, *other.writes)) or hits(one.reads, other.writes)


def adversary(traces: Sequence[Trace], full: Sequence[str]) -> str:
    """What can go wrong, or ''."""
    plain = Machine(traces, full, None, False).run()
    if plain.wrong or not plain.over:
        return plain.wrong or "deadlock"
    if plain.flags != set(full):
        return "flags are left"
    lanes: dict[str, set[tuple[int, str]]] = {}
    for lane, lines in plain.lines.items():
        for step in lines:
            for span in (*step.reads, *step.writes) if isinstance(step, Step) else ():
                lanes.setdefault(span.memory, set()).add(lane)
    for lane, lines in plain.lines.items():
        for i, step in enumerate(lines):
            if not isinstance(step, Step):
                continue
            shared = any(len(lanes[s.memory]) > 1 for s in (*step.reads, *step.writes))
            for begun in [True] * shared + [False] * bool(step.drains):
                found = Machine(traces, full, (*lane, i), begun).run()
                if found.wrong:
                    return found.wrong
    return ""


# -- faults --------------------------------------------------------------------------------------------


def without_a_wait(trace: Trace) -> Iterator[Trace]:
    """One signal that is not waited for, or one event."""
    for i, item in enumerate(trace):
        if isinstance(item, Wait):
            yield trace[:i] + trace[i + 1 :]
        for flag in item.drains if isinstance(item, Step) else ():
            left = tuple(f for f in item.drains if f != flag)
            yield (*trace[:i], replace(item, drains=left), *trace[i + 1 :])


def one_early(trace: Trace) -> Iterator[Trace]:
    """A step that writes before its lane has waited for the reader of what lay there."""
    for i, item in enumerate(trace):
        before = [k for k in range(i) if trace[k].stream == item.stream]
        if isinstance(item, Step) and item.writes and before:
            last = trace[before[-1]]
            if isinstance(last, Wait) or (isinstance(last, Step) and last.drains):
                yield (*trace[: before[-1]], item, *trace[before[-1] : i], *trace[i + 1 :])


def swapped(trace: Trace) -> Iterator[Trace]:
    """Two moves that follow each other on one lane, each with the signal that it waits for."""
    pairs = [
        (i, j)
        for i, item in enumerate(trace)
        for j in [next((k for k in range(i + 1, len(trace)) if trace[k].stream == item.stream), 0)]
        if j and isinstance(item, Step) and item.drains and isinstance(trace[j], Step) and trace[j].writes
    ]
    for (a, b), (c, d) in zip(pairs, pairs[1:], strict=False):
        if trace[a].stream == trace[c].stream:
            items = list(trace)
            items[a], items[b], items[c], items[d] = items[c], items[d], items[a], items[b]
            yield tuple(items)


def caught(traces: Sequence[Trace], full: Sequence[str]) -> bool:
    try:
        check(traces, full)
    except ScheduleError:
        return True
    return False


def early_push(trace: Trace) -> Iterator[Trace]:
    """A row's terms of the next sum, sent before those of this one have come."""
    for i, item in enumerate(trace):
        before = [k for k in range(i) if trace[k].stream == item.stream and isinstance(trace[k], Step)]
        if isinstance(item, Step) and item.name == "push" and before:
            polls = [k for k in before if trace[k].drains]  # type: ignore[union-attr]
            yield (*trace[: polls[-1]], item, *trace[polls[-1] : i], *trace[i + 1 :])


@pytest.mark.parametrize("kind", [without_a_wait, one_early, early_push])
def test_seeded_faults_of_one_hop(kind: Any) -> None:
    seeded(kind, *hops("few", 2))


@pytest.mark.parametrize("kind", [without_a_wait, one_early, swapped])
@pytest.mark.parametrize(("n", "route"), [(2, Route()), (2, Route(0.5, 2)), (3, Route(0.5))], ids=str)
def test_seeded_faults(kind: Any, n: int, route: Route) -> None:
    seeded(kind, *traces("blocks", n, route))


@pytest.mark.parametrize(
    "kind", [without_a_wait, *(pytest.param(k, marks=pytest.mark.full) for k in (one_early, swapped))]
)
def test_seeded_faults_of_a_step(kind: Any) -> None:
    seeded(kind, *traces("blocks", 2, Route(late=1), training=True))


def seeded(kind: Any, right: Sequence[Trace], full: Sequence[str]) -> None:
    assert not adversary([twice(t) for t in right], full)
    faults = list(kind(right[0]))
    assert faults
    real = 0
    for wrong in faults[:: 1 + len(faults) // MOST]:
        both = [twice(wrong), *(twice(t) for t in right[1:])]
        why = adversary(both, full)
        assert caught(both, full) == bool(why), why or f"harmless\n{spell(wrong)}"
        real += bool(why)
    assert real, "no fault was one"


# -- after a failure, and when programs are dropped ------------------------------------------------------


def test_flags_are_reset_after_a_call_that_failed() -> None:
    memory = tape.Memory()
    arenas = [torch.zeros(4096, dtype=torch.uint8) for _ in range(2)]
    workspace = tape.Recorded(arenas, 0, tape.Tape(0, memory), {})
    flags, full = workspace.channel(), workspace.channel(full=True)
    workspace.ready()
    def fails() -> None:
        with workspace.in_use():
            flags.flags.local.fill_(1)  # a peer's signal that came before the fault
            full.flags.local.zero_()
            raise ValueError("the fault")

    with pytest.raises(ValueError, match="the fault"):
        fails()
    with workspace.in_use():
        assert not flags.flags.local.any()
        assert full.flags.local.all()
        flags.flags.local.fill_(1)
    with workspace.in_use():  # nothing failed: what a peer has told already stays told
        assert flags.flags.local.all()


def test_programs_are_dropped_in_the_order_in_which_all_ranks_made_them() -> None:
    from plait.runtime.programs import FORMS, Programs

    class Form:
        def __init__(self, number: int) -> None:
            self.number = number

        def leaves(self, args: Any, kwargs: Any) -> list[int] | None:
            return [self.number] if args == (self.number,) else None

    state: Any = None
    first: Any = Form(0)
    programs = Programs(state, first)
    for number in range(1, FORMS + 3):
        assert programs.find(0, (number - 1,), {}) is not None  # use does not make a program younger
        assert programs.find(0, (0,), {}) is None or number <= FORMS
        programs.add(0, state, Form(number))
    kept = [n for n in range(FORMS + 3) if programs.find(0, (n,), {}) is not None]
    assert kept == list(range(3, FORMS + 3))
