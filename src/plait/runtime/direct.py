"""Direct moves: a rank's program whose moves by rings and one-hop sums run in the peers' memory.

`lower` replaces moves, and the operators around them, by modules over `runtime/pieces.py`:

    linear -> reduce_scatter -> add_norm -> all_gather -> linear(s)
    scatter  ──────────┐└──── finish ─────┘└────────── matmuls
                     token               token

A token stands for rows that are on their way (`Coming`). What is not around a move is kept; a norm that
no move reads or makes is one kernel too. A program opens its rings before the first event, so that
nobody writes what a peer still reads from the step before, and closes them after the last.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

from torch import fx, nn

from plait.passes import ops
from plait.passes.norms import drop_unread
from plait.passes.partition import Local, Site
from plait.passes.rings import Event, Few, Found, Route, normed, only_norm
from plait.rules.moves import count
from plait.runtime import direct_calls as calls
from plait.runtime.pieces import COPIED, Ring
from plait.runtime.symmetric import Workspace, bytes_for

Routes = Mapping[str, Route]  # of a site's rows (pieces.py)
AGAIN = 2  # buffers of a training program for rows that come again, in turn (direct_training.py)


def nbytes(found: Found, chosen: Routes, ranks: int) -> int:
    """What the workspace of a lowered program takes."""
    total = 0
    for shape, events in found.rings.items():
        if any(e.site.name in chosen for e in events):
            again = AGAIN if any(e.site.grad for e in events) else 0
            total += Ring.nbytes(shape.bounds, shape.width, shape.dtype, again)
    for few in slots(found, chosen):
        total += bytes_for(((2, ranks, few.rows, few.width), few.site.dtype))
    return total


def slots(found: Found, chosen: Routes) -> list[Few]:
    """The largest sum of each width and dtype: one set of slots serves all of them in turn."""
    most: dict[Any, Few] = {}
    for few in found.few:
        key = (few.width, few.site.dtype)
        if few.site.name in chosen and (key not in most or most[key].rows < few.rows):
            most[key] = few
    return list(most.values())


def lower(local: Local, found: Found, chosen: Routes, workspace: Workspace) -> dict[str, nn.Module]:
    """Rewrite the graph of `local`; the modules that it calls instead of the `chosen` sites."""
    made: dict[str, nn.Module] = {}
    for shape, events in found.rings.items():
        mine = [e for e in events if e.site.name in chosen]
        if mine:
            assert all(a.kind != b.kind for a, b in pairwise(mine)), "gathers and scatters alternate"
            ring = Ring.of(workspace, shape.bounds, shape.width, shape.dtype)
            made |= _Lowering(local.graph, ring, mine, chosen, f"ring_{len(made)}").run()
    made |= _few(local.graph, found, chosen, workspace)
    drop_unread(local.graph)
    workspace.ready()
    return made


def norms(graph: fx.Graph) -> None:
    """The norms that are left, as one kernel each."""
    for node in graph.nodes:
        if node.target is ops.add_norm:
            node.target = calls.add_norm


class Call(nn.Module):
    """A function as a module of a graph."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, *args: Any) -> Any:
        return self.run(*args)


# -- rings ------------------------------------------------------------------------------------------


