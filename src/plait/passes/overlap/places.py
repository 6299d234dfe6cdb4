"""Places: what all ranks of a pipeline launch, by its schedule: the stages' programs, and messages between them.

    F        receive what the stage reads, its program, send what others read
    B, I     receive the gradients of what was sent, the program's mirror image, send those of what came in
    W        the mirror image of what moves weights alone

A message has one name at both ends, its number and the action that reads it (`3:1F0`: wire 3). The mirror image has
the nodes that autograd runs, in its order: that of the program, reversed, with the dual of every move, of which a
wait is a start and a start a wait (runtime/streams.py). Its values are gradients; what the forward kept is there.

`prove` asks of a program alone, there and back, before it runs; what is asked of all actions of a pipeline together
follows from that and from the order of actions (passes/schedule.py), and is held by tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import fx

from plait.passes.overlap.check import check, closed
from plait.passes.overlap.schedule import RECEIVE, SEND, Schedule, message, schedule
from plait.passes.partition import Local, Site
from plait.passes.pipeline import Stage, Wire, numbered
from plait.passes.schedule import Action
from plait.passes.schedule import Schedule as Order
from plait.rules.moves import Step

Piece = Sequence[tuple[Local, Sequence[Stage]]]  # of a micro-batch: every rank's program, and its stages
Name = Callable[[Wire, int, Action], tuple[int, str]]  # of a message, the other stage and the reader: rank and name


def prove(local: Local, training: bool) -> None:
    """ScheduleError with every fault of a woven program, which all ranks run: two stand for any number."""
    closed(local.graph, "the program")
    for way in (local, mirrored(local)) if training else (local,):
        check([schedule(way, 2)] * 2)


def schedules(order: Order, pieces: Sequence[Piece]) -> list[Schedule]:
    """Of every rank, those of place 0 first."""
    n = len(pieces[0])
    ranks = [(place, index) for place in range(len(order.places)) for index in range(n)]
    return [_rank(order, pieces, place, index, n) for place, index in ranks]


def _rank(order: Order, pieces: Sequence[Piece], place: int, index: int, n: int) -> Schedule:
    line = Schedule(())
    for action in order.places[place]:
        local, stages = pieces[action.piece][index]
        numbers = numbered(stages)

        def told(wire: Wire, other: int, reader: Action, numbers: Mapping[Wire, int] = numbers) -> tuple[int, str]:
            return other % len(order.places) * n + index, f"{numbers[wire]}:{reader}"

        does = _forward if action.kind == "F" else _backward
        line = line.then(schedule(does(local, stages[action.stage], action, told), n, place * n), f"@{action}")
    return line


def _forward(local: Local, stage: Stage, action: Action, told: Name) -> Local:
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    came = _came(stage)
    for node in stage.graph.nodes:
        if node in came:
            made[node] = graph.call_function(message, (RECEIVE, *told(came[node], came[node].source, action)))
        elif node.op != "output":
            made[node] = graph.node_copy(node, made.__getitem__)
    for wire, value in _sent(stage):
        reader = Action(wire.target, "F", action.piece)
        graph.call_function(message, (SEND, *told(wire, wire.target, reader), made[value]))
    return replace(local, graph=graph)


def _backward(local: Local, stage: Stage, action: Action, told: Name) -> Local:
    """Gradients are of all that was sent: a lack of some leaves what is left in its order."""
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    came, weights = _came(stage), _of_weights(stage)
    ends: dict[fx.Node, list[fx.Node]] = {}
    for wire, value in _sent(stage) if action.kind != "W" else ():
        got = graph.call_function(message, (RECEIVE, *told(wire, wire.target, action)))
        ends.setdefault(value, []).append(got)
    for node, grads in _gradients(stage.graph, ends, made):
        if node in came:
            if action.kind != "W":
                maker = came[node].source
                reader = Action(maker, action.kind, action.piece)
                graph.call_function(message, (SEND, *told(came[node], maker, reader), *grads))
        elif callable(node.target):
            if action.kind != "W":
                made[node] = graph.call_function(node.target, tuple(grads))
        elif node.op == "call_module" and ((node in weights) == (action.kind == "W") or action.kind == "B"):
            made[node] = graph.call_module(_dual(node.target), tuple(grads))
    return _with_duals(local, graph)


def mirrored(local: Local) -> Local:
    """The way back of a whole program, of gradients of its outputs that are given."""
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    (output,) = local.graph.find_nodes(op="output")
    ends = {value: [graph.placeholder(f"grad_{value.name}")] for value in output.all_input_nodes}
    for node, grads in _gradients(local.graph, ends, made):
        if callable(node.target):
            made[node] = graph.call_function(node.target, tuple(grads))
        elif node.op == "call_module":
            made[node] = graph.call_module(_dual(node.target), tuple(grads))
    return _with_duals(local, graph)


def _gradients(
    graph: fx.Graph, ends: Mapping[fx.Node, Sequence[fx.Node]], made: Mapping[fx.Node, fx.Node]
) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """The nodes as autograd comes to them, each with the gradients of it that are there: of `ends`, and `made`."""
    for node in reversed(graph.nodes):
        yield node, [*ends.get(node, ()), *(made[u] for u in node.users if u in made)]


def _with_duals(local: Local, graph: fx.Graph) -> Local:
    return replace(local, graph=graph, sites={name: _back(site) for name, site in local.sites.items()})


def _came(stage: Stage) -> dict[fx.Node, Wire]:
    """The placeholders that values from other stages are fed to."""
    holders = [n for n in stage.graph.nodes if n.op == "placeholder"]
    return dict(zip(holders[len(holders) - len(stage.receives) :], stage.receives, strict=True))


def _sent(stage: Stage) -> list[tuple[Wire, fx.Node]]:
    (output,) = stage.graph.find_nodes(op="output")
    values = dict(zip(stage.makes, output.args[0], strict=True))  # type: ignore[arg-type]
    return [(wire, values[wire.value]) for wire in stage.sends]  # type: ignore[misc]


def _of_weights(stage: Stage) -> set[fx.Node]:
    """Moves of weights alone."""
    holders = [n for n in stage.graph.nodes if n.op == "placeholder"]
    held = set(holders[: len(stage.weights)])
    for node in stage.graph.nodes:
        if node.op == "call_module" and node.all_input_nodes and held.issuperset(node.all_input_nodes):
            held.add(node)
    return held


def _dual(target: str) -> str:
    name, _, half = target.partition(".")
    return f"{name}.{_OTHER.get(half, half)}" if half else name


def _back(site: Site) -> Site:
    c = site.conversion
    back = c.backward if site.grad else Step("identity")
    return replace(site, conversion=replace(c, forward=back, backward=c.forward))


_OTHER = {"start": "wait", "wait": "start"}
