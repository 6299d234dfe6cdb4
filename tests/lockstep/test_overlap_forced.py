"""A forced number of chunks is applied wherever it can be, and changes nothing that is computed.

Every case and every model is planned with overlap forced, woven, and run as pretend ranks in
lockstep, forward and backward, against the unsharded module; the schedules of its ranks are proven
together. A region that could be cut and is not, without a cut one in its way, is a fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plait.errors import PlaitError
from plait.passes.overlap.arrange import arranged
from plait.passes.overlap.check import check
from plait.passes.overlap.regions import Region, regions
from plait.passes.overlap.schedule import Schedule, schedule
from plait.passes.partition import Local
from plait.plan import planner
from plait.plan.planner import Planned
from plait.program import Program
from plait.report.explain import explain
from tests import pretend, zoo
from tests.cases import CASES, Case, Setup
from tests.compare import Close, Run, demand, discrepancies, plain, reference, within
from tests.gloo.prove import free

COUNTS = (2, 3, 4)
NARROW = ("mixtral", "qwen3moe")  # grouped matmuls know no float64
EXACT = [c for c in CASES.values() if c.exact]


def forced(program: Program, n: int, count: int) -> Planned:
    """Planned where transfers cost nothing, so that all that can be split is."""
    return planner.make(program, planner.Options(n, free(n), overlap=count))


def left_whole(planned: Planned, n: int, count: int) -> Iterator[str]:
    """Faults: regions that are not cut, or not in as many chunks as asked for and possible."""
    for region in regions(planned.flow, n):
        form = planned.chosen.get(region)
        if form is not None and form.count != min(count, region.most):
            yield f"{region.name} is in {form}, of {region.most} rows"
        if form is None and not _in_the_way(planned, region):
            yield f"{region.name} could be cut"


def _in_the_way(planned: Planned, region: Region) -> bool:
    """Of nodes in chunks of another factor, or all of whose moves others do in chunks, or in a circle."""
    taken = [r.members for r in planned.chosen if r.members & region.members]
    moved = {key for r in planned.chosen for key in r.keys}
    return bool(taken) or region.keys <= moved or arranged(planned.program.graph, [*planned.chosen, region]) is None


def prove(planned: Planned, setup: Setup, n: int, train: bool, want: Run, close: Close) -> None:
    ranks = tuple(planned.local(rank) for rank in range(n))
    solution: Any = SimpleNamespace(strategies=planned.strategies)
    divided = pretend.Divided(planned.program, planned.description, solution, planned.grads, ranks)
    for rank, got in enumerate(pretend.run(divided, setup, train)):
        demand(discrepancies(got, want, close), about=f"rank {rank} of {n}")
    demand([f"{name} has no halves" for name in halved(ranks[0]) if not ranks[0].sites[name].of])
    schedules = [schedule(local, n) for local in ranks]
    check([s.twice() for s in schedules])
    assert all(Schedule.parse(str(s)) == s for s in schedules)


def halved(local: Local) -> list[str]:
    """The moves that are started and waited for apart."""
    names = (str(n.target).partition(".") for n in local.graph.nodes if n.op == "call_module")
    return [name for name, _, half in names if half == "start"]


def told(planned: Planned) -> None:
    """What was done to every region stands in `explain()`."""
    text = explain(planned.plan)
    for region, form in planned.chosen.items():
        assert f"{region.name}: {form}" in text


MODELS = [
    pytest.param(
        name, n, count, id=f"{name}-{n}-{count}",
        marks=() if (n, count) == ((2, 3)[i % 2], COUNTS[i % 3]) else pytest.mark.full,
    )
    for i, name in enumerate(zoo.NAMES)
    for n, count in ((2, COUNTS[i % 3]), (3, COUNTS[i % 3]), (2, COUNTS[(i + 1) % 3]), (3, COUNTS[(i + 2) % 3]))
]  # fmt: skip


@pytest.mark.parametrize(("name", "n", "count"), MODELS)
def test_models(name: str, n: int, count: int) -> None:
    model, args, kwargs = zoo.build(name)
    setup = Setup(model, args, kwargs).to(torch.float32 if name in NARROW else torch.float64)
    planned = forced(pretend.trace(setup, True), n, count)
    assert planned.chosen, "nothing is cut"
    demand(list(left_whole(planned, n, count)), about=name)
    told(planned)
    # norms of transformers compute in float32 whatever the model's dtype: sums in chunks round there
    prove(planned, setup, n, True, plain(setup), within(dtype=torch.float32))


CASES_GRID = [
    pytest.param(
        c, n, count, id=f"{c.id}-{n}-{count}",
        marks=() if (n, count) == (2, COUNTS[i % 3]) else pytest.mark.full,
    )
    for i, c in enumerate(EXACT)
    for n, count in ((2, COUNTS[i % 3]), (3, COUNTS[(i + 1) % 3]))
]  # fmt: skip


@pytest.mark.parametrize(("case", "n", "count"), CASES_GRID)
def test_cases(case: Case, n: int, count: int) -> None:
    dtype = case.dtypes[-1]
    setup = case.setup(dtype)
    try:
        planned = forced(pretend.trace(setup, case.training), n, count)
    except PlaitError as error:
        if case.right == "R2":
            pytest.skip(f"refused: {error}")
        raise
    demand(list(left_whole(planned, n, count)), about=case.id)
    told(planned)
    prove(planned, setup, n, case.training, *reference(case, setup, dtype))
