"""Nothing is replicated silently: what stays whole, its bytes and why; who holds heads that are shared."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.capture import capture
from plait.plan import planner
from plait.plan.kept import CHEAPER, DIAGONAL, UNREAD
from plait.plan.plan import Plan
from plait.program import LARGE
from plait.report import tables
from plait.report.explain import explain
from tests import zoo
from tests.cases import CASES
from tests.gloo import prove


class Odd(nn.Module):
    """A weight that is split, one too short, one that is sorted, and one that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(64, 4096)
        self.short = nn.Parameter(torch.randn(3))
        self.order = nn.Parameter(torch.randn(64))
        self.idle = nn.Parameter(torch.randn(7))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.wide(x + self.order.sort().values).relu().sum(-1) * self.short[:1]
        return y


def planned(tp: int) -> Plan:
    return plait.plan(Odd(), (torch.randn(512, 64),), cluster=f"dgx-h100[{tp}]", tp=tp)


def test_what_stays_whole_is_listed_with_its_bytes_and_the_reason() -> None:
    plan = planned(4)
    known = {k.name: k for k in plan.kept}
    assert known["short"].nbytes == 12 and "each of 4 ranks" in known["short"].reason
    assert known["order"].nbytes == 256 and "aten.sort" in known["order"].reason
    assert (known["idle"].nbytes, known["idle"].reason) == (28, UNREAD)
    assert {n for n, how in plan.weights.items() if how == "whole"} == known.keys() - {"idle"}
    assert all(k.reason for k in plan.kept)
    assert Plan.from_json(plan.to_json()) == plan
    said, shown = explain(plan), _text(plan)
    for k in plan.kept:
        assert any(k.reason in line and str(k) in line for line in said.splitlines())
        assert f"whole: {k.reason}" in shown
    assert planned(1).kept == ()


def test_a_weight_that_could_be_split_says_that_it_does_not_pay() -> None:
    model, args, kwargs = zoo.build("llama")
    plan = plait.plan(model, args, kwargs, cluster="dgx-h100[2]", tp=2)
    assert {k.name: k.reason for k in plan.kept}["model.norm.weight"] == CHEAPER


def divided(case: str) -> Plan:
    setup = CASES[case].setup()
    options = planner.Options(2, prove.free(2))
    return planner.make(capture(setup.model, setup.args, training=True), options).plan


def test_two_square_weights_that_share_a_bias_are_both_split() -> None:
    assert [k.name for k in divided("bias_of_two_squares").kept] == ["a.bias"]


def test_rows_that_are_tied_to_one_another_are_named_as_the_reason() -> None:
    known = {k.name: k.reason for k in divided("tiled_times_repeated").kept}
    assert known["up.bias"] == DIAGONAL


def test_shared_heads_name_the_ranks_that_hold_them() -> None:
    model, args, kwargs = zoo.build("llama")  # 6 query heads over 3
    shown = _text(plait.plan(model, args, kwargs, cluster="dgx-h100[4]", tp=4))
    assert "q_proj.weight dim 0 as 2 + 2 + 1 + 1 query heads 2" in shown
    assert "k_proj.weight dim 0 as heads 0:1 | 1:2 | 2:3 | 2:3 of 3, head 2 on ranks 2 and 3 2" in shown


def _text(plan: Plan) -> str:
    from rich.console import Console

    console = Console(width=300, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(tables.plan_table(plan, "a model"))
    return " ".join(console.export_text().split())


class Adds(nn.Module):
    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rows


@pytest.mark.parametrize("size", [3, LARGE])
@pytest.mark.sample(1)
def test_constants_count_by_their_values(size: int) -> None:
    x, rows = torch.randn(size), torch.arange(float(size))
    first, same = (capture(Adds(rows.clone()), (x,)).digest for _ in range(2))
    rows[-1] += 1
    assert first == same != capture(Adds(rows), (x,)).digest
