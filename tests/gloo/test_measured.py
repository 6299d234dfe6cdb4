"""Overlap that is predicted to gain is measured against blocking when a program is compiled.

The clock is told what to say, so that both ends are seen; the machine is a described one, slow enough that
chunks win by prediction. What ran is looked at, not what the plan says of it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import plait
from plait.cluster import Cluster
from plait.compiler import contest
from plait.plan.plan import Plan
from plait.runtime import sampler
from plait.runtime.executor import Executable
from plait.runtime.pipeline import Pipeline
from plait.runtime.sampler import Wall
from tests.compare import EXACT, demand, differences, within
from tests.gloo.harness import Pool

WIDTH, ROWS = 16, 32


def slow(n: int, compute: float = 5e3) -> Cluster:
    """Hosts of one process each, whose cores and network are so slow that rows in chunks gain."""
    machine = Cluster.of(f"loopback[{n}x1]/100gbe")
    rates = tuple((name, rate / compute) for name, rate in machine.device.flops)
    levels = tuple(replace(x, bandwidth=x.bandwidth / compute / 6) for x in machine.levels)
    return replace(machine, device=replace(machine.device, flops=rates), levels=levels)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Counts(nn.Module):
    """Two blocks, and a buffer that every forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x))
        self.seen.mul_(0.5).add_(y.detach().mean(0))
        self.calls.add_(1)
        return y


def made() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(3)
    return Counts(), torch.randn(ROWS, WIDTH)


class Told(Wall):
    """Runs the steps, and says of each what it is told; every rank a little else, seeded."""

    def __init__(self, says: Sequence[float], rank: int) -> None:
        super().__init__(torch.device("cpu"))
        self.says, self.dice = says, Random(rank)
        self.said: list[list[float]] = []
        self.steps: Sequence[Any] = ()

    def prepare(self, steps: Sequence[Any]) -> None:
        self.steps, self.said = steps, [[] for _ in steps]

    def seconds(self, step: Any) -> float:
        step()
        which = self.steps.index(step)
        self.said[which].append(self.says[which] * (1 + 0.01 * self.dice.random()))
        return self.said[which][-1]


@contextmanager
def clock(make: Callable[[Any], Wall]) -> Iterator[None]:
    """The workers are shared, so it is put back."""
    before = sampler.CLOCKS["cpu"]
    sampler.CLOCKS["cpu"] = lambda device, group: _of(make, group)
    try:
        yield
    finally:
        sampler.CLOCKS["cpu"] = before


def _of(make: Callable[[Any], Wall], group: Any) -> Wall:
    made = make(group)
    made.group = group
    return made


def refuses(group: Any) -> Wall:
    raise AssertionError("measured again")


def starts(compiled: plait.Compiled) -> list[int]:
    """Of the program of each form of call, how many moves are started and awaited apart."""
    programs = [p for shelf in compiled._programs._shelves for _, p in shelf.executables]
    modules = [[*p.stages.pieces[0].modules.values()] if isinstance(p, Pipeline) else [p.module] for p in programs]
    return [sum(str(n.target).endswith(".start") for m in each for n in m.graph.nodes) for each in modules]


def ended(group: Any, says: Sequence[float], training: bool) -> dict[str, Any]:
    """What became of a compile with such a clock, and of another one by its plan."""
    model, x = made()
    clocks: list[Told] = []
    rank, n = dist.get_rank(group), dist.get_world_size(group)

    def tell(group: Any) -> Wall:
        clocks.append(Told(says, rank))
        return clocks[-1]

    options = dict(group=group, pp=1, cluster=slow(n), training=training)
    with clock(tell):
        compiled = plait.compile(model, (x,), **options)
    plan = compiled.plan
    with clock(refuses):
        again = plait.compile(model, (x,), plan=Plan.from_json(plan.to_json()), **options)
        for each in (compiled, again):
            assert each(torch.cat([x, x])).shape == (2 * ROWS, WIDTH)
        first = plait.compile(model, (x,), measure=False, **options)
    assert Plan.from_json(plan.to_json()) == plan
    listed = first.plan.overlaps
    return {
        "forms": [o.form for o in plan.overlaps], "predicted": starts(first),
        "choices": [[o.form for o in listed], [o.swapped.form for o in listed], ["whole"] * len(listed)],
        "clocks": len(clocks), "slowest": _slowest(group, clocks[0].said), "measured": plan.measured,
        "digests": (plan.digest, again.plan.digest), "starts": starts(compiled) + starts(again),
        "explained": compiled.explain(), "seconds": plan.seconds,
        "reasons": {o.reason for o in plan.overlaps if o.form == "whole"},
    }  # fmt: skip


