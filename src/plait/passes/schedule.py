"""Schedules of a pipeline, as data: what every place does, in order.

    2F0     stage 2, forward of micro-batch 0
    2B0     its backward
    2I0     the first half of it, where the halves run apart: gradients of what came in
    2W0     the second half: gradients of the weights, for which nobody waits

A place is one group of ranks; stage s lives at place s % places, so with more stages than places
the stages are interleaved. A schedule is spelled a line a place and read back by `parse`; `check`
proves that it runs to its end, and `draw` shows it:

    gpipe          0F0 0F1 0F2 ... 0B0 0B1 0B2      all forwards first: every activation is kept
    1f1b           at most `places - s` micro-batches are open in stage s
    interleaved    the same with two stages a place: half the bubble, twice the messages
    zero-bubble    weights' gradients fill what 1f1b waits; at most `places` micro-batches are open
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from plait.errors import ScheduleError

BACKWARD = 2.0  # times the forward: gradients of inputs and of weights are a product each
OPENS = {"F": 1, "B": -1, "I": 0, "W": -1}  # micro-batches whose activations are kept


@dataclass(frozen=True)
class Action:
    stage: int
    kind: str  # F | B, or I and W
    piece: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.piece}"

    @classmethod
    def parse(cls, text: str) -> Action:
        found = re.fullmatch(r"(\d{1,9})([FBIW])(\d{1,9})", text)
        if found is None:
            raise ScheduleError(f"{text!r} is no action; one reads like 2F0 or 2B0")
        return cls(int(found[1]), found[2], int(found[3]))


@dataclass(frozen=True)
class Schedule:
    stages: int
    pieces: int
    places: tuple[tuple[Action, ...], ...]

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, actions)) for actions in self.places)

    @property
    def kinds(self) -> str:
        """The letters that every stage and micro-batch must have."""
        found = {a.kind for actions in self.places for a in actions}
        return "FIW" if found & {"I", "W"} else "FB" if "B" in found else "F"

    @property
    def training(self) -> bool:
        return self.kinds != "F"


@dataclass(frozen=True)
class Timed:
    """When every action runs, and how many micro-batches a stage has open at most."""

    start: dict[Action, float]
    end: dict[Action, float]
    open: tuple[int, ...]

    @property
    def seconds(self) -> float:
        return max(self.end.values(), default=0.0)


def parse(
    text: str, stages: int, *, places: int | None = None, pieces: int | None = None, training: bool | None = None
) -> Schedule:
    """A text alone says how many places and micro-batches there are, and whether it goes back. What the program has
    of these, where it is known, refuses a text that leaves out a whole micro-batch, or all that goes back."""
    lines = tuple(tuple(map(Action.parse, line.split())) for line in text.splitlines())
    last, count = max((a.piece for line in lines for a in line), default=0), sum(map(len, lines))
    if places is not None and places != len(lines):
        raise ScheduleError(f"there are {len(lines)} lines for {places} places; a place has a line")
    if last >= count > 0:
        raise ScheduleError(f"micro-batch {last} is one of {1 + last}, and there are {count} actions")
    found = Schedule(stages, 1 + last if pieces is None else pieces, lines)
    check(found, training)
    return found


def make(name: str, places: int, pieces: int, training: bool = True) -> Schedule:
    """A schedule by its name; without training it has no backward."""
    stages = places * STAGES_A_PLACE[name]
    if not training:
        order = [(s, k) for k in range(pieces) for s in range(stages)]
        lines = (tuple(Action(s, "F", k) for s, k in order if s % places == p) for p in range(places))
        found = Schedule(stages, pieces, tuple(lines))
    else:
        found = SCHEDULES[name](places, stages, pieces)
    check(found, training)
    return found


def loop(places: int, stages: int, pieces: int) -> Schedule:
    """All forwards, then all backwards, as a loop of the user's own has them."""
    lines = []
    for p in range(places):
        there, back = _passes(p, places, stages, pieces)
        lines.append(tuple(a for a in (*there, *back) if a.piece < pieces))
    return Schedule(stages, pieces, tuple(lines))


