"""Rivals: the programs that a plan with overlap is measured against, over the same weights.

    second      the same regions and moves, each in the form that comes second by prediction
    blocking    the program that the chunks were cut from; direct moves may have a split of their own
                (plan/planner.py), and their rival is the cheapest blocking plan for the weights as they lie

What a prediction errs in, a rate or the price of a start, it errs in at every region alike, so the second
changes all of them: programs that differ in one region are apart by less than two runs of either.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from plait.plan import direct, overlaps, planner, staged
from plait.plan.measured import Measured
from plait.plan.plan import Overlapped, Plan
from plait.plan.planner import Held, Options, Planned

Listed = tuple[Overlapped, ...]


def overlapped(plan: Plan) -> bool:
    """Whether it takes anything but blocking moves."""
    return any(o.form != WHOLE for listed in _listed(plan) for o in listed)


def seconds(plan: Plan) -> float:
    """Predicted, of a call with every move of this plan blocking."""
    return _seconds(plan, [tuple(replace(o, seconds=o.whole) for o in listed) for listed in _listed(plan)])


def second(plan: Plan) -> Plan | None:
    """None where no region has a second form that gains."""
    listed = [tuple(o.swapped for o in one) for one in _listed(plan)]
    return None if listed == _listed(plan) else _with(plan, listed)


def unwoven(plan: Plan) -> Plan | None:
    """Of the program that the chunks were cut from; None where moves are direct."""
    if direct.routes(plan.overlaps):
        return None
    others = {overlaps.instead(o.region) for listed in _listed(plan) for o in listed if o.form != WHOLE}
    return _with(plan, [tuple(_whole(plan, o, others) for o in listed) for listed in _listed(plan)])


def rewoven(planned: Planned, plan: Plan) -> Planned:
    """The same program as another of its plans has it."""
    return replace(planned, plan=plan, chosen=overlaps.again(planned.flow, plan))


def cheapest(planned: Planned, options: Options, fixed: Held) -> Planned:
    """By what is predicted, of blocking programs whose weights are held as `fixed` says."""
    plan = planned.plan
    made = planner.make(planned.program, replace(options, overlap="off"), fixed)
    return replace(made, plan=replace(made.plan, dp=plan.dp, overlap=plan.overlap))


def settled(plan: Plan, measured: Measured) -> Plan:
    """The plan of the front-runner that was kept, with the measurement that it was kept by."""
    if not measured.blocking:
        return replace(plan, measured=measured)
    listed = [tuple(replace(o, reason=o.reason or measured.brief) for o in one) for one in _listed(plan)]
    return replace(_listing(plan, listed), measured=measured)


def lasting(options: Options, plan: Plan) -> Options:
    """For other forms of call of a module whose first plan is `plan`: where blocking was measured to be as fast, it
    stays."""
    kept = plan.measured is not None and plan.measured.blocking
    return replace(options, overlap="off") if kept else options


def _whole(plan: Plan, o: Overlapped, others: Set[str]) -> Overlapped:
    """`others`: reasons that are none where no region is cut."""
    if o.form == WHOLE:
        return replace(o, reason="") if o.reason in others else o
    moves = sum(p.seconds for p in plan.collectives if o.moves(p.name))
    return replace(o, form=WHOLE, seconds=o.whole, exposed=moves, second=None)


# -- what a plan lists, of every size of its micro-batches --------------------------------------------


def _listed(plan: Plan) -> list[Listed]:
    return [plan.overlaps, *(plan.staged.overlaps if plan.staged is not None else ())]


def _listing(plan: Plan, listed: Sequence[Listed]) -> Plan:
    first, *further = listed
    stages = plan.staged
    return replace(
        plan, overlaps=first, staged=replace(stages, overlaps=tuple(further)) if stages is not None else None
    )


def _with(plan: Plan, listed: Sequence[Listed]) -> Plan:
    if plan.staged is not None:
        return staged.relisted(plan, listed)
    return replace(plan, overlaps=listed[0], seconds=_seconds(plan, listed))


def _seconds(plan: Plan, listed: Sequence[Listed]) -> float:
    if plan.staged is not None:
        return staged.relisted(plan, listed).seconds
    return plan.seconds + sum(new.seconds - old.seconds for old, new in zip(plan.overlaps, listed[0], strict=True))


WHOLE = "whole"
