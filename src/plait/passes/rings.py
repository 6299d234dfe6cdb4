"""Rings: the moves of a rank's program that its ranks can do in each other's memory, and around what.

A ring is a stream of rows [t, d] cut among the ranks in one way. Its events alternate:

    gather    every rank's rows come to all         read by matmuls: own rows first, others as they come
    scatter   terms of all rows go to their owners  made by a matmul: others' rows first, own rows last

and alternating is what makes one buffer for each enough (runtime/pieces.py): whoever gathers has been
heard of by everyone since the last scatter, and the other route round. A move that does not alternate is
left to the group's collectives; in training, where the way back is autograd's, the ring is closed between
two of a kind (runtime/direct_training.py).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import fx

from plait.errors import ScheduleError
from plait.passes import ops
from plait.passes.expand import is_random
from plait.passes.norms import fuse
from plait.passes.partition import SEED, Local, Site
from plait.passes.trace import Spec, trace
from plait.program import Program
from plait.rules.moves import Cut, count

aten = torch.ops.aten
WIDEST = 16384  # elements of a row that one program of the kernels takes
FEW = 128  # rows that the one-hop kernel takes
MATMULS = (aten.linear.default, ops.packed_linear)
DUAL = {"gather": "reduce_scatter_own", "scatter": "gather_sum"}  # of an event, the action on the way back


@dataclass(frozen=True)
class Shape:
    """Rows bounds[r] to bounds[r + 1] of `width` elements belong to rank r."""

    bounds: tuple[int, ...]
    width: int
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        return self.bounds[-1]

    def nbytes(self, rank: int) -> int:
        """Of one rank's rows."""
        return (self.bounds[rank + 1] - self.bounds[rank]) * self.width * self.dtype.itemsize


RUNS = (1, 2, 4)  # copies of each peer's others that a route may have


@dataclass(frozen=True)
class Route:
    """How rows travel: the `direct` part by the kernel that sums and norms, each peer's others in `runs` copies.

    `late`: of the last so many matmuls of a gather, the gradients of the weights are computed beside the move back of
    the scatter that comes before it in the program.
    """

    direct: float = 0.0
    runs: int = 1
    late: int = 0

    def __str__(self) -> str:
        runs = f" in {self.runs}" if self.runs > 1 else ""
        return f"{self.direct:g}{runs}" + (f", {self.late} late" if self.late else "")

    @classmethod
    def parse(cls, text: str) -> Route:
        """What `str` writes; ScheduleError for anything else."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(?: in ([1-9]\d*))?(?:, (\d+) late)?", text)
        if found is None:
            raise ScheduleError(f"{text!r} is no route; one reads like 0.5, 0 in 2 or 0 in 2, 1 late")
        return cls(float(found[1]), int(found[2] or 1), int(found[3] or 0))


@dataclass(frozen=True)
class Event:
    """One move on a ring. `matmuls`: the readers of a gather, or the maker of a scatter's terms."""

    kind: str  # gather | scatter
    site: Site
    node: fx.Node
    matmuls: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Few:
    """A sum of few rows over all ranks that every rank needs whole."""

    site: Site
    node: fx.Node
    rows: int
    width: int


@dataclass(frozen=True)
class Found:
    """What there is in one rank's program, with the specs of its values."""

    rings: Mapping[Shape, tuple[Event, ...]]
    few: tuple[Few, ...]
    specs: Mapping[str, Spec] = field(repr=False)
    frozen: frozenset[str] = frozenset()  # weights that do not learn


def columns(matmul: fx.Node) -> list[fx.Node]:
    """The weights [o, i] by which it multiplies: one, or those that are packed."""
    weights: Any = matmul.args[1]
    return [weights] if isinstance(weights, fx.Node) else list(weights)


def find(program: Program, local: Local) -> Found:
    """The rings of `local`, a program of fixed sizes.

    Norms of an inference are made one node each. In training a move is of a ring if there are matmuls
    around it, and its way back is a move of the other kind.
    """
    training = program.training
    specs = dict(trace(local, feed(program, local), False))
    if not training:
        fuse(local.graph, specs)
    rings: dict[Shape, list[Event]] = {}
    few = []
    for node in local.graph.nodes:
        site = local.sites.get(str(node.target)) if node.op == "call_module" else None
        if site is None or site.of or site.grad != training:
            continue
        if not training and (small := _few(site, node)) is not None:
            few.append(small)
        shape = _shape(site)
        if shape is None:
            continue
        events = rings.setdefault(shape, [])
        event = _event(site, node)
        if training:
            fits = bool(event.matmuls) and site.conversion.backward.action == DUAL[event.kind]
        else:
            fits = not events or events[-1].kind != event.kind
        events += [event] * fits
    frozen = frozenset(share.weight.node for share in local.shares if not share.weight.requires_grad)
    return Found({s: tuple(e) for s, e in rings.items() if e}, tuple(few), specs, frozen)