def _slowest(group: Any, said: list[list[float]]) -> tuple[float, ...]:
    """The median of each program, of what its slowest rank took."""
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, said, group=group)
    return tuple(median(map(max, zip(*each, strict=True))) for each in zip(*told, strict=True))


# The choice that is predicted to be the best, the second, and blocking: which of them is kept.
ENDS = [
    ((0.012, 0.013, 0.014), 0), ((0.014, 0.013, 0.012), 2), ((0.014, 0.01402, 0.01401), 2), ((0.013, 0.012, 0.014), 1),
    ((0.01201, 0.012, 0.014), 0),
]  # fmt: skip

QUICK = {(2, True, 0), (3, False, 1), (2, False, 3)}


@pytest.mark.parametrize(
    ("n", "training", "says", "kept"),
    [
        pytest.param(n, training, *end, marks=() if (n, training, i) in QUICK else pytest.mark.full)
        for n, training in ((2, True), (2, False), (3, True), (3, False))
        for i, end in enumerate(ENDS)
    ],
)
@pytest.mark.sample(1)
def test_the_fastest_is_kept(pool: Pool, n: int, training: bool, says: tuple[float, ...], kept: int) -> None:
    overlapped = kept < 2
    one, *others = pool.run(ended, n, says, training, timeout=120.0)
    for other in others:
        assert (other["digests"], other["measured"]) == (one["digests"], one["measured"])
    measured = one["measured"]
    assert one["clocks"] == 1 and measured.seconds == one["slowest"] and measured.samples > 4
    assert measured.blocking is not overlapped and measured.kept == kept
    first, second, whole = one["choices"]
    assert one["forms"] == one["choices"][kept] and first != second and whole not in (first, second)
    assert len(set(one["digests"])) == 1, "the saved plan is run as it is"
    ours, _, other, _ = one["starts"]  # what ran, and runs by the plan, in this form of call and another
    assert ours == other and all(bool(count) is overlapped for count in one["starts"])
    assert (ours == one["predicted"][0]) is (kept == 0)
    assert sorted(measured.predicted) == list(measured.predicted) and one["seconds"] == measured.predicted[kept]
    mine, blocking = (f"{measured.seconds[i] * 1e3:.3g} ms" for i in (kept if overlapped else measured.best, 2))
    said = f"measured {mine} against {blocking} blocking"
    assert said in one["explained"] and ("blocking is kept" in one["explained"]) is not overlapped
    assert (said in one["reasons"]) is not overlapped and any("instead" in r for r in one["reasons"]) is overlapped


def stepped(group: Any, measure: bool) -> tuple[dict[str, Any], list[Any]]:
    """A compile and a step: what they give and change, and what the compile ran over whose weights."""
    model, x = made()
    x.requires_grad_()
    calls: list[Any] = []
    before = Executable.__call__

    def noted(self: Any, weights: Any, leaves: Any, seed: Any) -> Any:
        out = before(self, weights, leaves, seed)
        calls.append({n: w.data_ptr() for n, w in weights.items()})
        return out

    torch.manual_seed(11)
    drawn = torch.get_rng_state()
    Executable.__call__ = noted  # type: ignore[method-assign]
    try:
        with clock(lambda group: Told((0.012, 0.013, 0.014), dist.get_rank(group))):
            compiled = plait.compile(
                model, (x,), group=group, pp=1, cluster=slow(2), training=True, measure=measure
            )
    finally:
        Executable.__call__ = before  # type: ignore[method-assign]
    assert torch.equal(torch.get_rng_state(), drawn), "a compile draws nothing"
    assert x.grad is None and all(p.grad is None for p in (*model.parameters(), *compiled.parameters()))
    assert all(starts(compiled))
    out = compiled(x)
    assert compiled.get_buffer("calls") == 1, "and makes no call"
    out.square().sum().backward()
    found = {"out": out.detach(), "x": x.grad, **compiled.gradients(), **compiled.state_dict(), "next": torch.rand(3)}
    own = {n: p.data_ptr() for n, p in compiled.named_parameters()}
    return found, [{n: at[n] == own[n] for n in own} | {"seen": at["seen"] == compiled.seen.data_ptr()} for at in calls]


def test_measuring_leaves_nothing_behind(pool: Pool) -> None:
    """Bit-equal with and without it: outputs, gradients, buffers, draws. Weights are not there twice; what a call
    changes is."""
    measured, plain = pool.run(stepped, 2, True, timeout=120.0), pool.run(stepped, 2, False, timeout=120.0)
    for (got, calls), (want, none) in zip(measured, plain, strict=True):
        demand(differences(got, want, close=EXACT))
        assert not none and len(calls) > 10
        assert all(call == dict.fromkeys(call, True) | {"seen": False} for call in calls)


