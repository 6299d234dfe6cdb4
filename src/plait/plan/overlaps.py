"""The plan's side of overlap: what was chosen for every region, spelled, and read back.

linear_3..mul_10 by f2: rows 4; 812.0 us of 930.1 us, exposed 40.2 us: move_2 move_3.backward
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from plait.cluster import Cluster
from plait.cluster.device import Device
from plait.errors import PlanError
from plait.passes.overlap.choose import Candidate, choose
from plait.passes.overlap.chunks import Form
from plait.passes.overlap.flow import Edge, Flow
from plait.passes.overlap.regions import Region, regions
from plait.passes.overlap.timeline import Machine
from plait.passes.partition import BACK, Local, Site
from plait.plan import direct, owed
from plait.plan.plan import Overlapped, Placed, Plan, Second
from plait.rules.equation import atoms


def check(overlap: str | int) -> None:
    """PlanError unless `overlap` is "auto", "off" or a number of chunks."""
    number = isinstance(overlap, int) and not isinstance(overlap, bool) and overlap >= 1
    if overlap not in ("auto", "off") and not number:
        raise PlanError(f"overlap={overlap!r}: it takes 'auto', 'off' or a number of chunks from 1")


def machine(cluster: Cluster, n: int, collective: Callable[[str, float], float]) -> Machine:
    """The devices of `cluster` and the transport that moves run on."""
    kind = cluster.device.kind
    alone = len(cluster.levels) == 1 and kind == "cpu"
    loses = _LOSES["loopback" if alone else cluster.transports[0].name]
    return Machine(cluster.device, collective, n, loses, _START[kind])


def asked(overlap: str | int) -> bool:
    """Whether anything is to run beside a collective."""
    return overlap not in ("off", 1)


def held(overlap: str | int, device: Device, recompute: str = "off") -> str:
    """Why nothing runs in chunks within stages, where something could have; or ''."""
    if not asked(overlap):
        return ""
    if device.kind == "cuda":
        return "stages on CUDA devices run without chunks"
    return "activations are computed again" if recompute != "off" else ""


def left(placed: Sequence[Placed], listed: Sequence[Overlapped], whole: bool = True) -> list[str]:
    """The collectives beside which nothing runs; `whole`: nor could anything that was weighed."""
    known = {x for o in listed if whole or o.form != "whole" for x in o.sites}
    return [p.name for p in placed if not {p.name, p.name.removesuffix(BACK)} & known]


def bare(
    flow: Flow, first: Local, placed: Sequence[Placed], listed: Sequence[Overlapped], barred: str = ""
) -> dict[str, str]:
    """Why nothing runs beside a collective, where that is not a matter of its region; `barred`: of all of them."""
    if barred:
        return dict.fromkeys(left(placed, listed, whole=False), barred)
    names = left(placed, listed)
    edges = {_key(e): e for e in flow.edges if e.collectives} if names else {}
    sites = [first.sites[name.removesuffix(BACK)] for name in names]
    why = [_alone(flow, site, edges.get(site.edge)) for site in sites]
    return {name: words for name, words in zip(names, why, strict=True) if words}


def _alone(flow: Flow, site: Site, edge: Edge | None) -> str:
    if edge is None:
        return f"it is a step of {site.source}, which runs in one piece"
    known = {f for dim in edge.dims for f in atoms(dim) if f.size > 1}
    if not known:
        return "it is a single number"
    return "its sizes differ from call to call" if known <= flow.description.symbolic else ""


def decide(
    flow: Flow, overlap: str | int, machine: Machine, first: Local
) -> tuple[dict[Region, Form], tuple[Overlapped, ...]]:
    """The regions to cut; and of all that could be, what was weighed."""
    if not asked(overlap):
        return {}, ()
    chosen, weighed = choose(flow, overlap, machine, machine.n)
    if overlap == "auto" and machine.device.kind == "cuda":
        chosen = {}  # weighed and shown, but chunks on CUDA streams are not measured yet
        weighed = [replace(c, unasked=True) for c in weighed]
    names: dict[str, list[str]] = {}
    for site in first.sites.values():
        names.setdefault(site.edge, []).append(site.name)
    stages = (flow.stages[c.region.nodes[0]] for c in weighed)
    listed = (_spell(c, chosen, names, overlap) for c in weighed)
    return chosen, tuple(replace(o, stage=s) for o, s in zip(listed, stages, strict=True))


def again(flow: Flow, plan: Plan) -> dict[Region, Form]:
    """The regions that a plan cuts, in the same program."""
    forms = {o.region: Form.parse(o.form) for o in plan.overlaps if _in_chunks(o.form)}
    if not forms:
        return {}
    known = {r.name: r for r in regions(flow, plan.tp)}
    lost = sorted(set(forms) - set(known))
    if lost:
        raise PlanError(f"the plan cuts regions that this program has not: {', '.join(lost)}")
    return {known[name]: known[name].form(form) for name, form in forms.items()}


def _in_chunks(form: str) -> bool:
    return form not in ("whole", owed.LATE) and not direct.direct(form)


def instead(region: str) -> str:
    """Why another region, which has operators or moves in common with this one, stays whole."""
    return f"overlapped as {region} instead"


def _spell(
    c: Candidate, chosen: dict[Region, Form], names: dict[str, list[str]], overlap: str | int
) -> Overlapped:
    form = chosen.get(c.region)
    return Overlapped(
        region=c.region.name,
        form=str(form or "whole"),
        sites=tuple(dict.fromkeys(x for e in c.region.sites for x in names.get(_key(e), ()))),
        nodes=len(c.region.nodes),
        seconds=c.seconds if form is not None else c.whole,
        whole=c.whole,
        exposed=c.exposed if form is not None else c.hideable,
        second=_second(c) if form is not None else None,
        reason=_fewer(form, overlap) if form is not None else _reason(c, chosen, overlap),
    )


def _second(c: Candidate) -> Second | None:
    return None if c.second is None else Second(str(c.second.form), c.second.seconds, c.second.exposed)


def _fewer(form: Form, overlap: str | int) -> str:
    """Why it is not in as many chunks as were asked for."""
    fewer = isinstance(overlap, int) and form.count < overlap
    return f"{overlap} chunks asked for, {form.count} rows to cut" if fewer else ""


def _reason(c: Candidate, chosen: dict[Region, Form], overlap: str | int) -> str:
    """Why a region stays whole beside those that are chosen."""
    others = [r for r in chosen if r.members & c.region.members]
    others += [r for r in chosen if r.keys & c.region.keys]
    if others:
        return instead(others[0].name)
    return "it would wait for regions that wait for it" if isinstance(overlap, int) else c.reason


def _key(edge: Edge) -> str:
    return f"{edge.source.name}: {edge.have} -> {edge.need}"


# The part of its rate that compute loses while a transfer runs beside it. nccl: a matmul beside an
# all-reduce took 15 % longer on 2 H100 (nvFuser, 8192 x 8192 x 16384 bf16). Between processes of one
# host the transfer is copies and additions by the cores that compute.
_LOSES = {"nccl": 0.15, "symmetric": 0.05, "gloo": 0.3, "loopback": 1.0}
# Seconds of the host for a start and its wait: events on CUDA, a thread's hand-over on the CPU.
_START = {"cuda": 4e-6, "cpu": 6e-5}