def feed(program: Program, local: Local) -> dict[str, Spec]:
    """Shapes and dtypes of the placeholders on this rank."""
    out: dict[str, Spec] = {}
    for share in local.shares:
        shape = list(share.weight.shape)
        if share.cut is not None:
            shape[share.cut.dim] = count(share.cut.rows[local.rank])
        out[share.weight.node] = Spec(tuple(shape), share.weight.dtype, False)
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name not in out:
            out[node.name] = Spec.of(node.meta["val"])
    if local.seeded:
        out[SEED] = Spec((), torch.int64, False)
    return out


def fixed(program: Program) -> bool:
    """Whether it is of one size, without random draws or state."""
    return not unfixed(program)


def unfixed(program: Program) -> str:
    """What of it is not the same in every call, or ''."""
    values = (n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder")
    whole = all(
        isinstance(v, torch.Tensor) and all(isinstance(s, int) for s in v.shape) for v in values
    )
    if program.sizes or not whole:
        return "sizes differ from call to call"
    if program.mutations:
        return "a call changes buffers"
    return "it draws random numbers" if any(map(is_random, program.graph.nodes)) else ""


def normed(node: fx.Node) -> fx.Node | None:
    """The `add_norm` whose rows `node` are."""
    if node.target is operator.getitem and node.args[1] == 1:
        both = node.args[0]
        if isinstance(both, fx.Node) and both.target is ops.add_norm:
            return both
    return None


def only_norm(node: fx.Node) -> fx.Node | None:
    """The `add_norm` that alone reads `node`, as its term."""
    users = list(node.users)
    if len(users) == 1 and users[0].target is ops.add_norm and users[0].args[0] is node:
        return users[0]
    return None


def _event(site: Site, node: fx.Node) -> Event:
    if site.conversion.forward.action == "gather":
        readers = tuple(node.users)
        mine = all(r.target in MATMULS and _early(r, node) for r in readers)
        return Event("gather", site, node, readers if mine else ())
    (maker,) = node.all_input_nodes
    mine = maker.target is aten.linear.default and list(maker.users) == [node]
    return Event("scatter", site, node, (maker,) if mine else ())


def _early(matmul: fx.Node, x: fx.Node) -> bool:
    """Whether it multiplies `x` by what stands at the head of the program."""
    known = [n for n in matmul.all_input_nodes if n is not x]
    return matmul.args[0] is x and all(n.op == "placeholder" for n in known)


def _shape(site: Site) -> Shape | None:
    forward, cut = site.conversion.forward, site.conversion.cut
    if forward.action not in ("gather", "reduce_scatter") or cut is None or forward.op != "sum":
        return None
    bounds, width = _bounds(cut), site.shape[-1]
    outer, inner = site.shape[: cut.dim], site.shape[cut.dim + 1 : -1]
    if bounds is None or cut.dim == len(site.shape) - 1 or prod(outer) != 1 or width > WIDEST:
        return None
    if not site.dtype.is_floating_point or site.dtype.itemsize not in (2, 4):
        return None
    return Shape(tuple(b * prod(inner) for b in bounds), width, site.dtype)


def _bounds(cut: Cut) -> tuple[int, ...] | None:
    """Where the ranks' rows begin, if each has one run of them, in the order of ranks."""
    bounds = [0]
    for rows in cut.rows:
        if len(rows) != 1 or rows[0][0] != bounds[-1] or rows[0][1] <= rows[0][0]:
            return None
        bounds.append(rows[0][1])
    return tuple(bounds) if bounds[-1] == cut.size and cut.disjoint else None


def _few(site: Site, node: fx.Node) -> Few | None:
    step = site.conversion.forward
    if step.action != "all_reduce" or step.op != "sum" or not site.shape:
        return None
    rows, width = prod(site.shape[:-1]), site.shape[-1]
    if not 0 < rows <= FEW or not 0 < width <= WIDEST or not site.dtype.is_floating_point:
        return None
    return Few(site, node, rows, width) if site.dtype.itemsize in (2, 4) else None