def resized(group: Any) -> tuple[bool, list[bool]]:
    """A batch of any size is measured as the example has it; other sizes run the program that was kept."""
    torch.manual_seed(3)
    model = nn.Sequential(Block(), Block()).eval()
    x = torch.randn(2, ROWS, WIDTH)
    with clock(lambda group: Told((0.012, 0.013, 0.014), dist.get_rank(group))):
        compiled = plait.compile(
            model, (x,), group=group, tp=2, cluster=slow(2), training=True, dynamic={"input": {0: "batch"}}
        )
    measured = compiled.plan.measured
    assert measured is not None and measured.seconds
    for batch in (1, 2, 5):
        x = torch.randn(batch, ROWS, WIDTH)
        demand(differences(compiled(x).detach(), model(x).detach(), close=within(dtype=torch.float32)))
    return measured.blocking, list(map(bool, starts(compiled)))


def test_sizes_that_differ_are_measured_as_the_example_has_them(pool: Pool) -> None:
    assert pool.run(resized, 2, timeout=120.0) == [(False, [True])] * 2


def replicated(group: Any) -> tuple[str, list[bool]]:
    """Replicas with clocks that differ: all take what rank 0 saw."""
    model, rank = nn.Sequential(Block(), Block()).eval(), dist.get_rank(group)
    says = (0.012, 0.013, 0.014) if rank < 2 else (0.014, 0.013, 0.012)
    with clock(lambda group: Told(says, rank)):
        compiled = plait.compile(
            model, (torch.randn(ROWS, WIDTH),), group=group, tp=2, dp=2, cluster=slow(4)
        )
    compiled(torch.randn(ROWS, WIDTH))
    return compiled.plan.digest, list(map(bool, starts(compiled)))


@pytest.mark.full
def test_replicas_take_what_rank_0_saw(pool: Pool) -> None:
    found = pool.run(replicated, 4, timeout=120.0)
    assert len({digest for digest, _ in found}) == 1 and [s for _, s in found] == [[True]] * 4