@dataclass
class _Lowering:
    """The events of one ring, in the order of the program."""

    graph: fx.Graph
    ring: Ring
    events: list[Event]
    routes: Routes
    name: str
    made: dict[str, nn.Module] = field(default_factory=dict)

    def run(self) -> dict[str, nn.Module]:
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        first, tokens = self.graph.find_nodes(op="output")[0], set[fx.Node]()
        for before, event, after in zip(
            [None, *self.events], self.events, [*self.events[1:], None], strict=False
        ):
            if event.kind == "scatter":
                begin = self._scatter(event, after, tokens)
            else:
                begin = self._gather(event, order[before.node] if before else -1, tokens, order)
            first = begin if first.op == "output" else first
        with self.graph.inserting_before(first):
            self._call("open", calls.begin, ())
        with self.graph.inserting_before(self.graph.find_nodes(op="output")[0]):
            self._call("close", calls.end, ())
        return self.made

    def _call(self, name: str, run: Callable[..., Any], args: Sequence[Any]) -> fx.Node:
        target = f"{self.name}_{name}"
        self.made[target] = Call(partial(run, self.ring))
        return self.graph.call_module(target, tuple(args))

    def _scatter(self, event: Event, after: Event | None, tokens: set[fx.Node]) -> fx.Node:
        """Terms on their way to their owners, and their sum with the addition and norm that alone read it."""
        name, route = event.site.name, self.routes[event.site.name]
        with self.graph.inserting_before(event.node):
            if event.matmuls:
                x, weight, *bias = event.matmuls[0].args
                piece = partial(calls.matmul_scatter, route=route)
                token = self._call(f"{name}_matmul", piece, (x, weight, *bias))
            else:
                token, route = self._call(f"{name}_terms", calls.scattered, event.node.args), COPIED
        norm = only_norm(event.node)
        if norm is not None:
            shape = own_shape(event.site, self.ring.rows.rank)
            self._norm(f"{name}_sum", norm, token, after, tokens, shape, route)
            self.graph.erase_node(event.node)
        else:
            with self.graph.inserting_before(event.node):
                shape = own_shape(event.site, self.ring.rows.rank)
                add = partial(calls.finish, shape=shape, kind="none", eps=0.0, read=route)
                both = self._call(f"{name}_sum", add, (token, None, None, None))
                self._swap(event.node, self.graph.call_function(operator.getitem, (both, 1)))
        return token

    def _norm(
        self,
        name: str,
        norm: fx.Node,
        source: fx.Node,
        gather: Event | None,
        tokens: set[fx.Node],
        shape: tuple[int, ...] | None = None,
        read: Route = COPIED,
    ) -> fx.Node:
        """`norm` in the ring's kernel; its rows go on to `gather` if nobody else reads them."""
        facts: tuple[Any, ...] = norm.args
        _, residual, weight, bias, eps, kind = facts
        rows = _item(norm, 1)
        if rows is None or gather is None or list(rows.users) != [gather.node]:
            gather = None
        else:
            tokens.add(rows)
        push = self.routes[gather.site.name] if gather is not None else None
        keep = _item(norm, 0) is not None
        run = partial(calls.finish, shape=shape, kind=kind, eps=eps, read=read, push=push, keep=keep)
        with self.graph.inserting_before(norm):
            both = self._call(name, run, (source, residual, weight, bias))
        self._swap(norm, both)
        return both

    def _gather(
        self, event: Event, before: int, tokens: set[fx.Node], order: Mapping[fx.Node, int]
    ) -> fx.Node:
        name, route = event.site.name, self.routes[event.site.name]
        (token,) = event.node.all_input_nodes
        begin = token
        if token not in tokens:
            norm = normed(token)
            if norm is not None and order[norm] > before and list(token.users) == [event.node]:
                begin = self._norm(f"{name}_norm", norm, norm.args[0], event, tokens)  # type: ignore[arg-type]
            else:
                with self.graph.inserting_before(event.node):
                    begin = token = self._call(f"{name}_rows", calls.published, (token,))
                route = COPIED
        with self.graph.inserting_before(event.node):
            if event.matmuls:
                weights = [m.args[1:] for m in event.matmuls]
                run = partial(calls.gather_matmul, shape=event.site.shape, route=route)
                outs = self._call(f"{name}_matmul", run, (token, *weights))
                for i, matmul in enumerate(event.matmuls):
                    self._swap(matmul, self.graph.call_function(operator.getitem, (outs, i)))
                self.graph.erase_node(event.node)
            else:
                whole = partial(calls.gathered, shape=event.site.shape)
                self._swap(event.node, self._call(f"{name}_whole", whole, (token,)))
        return begin

    def _swap(self, old: fx.Node, new: fx.Node) -> None:
        old.replace_all_uses_with(new)
        self.graph.erase_node(old)


def own_shape(site: Site, rank: int) -> tuple[int, ...]:
    """Of this rank's rows of the value that moves."""
    shape, cut = list(site.shape), site.conversion.cut
    assert cut is not None
    shape[cut.dim] = count(cut.rows[rank])
    return tuple(shape)


def _item(node: fx.Node, index: int) -> fx.Node | None:
    found = [u for u in node.users if u.target is operator.getitem and u.args[1] == index]
    return found[0] if found else None


# -- few rows ---------------------------------------------------------------------------------------


def _few(
    graph: fx.Graph, found: Found, chosen: Routes, workspace: Workspace
) -> dict[str, nn.Module]:
    """Sums of few rows with the addition and norm that alone read them: one kernel, one hop.

    Where there are no peers they stay moves, which send nothing, and norms.
    """
    if workspace.alone or not slots(found, chosen):
        return {}
    from plait.runtime.kernels.oneshot import OneShot

    shots = {
        (few.width, few.site.dtype): OneShot(workspace, few.rows, few.width, few.site.dtype)
        for few in slots(found, chosen)
    }
    made: dict[str, nn.Module] = {}
    for few in found.few:
        if few.site.name not in chosen:
            continue
        target, norm = f"{few.site.name}_few", only_norm(few.node)
        shot = shots[few.width, few.site.dtype]
        x, *_ = few.node.args
        if norm is not None:
            facts: tuple[Any, ...] = norm.args
            old, index, keep = norm, None, _item(norm, 0) is not None
        else:
            facts = (None, None, None, None, 0.0, "none")
            old, index, keep = few.node, 1, False
        _, *rest, eps, kind = facts
        made[target] = Call(partial(calls.one_shot, shot, eps=eps, kind=kind, keep=keep))
        with graph.inserting_before(old):
            new = graph.call_module(target, (x, *rest))
            if index is not None:
                new = graph.call_function(operator.getitem, (new, index))
        old.replace_all_uses_with(new)
        graph.erase_node(old)
        if norm is not None:
            graph.erase_node(few.node)
    return made
