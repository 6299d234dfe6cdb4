"""A plan's timeline: what every lane does in one call, from the seconds that the plan predicts.

    of a pipeline     a lane a place: `0F0`, `2B1` as the schedule has them, sends within their stage;
                      then what comes after: the sum over replicas, the outputs' way
    of one stage      `compute` in the program's order, forward and mirrored backward, and `transfers`:
                      a collective stops compute, but for what its region hides beside it

The timeline ends when the plan's `seconds` are over.
"""

from __future__ import annotations

from collections.abc import Iterator

from plait.errors import InputError
from plait.passes import schedule
from plait.passes.partition import BACK
from plait.plan.plan import Placed, Plan
from plait.timeline import Event, Timeline


def simulate(plan: Plan) -> Timeline:
    """The predicted events of one call, in seconds from its start; needs no devices.

    InputError: what it is given is no Plan.
    """
    if not isinstance(plan, Plan):
        raise InputError(f"simulate takes a Plan, not a {type(plan).__name__}: plait.plan(...) makes one")
    events = list(_pipeline(plan) if plan.staged is not None else _stage(plan))
    end = max((event.end for event in events), default=0.0)
    after = plan.choice.winner.parts if plan.choice is not None else {}
    for name in ("gradients", "outputs"):
        if after.get(name, 0.0) > 0:
            events.append(Event(end, end + after[name], "transfers", name))
            end = events[-1].end
    return Timeline(tuple(sorted(events, key=lambda e: (e.begin, e.end))), end)


def _pipeline(plan: Plan) -> Iterator[Event]:
    staged = plan.staged
    assert staged is not None
    order = schedule.make(staged.schedule, plan.pp, plan.micro_batches, plan.training)
    again = staged.recompute != "off"
    timed = schedule.run(order, schedule.forward(order, staged.seconds, again), again)
    for place, actions in enumerate(order.places):
        for action in actions:
            yield Event(timed.start[action], timed.end[action], f"place {place}", str(action))


def _stage(plan: Plan) -> Iterator[Event]:
    cut = _cut(plan)
    forward: dict[str, list[Placed]] = {}
    backward: dict[str, list[Placed]] = {}
    for placed in plan.collectives:
        way = backward if placed.name.endswith(BACK) else forward
        way.setdefault(placed.source, []).append(placed)
    names = [name for name, _, _ in plan.times]
    now = 0.0

    def transfers(moves: list[Placed]) -> Iterator[Event]:
        nonlocal now
        for placed in moves:
            took, beside = cut.get(placed.name, (placed.seconds, 0.0))
            begin = now - beside
            now = max(now, begin + took)
            yield Event(begin, now, "transfers", f"{placed.name} {placed.collective}")

    def compute(name: str, seconds: float) -> Iterator[Event]:
        nonlocal now
        if seconds > 0:
            yield Event(now, now + seconds, "compute", name)
            now += seconds

    known = set(names)  # a move of an input or a weight comes before all of them
    yield from transfers([p for s, moves in forward.items() if s not in known for p in moves])
    for name, seconds, _ in plan.times:
        yield from compute(name, seconds)
        yield from transfers(forward.get(name, []))
    for name, _, seconds in reversed(plan.times):
        yield from transfers(backward.get(name, []))
        yield from compute(f"{name}{BACK}" if seconds else name, seconds)
    yield from transfers([p for s, moves in backward.items() if s not in known for p in moves])


def _cut(plan: Plan) -> dict[str, tuple[float, float]]:
    """By collective of a region that is cut in time: the seconds that it takes there, no more than its region,
    and those of them beside compute; below 0 where chunks that were asked for take longer than the whole."""
    seconds = {p.name: p.seconds for p in plan.collectives}
    out: dict[str, tuple[float, float]] = {}
    for region in plan.overlaps:
        names = [n for site in region.sites for n in (site, f"{site}{BACK}") if n in seconds]
        total = sum(seconds[n] for n in names)
        if region.form != "whole" and total > 0:
            share = min(1.0, (region.whole - region.seconds) / total)
            took = {n: seconds[n] * min(1.0, region.seconds / total) for n in names}
            out |= {n: (took[n], took[n] - (1 - share) * seconds[n]) for n in names}
    return out
