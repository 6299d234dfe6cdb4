"""Owed: which gradients of weights are computed beside which move of a gradient (passes/meanwhile.py).

On the way back, from the end of the program on, matmuls give the gradients of what they read at once and owe
those of their weights. A move takes of these as many as it is long, the oldest first:

    moves     |== move of dx ==|              |== move of dx ==|
    compute   |== dw ==|= dw =|  dx  dx  dx  |== dw ==|== dw ==| ...

What is left stays owed until the next move, and no longer: so no more is held than between two moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torch import fx

from plait.passes.meanwhile import MATMULS, weights
from plait.passes.overlap.choose import NOISE
from plait.passes.overlap.timeline import Machine
from plait.passes.partition import BACK, Local
from plait.passes.rings import feed
from plait.passes.trace import Spec, trace
from plait.plan.plan import Overlapped
from plait.program import Program

LATE = "late"
_OF = "gradients of the weights of "


@dataclass(frozen=True)
class Debt:
    """A matmul, and the seconds of its weights' gradients."""

    matmul: str
    seconds: float


@dataclass(frozen=True)
class Move:
    """A collective on the way back."""

    name: str
    seconds: float


def weigh(program: Program, first: Local, seconds: Mapping[str, float], machine: Machine) -> tuple[Overlapped, ...]:
    """The moves that gain by it; `seconds`: of every collective, by its name."""
    if not program.training or program.sizes or machine.loses >= 1:
        return ()
    taken = assigned(_events(program, first, seconds, machine), machine.loses)
    listed = (_overlapped(move, paid, machine) for move, paid in taken if paid)
    return tuple(o for o in listed if o.whole - o.seconds > NOISE * o.whole)


def sites(overlaps: Sequence[Overlapped]) -> dict[str, tuple[str, ...]]:
    """site -> the matmuls whose weights' gradients are computed beside its move back."""
    late = [o for o in overlaps if o.form == LATE]
    return {site.removesuffix(BACK): _matmuls(o.region) for o in late for site in o.sites}


def assigned(events: Iterable[Debt | Move], loses: float) -> Iterator[tuple[Move, list[Debt]]]:
    """What every move takes; `events` in the order of the way back. `loses`: of compute's rate, beside a move."""
    old, new = list[Debt](), list[Debt]()
    for event in events:
        if isinstance(event, Debt):
            new.append(event)
        elif old or new:
            paid, left = old, new
            while left and sum(d.seconds for d in paid) < event.seconds * (1 - loses):
                paid, left = [*paid, left[0]], left[1:]
            yield event, paid
            old, new = left, []


def _events(
    program: Program, first: Local, seconds: Mapping[str, float], machine: Machine
) -> Iterator[Debt | Move]:
    specs = trace(first, feed(program, first), False)
    matmuls = weights(first)
    known = {w for mine in matmuls.values() for w in mine}
    for node in reversed(first.graph.nodes):
        name = f"{node.target}{BACK}"
        if node in matmuls:
            yield Debt(node.name, _seconds(node, matmuls[node], specs, machine))
        elif node.op == "call_module" and name in seconds and node not in known:
            yield Move(name, seconds[name])


def _overlapped(move: Move, paid: Sequence[Debt], machine: Machine) -> Overlapped:
    work = sum(d.seconds for d in paid)
    both = max(move.seconds, work + machine.loses * move.seconds) + machine.start
    region = _OF + ", ".join(d.matmul for d in paid)
    return Overlapped(region, LATE, (move.name,), len(paid), both, move.seconds + work, both - work)


def _seconds(matmul: fx.Node, known: Sequence[fx.Node], specs: Mapping[str, Spec], machine: Machine) -> float:
    """Of `o i = sum of rows`, for each of its weights."""
    data = specs[str(matmul.args[MATMULS[matmul.target]])]
    rows = prod(data.shape[:-1])
    shapes = [specs[w.name].shape for w in known if len(specs[w.name].shape) == 2]
    device = machine.device
    return sum(device.launch + device.matmul_seconds(o, i, rows, str(data.dtype)) for o, i in shapes)


def _matmuls(region: str) -> tuple[str, ...]:
    return tuple(region.removeprefix(_OF).split(", "))
