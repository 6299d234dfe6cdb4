"""Rival: the blocking program that a plan with overlap is measured against, over the same weights.

Chunks are cut from a blocking program, which is the rival; direct moves may have a split of their own
(plan/planner.py), and their rival is the cheapest blocking plan for the weights as that split lays them.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from plait.plan import direct, overlaps, planner
from plait.plan.measured import Measured
from plait.plan.plan import Overlapped, Plan
from plait.plan.planner import Held, Options, Planned


def overlapped(plan: Plan) -> bool:
    """Whether it takes anything but blocking moves."""
    return any(o.form != WHOLE for o in plan.overlaps)


def seconds(plan: Plan) -> float:
    """Predicted, of a call with every move of this plan blocking."""
    return plan.seconds + sum(o.whole - o.seconds for o in plan.overlaps)


def unwoven(planned: Planned) -> Planned | None:
    """The program that the chunks were cut from; None where moves are direct."""
    plan = planned.plan
    if direct.routes(plan.overlaps):
        return None
    others = {overlaps.instead(o.region) for o in plan.overlaps if o.form != WHOLE}
    listed = tuple(_whole(plan, o, others) for o in plan.overlaps)
    return replace(planned, chosen={}, plan=replace(plan, overlaps=listed, seconds=seconds(plan)))


def cheapest(planned: Planned, options: Options, fixed: Held) -> Planned:
    """By what is predicted, of blocking programs whose weights are held as `fixed` says."""
    plan = planned.plan
    made = planner.make(planned.program, replace(options, overlap="off"), fixed)
    return replace(made, plan=replace(made.plan, dp=plan.dp, overlap=plan.overlap))


def settled(plan: Plan, measured: Measured) -> Plan:
    """The plan of the front-runner that was kept, with the measurement that it was kept by."""
    listed = plan.overlaps
    if measured.blocking:
        listed = tuple(replace(o, reason=o.reason or measured.brief) for o in listed)
    return replace(plan, overlaps=listed, measured=measured)


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
    return replace(o, form=WHOLE, seconds=o.whole, exposed=moves)


WHOLE = "whole"