def _passes(place: int, places: int, stages: int, pieces: int) -> tuple[list[Action], list[Action]]:
    """All forwards and all backwards of a place: micro-batches go in groups of `places`, each group
    through the place's stages in turn. A last group is full too, with pieces that there are not."""
    rounds, depth = -(-pieces // places), stages // places
    group = [(turn, k) for turn in range(depth) for k in range(places)]
    order = [(turn, r * places + k) for r in range(rounds) for turn, k in group]
    there = [Action(turn * places + place, "F", k) for turn, k in order]
    back = [Action((depth - 1 - turn) * places + place, "B", k) for turn, k in order]
    return there, back


def _one_forward_one_backward(places: int, stages: int, pieces: int) -> Schedule:
    return Schedule(
        stages, pieces, tuple(_steady(p, pieces, places - p) for p in range(places))
    )


def _steady(stage: int, pieces: int, ahead: int) -> tuple[Action, ...]:
    """`ahead` forwards, then a backward after each forward."""
    ahead = min(ahead, pieces)
    out = [Action(stage, "F", k) for k in range(ahead)]
    for k in range(pieces):
        out.append(Action(stage, "B", k))
        if ahead + k < pieces:
            out.append(Action(stage, "F", ahead + k))
    return tuple(out)


def _zero_bubble(places: int, stages: int, pieces: int) -> Schedule:
    """ZB-H1: stage s has the gradients of its weights wait for s micro-batches, which is as long as
    stage 0 would wait for the first gradient to come through all others."""
    return Schedule(stages, pieces, tuple(_apart(s, pieces, places - s) for s in range(stages)))


def _apart(stage: int, pieces: int, ahead: int) -> tuple[Action, ...]:
    """`_steady`, its backwards in halves."""
    out: list[Action] = []
    for action in _steady(stage, pieces, ahead):
        if action.kind == "F":
            out.append(action)
        else:
            halves = [Action(stage, "I", action.piece), Action(stage, "W", action.piece - stage)]
            out += [half for half in halves if half.piece >= 0]
    return (*out, *(Action(stage, "W", k) for k in range(max(0, pieces - stage), pieces)))


def _interleaved(places: int, stages: int, pieces: int) -> Schedule:
    """Megatron-LM's. Of a last group, actions of pieces that there are not are left out."""
    depth = stages // places
    lines = []
    for p in range(places):
        there, back = _passes(p, places, stages, pieces)
        ahead = 2 * (places - 1 - p) + (depth - 1) * places
        steady = [a for pair in zip(there[ahead:], back, strict=False) for a in pair]
        whole = [*there[:ahead], *steady, *back[max(0, len(there) - ahead) :]]
        lines.append(tuple(a for a in whole if a.piece < pieces))
    return Schedule(stages, pieces, tuple(lines))


def before(action: Action, stages: int) -> list[Action]:
    """What must have ended: the stage before; or the one after, and the own part before."""
    s, k = action.stage, action.piece
    match action.kind:
        case "F":
            return [Action(s - 1, "F", k)] if s else []
        case "W":
            return [Action(s, "I", k)]
    after = [Action(s + 1, action.kind, k)] if s + 1 < stages else []
    return [Action(s, "F", k), *after]


def units(again: bool = False) -> dict[str, float]:
    """What each kind of action takes, in forwards; `again`: a backward first runs the forward again."""
    half = BACKWARD / 2
    return {"F": 1.0, "B": BACKWARD + again, "I": half + again, "W": half}


def forward(schedule: Schedule, each: Sequence[float], again: bool = False) -> list[float]:
    """Seconds of a forward in every stage, of those of a micro-batch there and back."""
    passes = sum(units(again)[kind] for kind in schedule.kinds)
    return [seconds / passes for seconds in each]


def run(schedule: Schedule, forward: Sequence[float], again: bool = False) -> Timed:
    """`play` where actions of a kind take as long in every micro-batch."""
    takes = units(again)
    return play(schedule, lambda action: forward[action.stage] * takes[action.kind])


def play(schedule: Schedule, seconds: Callable[[Action], float]) -> Timed:
    """Every place does its actions in order, each as soon as what it needs has ended.

    ScheduleError where that stops before the end, naming what every place waits for.
    """
    at, free = [0] * len(schedule.places), [0.0] * len(schedule.places)
    start: dict[Action, float] = {}
    end: dict[Action, float] = {}
    opened, most = [0] * schedule.stages, [0] * schedule.stages
    moved = True
    while moved:
        moved = False
        for p, actions in enumerate(schedule.places):
            while at[p] < len(actions):
                action = actions[at[p]]
                needs = before(action, schedule.stages)
                if not all(n in end for n in needs):
                    break
                start[action] = max([free[p], *(end[n] for n in needs)])
                end[action] = free[p] = start[action] + seconds(action)
                opened[action.stage] += OPENS[action.kind]
                most[action.stage] = max(most[action.stage], opened[action.stage])
                at[p] += 1
                moved = True
    stuck = [
        f"place {p} waits at {actions[at[p]]} for "
        + ", ".join(str(n) for n in before(actions[at[p]], schedule.stages) if n not in end)
        for p, actions in enumerate(schedule.places)
        if at[p] < len(actions)
    ]
    if stuck:
        raise ScheduleError("the schedule stops: " + "; ".join(stuck))
    return Timed(start, end, tuple(most))


def owed(schedule: Schedule) -> int:
    """The most micro-batches of a stage that are between the halves of their backward at once."""
    most, open_ = 0, Counter[int]()
    for action in (a for actions in schedule.places for a in actions):
        open_[action.stage] += {"I": 1, "W": -1}.get(action.kind, 0)
        most = max(most, open_[action.stage])
    return most


def check(schedule: Schedule, training: bool | None = None) -> Timed:
    """Every action once, at its place, and none waits for ever; `training`: whether the program goes back, if known."""
    kinds = schedule.kinds
    if training is not None and training != schedule.training:
        kinds = "FB" if training else "F"
    wanted = {
        Action(s, kind, k)
        for s in range(schedule.stages)
        for kind in kinds
        for k in range(schedule.pieces)
    }
    listed = [a for actions in schedule.places for a in actions]
    twice = sorted(str(a) for a, count in Counter(listed).items() if count > 1)
    away = [
        f"{a} stands at place {p}, stage {a.stage} lives at {a.stage % len(schedule.places)}"
        for p, actions in enumerate(schedule.places)
        for a in actions
        if a.stage % len(schedule.places) != p
    ]
    faults = [
        *(f"{a} is missing" for a in sorted(map(str, wanted - set(listed)))),
        *(f"{a} is no action of it" for a in sorted(map(str, set(listed) - wanted))),
        *(f"{a} stands twice" for a in twice),
        *away,
    ]
    if faults:
        raise ScheduleError("; ".join(faults))
    return run(schedule, [1.0] * schedule.stages)


def least(name: str, places: int, pieces: int, whole: float, training: bool = True) -> float:
    """Seconds that no cut of `whole` (of one micro-batch, there and back) into stages goes below.

    A place works for all micro-batches, and for the first of them it waits until the places before it
    have done the share f of theirs which comes before (`LEADS`):

        T >= f (t_0 + ... + t_(s-1)) + M t_s   for all s,   so   T >= f whole / (1 - (1 - f / M)^S)

    In all forwards before all backwards the slowest stage also holds up the way to the last and back.
    """
    if not training or name == "gpipe":
        return whole + (pieces - 1) * whole / places
    share = LEADS[name]
    if share == 0:
        return max(whole, whole * pieces / places)
    return share * whole / (1 - (1 - share / pieces) ** places)


def seconds(schedule: Schedule, forward: Sequence[float], again: bool = False) -> float:
    """From the first action to the end of the last; `forward`: of one micro-batch, by stage."""
    return run(schedule, forward, again).seconds


def bubble(schedule: Schedule, forward: Sequence[float], again: bool = False) -> float:
    """The share of the places' time in which they wait."""
    timed = run(schedule, forward, again)
    busy = sum(timed.end[a] - timed.start[a] for a in timed.end)
    whole = timed.seconds * len(schedule.places)
    return 1.0 - busy / whole if whole > 0 else 0.0


def draw(schedule: Schedule) -> str:
    """A row a place, a column a unit of time, and the share of bubbles."""
    timed = run(schedule, [1.0] * schedule.stages)
    width = max(len(str(a)) for a in timed.end) + 1
    rows = []
    for p, actions in enumerate(schedule.places):
        cells = ["." * (width - 1)] * round(timed.seconds)
        for a in actions:
            for t in range(round(timed.start[a]), round(timed.end[a])):
                cells[t] = str(a)
        rows.append(f"{p} " + " ".join(c.ljust(width - 1) for c in cells))
    share = bubble(schedule, [1.0] * schedule.stages)
    return "\n".join([*rows, f"bubble {share:.1%}, open {' '.join(map(str, timed.open))}"])


SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": loop,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
    "zero-bubble": _zero_bubble,
}
# Of a stage's forward and backward, the part that a later stage waits for at both ends. In zero-bubble that is the
# forward, a quarter where activations are computed again: what comes behind may stand beside the later stage's W.
LEADS = {"gpipe": 1.0, "1f1b": 1.0, "interleaved": 0.0, "zero-bubble": 1 / 4}
STAGES_A_PLACE = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 1}
