"""The report says of every collective what it runs beside, or why beside nothing."""

from __future__ import annotations

from typing import Any

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
    text = explain(plan).partition("\ncollectives: ")[2].splitlines()
    return [line.partition(f"  {p}; ")[2] for p in plan.collectives for line in text if f"  {p}; " in line]


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


class Mean(nn.Module):
    """One number, to which every rank has a term."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 256, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).square().mean()


PEERS = "nothing moves through the peers' memory"
WHY: list[tuple[dict[str, Any], str]] = [
    ({"dynamic": {"input": {0: "rows"}}}, f"sizes differ from call to call, so {PEERS}; "),
    ({"dynamic": {"input": {0: "rows"}}, "training": True}, f"sizes differ from call to call, so {PEERS}"),
    ({"algorithm": "ring"}, f"its algorithm was asked for, so {PEERS}; "),
    ({"model": nn.Dropout().train(), "training": True}, f"it draws random numbers, so {PEERS}"),
    ({"model": nn.BatchNorm1d(512, device="meta").train(), "training": True}, f"a call changes buffers, so {PEERS}"),
    ({"cluster": "pcie4[2]"}, "these devices do not reach each other's memory; "),
    ({"rows": 4096, "training": True}, "by rows through the peers' memory a call is predicted to take "),
    ({"rows": 16}, "through the peers' memory by a kernel, one hop, predicted "),
    ({"cluster": "dgx-h100[4]", "pp": 2}, "stages on CUDA devices run without chunks"),
    ({"cluster": "loopback[2]"}, "transfers take the cores that compute"),
    ({"cluster": "loopback[2]", "overlap": "off"}, "overlap is off"),
]


@pytest.mark.parametrize(("asked", "why"), WHY, ids=[why for _, why in WHY])
def test_why_nothing_runs_beside_a_collective(asked: dict[str, Any], why: str) -> None:
    options = {"cluster": "dgx-h100[2]", "tp": 2, "pp": 1} | asked
    model = nn.Sequential(blocks(True), options.pop("model", nn.Identity()))
    x = torch.empty(options.pop("rows", 1024), 512, device="meta")
    plan = plait.plan(model, (x,), **options)
    assert any(said.startswith(f"not overlapped: {why}") for said in lines(plan)), lines(plan)
    assert Plan.from_json(plan.to_json()) == plan


def test_a_single_number_has_no_chunks() -> None:
    plan = plait.plan(Mean(), (torch.empty(1024, 64, device="meta"),), cluster="loopback[2]", tp=2)
    assert "not overlapped: it is a single number" in lines(plan)


def test_rows_that_travel_beside_matmuls_name_them() -> None:
    plan = planned((8, 1024), 2, True, "auto")
    said = [text for text in lines(plan) if " through the peers' memory, ring 0" in text]
    assert said and all(text.startswith("overlapped with linear") for text in said), lines(plan)