def in_stages(group: Any, says: Sequence[float], mesh: dict[str, int], training: bool) -> dict[str, Any]:
    """As `ended`, of a compile in stages, micro-batches or replicas, and what it gives then."""
    torch.manual_seed(3)
    model = nn.Sequential(Block(), Block(), Block(), Block()).eval()
    x = torch.randn(ROWS, WIDTH)
    options = dict(group=group, cluster=slow(4), training=training, **mesh)
    clocks: list[Told] = []

    def tell(group: Any) -> Wall:
        clocks.append(Told(says, dist.get_rank()))
        return clocks[-1]

    with clock(tell):
        compiled = plait.compile(model, (x,), **options)
    with clock(refuses):
        again = plait.compile(model, (x,), plan=Plan.from_json(compiled.plan.to_json()), **options)
        first = plait.compile(model, (x,), measure=False, **options)
    assert len(clocks) == 1 and all(p.grad is None for p in compiled.parameters())
    for each in (compiled, again):
        out = each(x)
        if training:
            out.square().sum().backward()
    found = {"out": out.detach(), **(again.gradients() if training else {})}
    want = {"out": model(x).detach()}
    if training:
        model(x).square().sum().backward()
        want |= {n: p.grad for n, p in model.named_parameters()}
    demand(differences(found, want, close=within(dtype=torch.float32)))
    plan, before = compiled.plan, first.plan
    assert plan.measured is not None and before.staged is not None and plan.measured.seconds
    return {
        "kept": plan.measured.kept, "digests": (plan.digest, again.plan.digest),
        "starts": starts(compiled) + starts(again), "predicted": plan.measured.predicted, "seconds": plan.seconds,
        "forms": [o.form for o in plan.overlaps], "first": before.seconds,
        "second": [o.swapped.form for o in before.overlaps],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("mesh", "training", "kept"),
    [
        ({"tp": 2, "pp": 2, "micro_batches": 2}, True, 0),
        pytest.param({"tp": 2, "pp": 2, "micro_batches": 2}, False, 1, marks=pytest.mark.full),
        pytest.param({"tp": 2, "dp": 2}, True, 2, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_stages_and_replicas_are_measured(pool: Pool, mesh: dict[str, int], training: bool, kept: int) -> None:
    says = [0.013, 0.013, 0.013]
    says[kept] = 0.012
    one, *others = pool.run(in_stages, 4, says, mesh, training, timeout=120.0)
    assert all(other["digests"] == one["digests"] for other in others) and len(set(one["digests"])) == 1
    assert all(each["kept"] == kept and each["starts"][0] == each["starts"][1] for each in (one, *others))
    assert all(bool(count) is (kept < 2) for count in one["starts"])
    assert one["predicted"][0] == pytest.approx(one["first"]) and one["seconds"] == one["predicted"][kept]
    assert sorted(one["predicted"]) == list(one["predicted"])
    assert (one["forms"] == one["second"]) is (kept == 1)


class Looks(nn.Module):
    """Rows of a table, looked up at positions that are inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.second = nn.Parameter(torch.randn(8, WIDTH)), Block(), Block()

    def forward(self, at: Tensor) -> Tensor:
        return self.second(self.first(self.table[at]))


def unmeasured(group: Any, what: str) -> str:
    """What is said of a program that is not measured, though overlap is predicted to gain."""
    model, x = made()
    machine = slow(2)
    if what == "elsewhere":
        model, machine = nn.Sequential(Block(), Block()).eval(), Cluster.of("dgx-h100[2]")
    if what == "does not run":
        model, x = Looks(), torch.full((ROWS,), 8)
    if what == "without values":
        x = x.to("meta")
    limits = {"short": ("SHORT", 1e9), "long": ("LONG", 1e-9)}
    before = {name: getattr(contest, name) for name, _ in limits.values()}
    for name, value in [limits[what]] if what in limits else ():
        setattr(contest, name, value)
    try:
        with clock(Wall if what == "does not run" else refuses):
            compiled = plait.compile(model, (x,), group=group, tp=2, cluster=machine)
    finally:
        for name, value in before.items():
            setattr(contest, name, value)
    measured = compiled.plan.measured
    assert measured is not None and not measured.seconds and not measured.blocking
    assert Plan.from_json(compiled.plan.to_json()) == compiled.plan
    assert str(measured) in compiled.explain()
    out = compiled(torch.randn(ROWS, WIDTH) if what != "does not run" else torch.arange(ROWS) % 8)
    assert out.shape == (ROWS, WIDTH)
    return str(measured)


UNMEASURED = {
    "elsewhere": "the plan is for cuda devices, and these ranks have cpu",
    "without values": "args[0]: on the meta device, and without values",
    "does not run": "the example inputs do not run: IndexError: index 8 is out of bounds",
    "short": "a call is predicted to take",
    "long": "a call is predicted to take",
}


@pytest.mark.parametrize("what", UNMEASURED)
@pytest.mark.sample(3)
def test_what_is_not_measured_says_why(pool: Pool, what: str) -> None:
    one, other = pool.run(unmeasured, 2, what, timeout=120.0)
    assert one == other and one.startswith(f"overlap is not measured: {UNMEASURED[what]}")


def unasked(group: Any, options: dict[str, Any]) -> bool:
    model, x = made()
    with clock(refuses):
        compiled = plait.compile(model, (x,), group=group, tp=2, cluster=slow(2), **options)
    return compiled.plan.measured is None


@pytest.mark.parametrize("options", [{"measure": False}, {"overlap": 2}, {"overlap": "off"}], ids=str)
def test_nothing_is_measured_unasked(pool: Pool, options: dict[str, Any]) -> None:
    assert pool.run(unasked, 2, options, timeout=120.0) == [True] * 2


class Ends(Told):
    """On rank 1, in the middle of it."""

    def __init__(self, rank: int, kill: bool) -> None:
        super().__init__((0.012, 0.013, 0.014), rank)
        self.rank, self.kill = rank, kill

    def seconds(self, step: Any) -> float:
        if self.rank == 1 and len(self.said[0]) == 3:
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("a clock that stands")
        return super().seconds(step)


def breaks(group: Any, kill: bool) -> None:
    model, x = made()
    with clock(lambda group: Ends(dist.get_rank(group), kill)):
        plait.compile(model, (x,), group=group, tp=3, cluster=slow(3))


@pytest.mark.parametrize("kill", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_rank_that_fails_is_named_by_all(pool: Pool, kill: bool) -> None:
    found = pool.errors(breaks, 3, kill, timeout=120.0)
    for failure in [f for f in found if f.kind != "Died"]:
        assert failure.kind == "RankError" and failure.message.startswith("measure: rank 1"), failure.message
        assert ("SIGKILL" if kill else "a clock that stands") in failure.message
    assert [f.kind for f in found] == ["RankError", "Died" if kill else "RankError", "RankError"]
