"""Sums of small weights' gradients in one collective: what goes into a bucket, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from plait.passes.buckets import bucket
from plait.passes.partition import Local
from plait.rules.moves import Cut, Step
from plait.runtime.transport import BucketModule, MoveModule, Transport
from tests.lockstep.test_direct_proof import decoder, planned


@dataclass(frozen=True)
class Twice(Transport):
    """Two ranks that have the same: a sum is twice the value."""

    sums: list[int] = field(default_factory=list, compare=False)

    def carry_out(self, step: Step, x: Tensor, cut: Cut | None, algorithm: str) -> Tensor:
        if step.action != "all_reduce":
            return x
        self.sums.append(x.numel())
        return x * 2

    @contextmanager
    def way_back(self, x: Tensor) -> Iterator[None]:
        yield


def local() -> Local:
    model, x = decoder()
    return planned(model.train(), (x,), {}, 2, True).local(0)


def small(made: Local) -> list[str]:
    """Sites of weights that come as they are, and whose gradients are summed."""
    alone = [n for n in made.graph.nodes if n.op == "call_module" and n.args[0].op == "placeholder"]
    return [str(n.target) for n in alone if str(made.sites[str(n.target)].conversion) == "identity/all_reduce"]


def test_norms_are_one_bucket() -> None:
    made = local()
    want = small(made)
    assert len(want) > 3
    (found,) = bucket(made, {}).items()
    assert found == ("bucket_0", tuple(want))
    called = [str(n.target) for n in made.graph.nodes if n.op == "call_module"]
    assert not set(want) & set(called)
    made.graph.lint()


@pytest.mark.full
def test_collectives_by_other_algorithms_are_apart() -> None:
    made = local()
    want = small(made)
    found = bucket(made, dict.fromkeys([f"{s}.backward" for s in want[:2]], "ring"))
    assert list(found.values()) == [tuple(want[:2]), tuple(want[2:])]


@pytest.mark.full
def test_what_is_large_or_alone_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    made = local()
    first = next(s for s in made.sites.values() if s.name in small(made))
    monkeypatch.setattr("plait.passes.buckets.SMALL", first.dtype.itemsize * first.shape[0] - 1)
    assert not bucket(made, {})


def test_the_sum_is_one_and_each_weight_gets_its_own() -> None:
    made = local()
    names = small(made)
    sites = [made.sites[n] for n in names]
    weights = [torch.randn(s.shape, requires_grad=True) for s in sites]

    def gradients(apart: bool, loss: Any) -> tuple[list[Tensor | None], list[int]]:
        transport = Twice(None, 0, 2)
        if apart:
            outs = [MoveModule(s, transport, "native", "native")(w) for s, w in zip(sites, weights, strict=True)]
        else:
            outs = BucketModule(sites, transport, "native")(*weights)
        found = torch.autograd.grad(loss(outs), weights, allow_unused=True, retain_graph=True)
        return list(found), transport.sums

    for loss in (
        lambda outs: sum((x.square() * (i + 1)).sum() for i, x in enumerate(outs)),
        lambda outs: outs[0].sin().sum() + outs[2].sum(),  # the others are not reached
    ):
        want, each = gradients(True, loss)
        got, once = gradients(False, loss)
        assert len(each) > 1 and once == [sum(each)]
        for a, b in zip(got, want, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)


def test_a_graph_without_moves_is_as_it_was() -> None:
    graph = fx.Graph()
    graph.output((graph.placeholder("x"),))
    assert not bucket(Local(0, graph, (), {}, {}, False, ()), {})
