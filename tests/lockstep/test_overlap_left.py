"""What a forced number of chunks leaves whole, against an oracle that knows no equations.

The oracle takes the operator whose value a collective moves, and runs it on pieces of its operands: if
pieces of the operands, each cut along one dim or not at all, give the pieces of its value along a dim that
the move does not cut, then the collective can be done in chunks. One that is not is excused only if its
operators run in chunks with others.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from plait.errors import PlaitError
from plait.passes.overlap.regions import regions
from plait.passes.partition import Site, partition
from plait.plan.planner import Planned
from tests import pretend, zoo
from tests.cases import Case, Setup
from tests.compare import demand
from tests.lockstep.test_overlap_forced import EXACT, NARROW, forced

aten = torch.ops.aten
VIEWS = dict.fromkeys((aten.view.default, aten._unsafe_view.default), aten.reshape.default)
MOST = 4096  # ways to cut the operands of one operator


def values(planned: Planned, setup: Setup) -> dict[fx.Node, Any]:
    """Of every node, on one device."""
    program, found = planned.program, dict[fx.Node, Any]()
    weights = pretend.values(setup, program)
    held = {w.node: weights[w.name] for w in program.weights}
    leaves, _ = pytree.tree_flatten(setup.inputs())
    held |= {i.node: x for i, x in zip(program.inputs, leaves, strict=True) if i.node is not None}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            found[node] = held[node.name].detach()
        elif node.op == "get_attr":
            found[node] = program.constants[str(node.target)]
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), found.__getitem__)
            with torch.no_grad():
                found[node] = VIEWS.get(node.target, node.target)(*args, **kwargs)  # type: ignore[operator]
    return found


def cuttable(node: fx.Node, known: dict[fx.Node, Any], dim: int) -> bool:
    """Whether pieces of the operands give the pieces of the value along `dim`."""
    whole = known[node]
    size = whole.shape[dim]
    operands = [i for i in node.all_input_nodes if isinstance(known[i], Tensor)]
    ways = [[None, *(d for d, s in enumerate(known[i].shape) if s == size)] for i in operands]
    cuts = [(0, size // 2), (size // 2, size)]
    tried = (c for _, c in zip(range(MOST), product(*ways), strict=False) if any(at is not None for at in c))
    for choice in tried:
        at = dict(zip(operands, choice, strict=True))
        if all(_gives(node, known, at, lo, hi, whole.narrow(dim, lo, hi - lo)) for lo, hi in cuts):
            return True
    return False


def _gives(node: fx.Node, known: dict[fx.Node, Any], at: dict[fx.Node, Any], lo: int, hi: int, want: Tensor) -> bool:
    def piece(i: fx.Node) -> Any:
        dim = at.get(i)
        return known[i] if dim is None else known[i].narrow(dim, lo, hi - lo)

    args, kwargs = fx.map_arg((node.args, node.kwargs), piece)
    try:
        with torch.no_grad():
            got = node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, IndexError):
        return False
    return got.shape == want.shape and torch.allclose(got, want, rtol=1e-6, atol=1e-9, equal_nan=True)


def whole(planned: Planned) -> Iterator[tuple[Site, fx.Node]]:
    """The collectives in one piece whose operators are in no region in chunks, and in none that crosses one."""
    local = partition(planned.program, planned.description, planned.strategies, planned.grads, 0)
    woven = {site.of for site in planned.local(0).sites.values()}
    nodes = {node.name: node for node in planned.program.graph.nodes}
    taken = {node for region in planned.chosen for node in region.nodes}
    others = [r for r in regions(planned.flow, planned.plan.tp) if r.members & taken]
    for site in local.sites.values():
        node = nodes[site.source]
        near = {node, *node.users}
        if near & taken or any(r.members & near for r in others) or planned.strategies[node].statistics:
            continue
        conversion = site.conversion
        talks = conversion.forward.collective or (site.grad and conversion.backward.collective)
        if talks and site.name not in woven and node.op == "call_function":
            yield site, node


def faults(planned: Planned, setup: Setup) -> Iterator[str]:
    known = values(planned, setup)
    for site, node in whole(planned):
        value, cut = known[node], site.conversion.cut
        for dim in range(value.dim() if isinstance(value, Tensor) else 0):
            free = (cut is None or cut.dim != dim) and plain(planned, node, dim)
            if free and cuttable(node, known, dim):
                yield f"{site.name} of {node.name} {list(value.shape)} can be cut along dim {dim}"


def plain(planned: Planned, node: fx.Node, dim: int) -> bool:
    """Not joined of segments, of which each piece would hold the others; no diagonal; and no factor that is
    cut in space beside it, into single rows."""
    dims = [f.root() for f in planned.description.dims[node][0]]
    f = dims[dim]
    near = [n for n in (node, *node.users, *node.all_input_nodes) if n in planned.strategies]
    splits = [s for n in near if (s := planned.strategies[n].split) is not None and s.touches(f)]
    own = planned.strategies[node].split
    if own is not None and own.touches(f):
        return False
    return f.kind == "free" and f.size > 1 and dims.count(f) == 1 and all(min(s.sizes(f)) > 1 for s in splits)


MODELS = [n for n in zoo.NAMES if n not in NARROW]
SOME = ("bert", "t5", "opt")


@pytest.mark.parametrize("n", (2, pytest.param(3, marks=pytest.mark.full)))
@pytest.mark.parametrize("name", [m if m in SOME else pytest.param(m, marks=pytest.mark.full) for m in MODELS])
@pytest.mark.sample(1)
def test_no_collective_of_a_model_is_left_whole(name: str, n: int) -> None:
    model, args, kwargs = zoo.build(name)
    setup = Setup(model, args, kwargs).to(torch.float64)
    planned = forced(pretend.trace(setup, True), n, 2)
    demand(list(faults(planned, setup)), about=name)


@pytest.mark.parametrize("case", [c for c in EXACT if torch.float64 in c.dtypes], ids=lambda c: c.id)
def test_no_collective_of_a_case_is_left_whole(case: Case) -> None:
    setup = case.setup(torch.float64)
    try:
        planned = forced(pretend.trace(setup, case.training), 2, 2)
    except PlaitError as error:
        if case.right == "R2":
            pytest.skip(f"refused: {error}")
        raise
    demand(list(faults(planned, setup)), about=case.id)
