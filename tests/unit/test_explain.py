"""The report says of every collective what it runs beside, or why beside nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import plait
from plait.plan.plan import Plan
from plait.report.explain import explain


def blocks(bias: bool) -> nn.Module:
    """Four times up, GELU, down and a norm, as wide as in the wild, without values."""
    with torch.device("meta"):
        return nn.Sequential(
            *(
                nn.Sequential(
                    nn.Linear(512, 2048, bias), nn.GELU(), nn.Linear(2048, 512, bias), nn.LayerNorm(512)
                )
                for _ in range(4)
            )
        )


def planned(shape: tuple[int, ...], tp: int, bias: bool, overlap: str | int) -> Plan:
    x = torch.empty(*shape, 512, device="meta")
    return plait.plan(blocks(bias), (x,), cluster=f"dgx-h100[{tp}]", tp=tp, overlap=overlap)


def lines(plan: Plan) -> list[str]:
    """What is said of each collective."""
    text = explain(plan).partition("\nregions: ")[0].splitlines()
    return [line.split("; ", 1)[1] for p in plan.collectives for line in text if f"  {p.name}: " in line]


@pytest.mark.parametrize(
    ("tp", "overlap"),
    [(2, "auto"), (4, 4), *(pytest.param(*one, marks=pytest.mark.full) for one in ((4, "auto"), (2, 4)))],
)
def test_no_collective_is_passed_over(tp: int, overlap: str | int) -> None:
    """In three dims, in two, with and without biases: the same, and each with its reason."""
    plans = [planned((4, 256), tp, True, overlap), planned((1024,), tp, False, overlap)]
    for plan in plans:
        said = lines(plan)
        assert len(said) == len(plan.collectives) >= 4
        assert all(s.startswith("overlapped with ") or len(s) > len("not overlapped: ") for s in said)
        assert overlap == "auto" or all(s.startswith("overlapped") for s in said)
    kinds = [sorted(p.collective for p in plan.collectives) for plan in plans]
    assert all(k == kinds[0] for k in kinds), kinds
