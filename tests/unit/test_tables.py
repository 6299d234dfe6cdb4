"""Tables: what repeats is one row, bytes are counted from schedules, the claim is spelled out."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console
from rich.table import Table

from plait.plan.plan import Candidate, Choice, Placed, Plan, Staged
from plait.report import tables
from plait.report.explain import explain
from plait.rules import aten


def text(table: Table) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(table)
    return out.getvalue()


def placed(i: int, algorithm: str = "ring") -> Placed:
    return Placed(f"m{i}", "all_reduce", 4000, algorithm, 1e-5, "linear", f"layers.{i}.mlp")


def plan(*algorithms: str) -> Plan:
    return Plan(
        program="p",
        tp=2,
        pp=1,
        dp=1,
        cluster="loopback[2]",
        training=False,
        objective="latency",
        strategies={},
        splits={"f1": "f1: 0 6 9", "f2": "f2: 0 6 9", "f3*f4": "f3*f4: 0 4 8"},
        weights={
            "layers.0.up.weight": "shard(f1) on dim 0",
            "layers.1.up.weight": "shard(f2) on dim 0",
            "head.weight": "shard(f3*f4) on dim 1",
            "norm.weight": "whole",
        },
        collectives=tuple(placed(i, a) for i, a in enumerate(algorithms)),
        whole={"cumsum": "its order is fixed", "sort": "its order is fixed"},
        bytes_per_rank=(600, 300),
        bytes_whole=900,
        seconds=2e-3,
        seconds_alone=3e-3,
        notes=("a mask was recognised",),
    )


def test_layers_that_repeat_are_one_row() -> None:
    shown = text(tables.plan_table(plan("ring", "ring"), "two"))
    assert " ".join(shown.split()).count("layers.*.up.weight dim 0 as 6 + 3 2 ") == 1
    assert "dim 1 in 2 equal parts" in shown
    assert "600 B / 300 B of 900 B" in shown
    assert "its order is fixed" in shown


def test_bytes_sent_are_counted_from_the_schedule() -> None:
    """On 2 ranks a ring sends the vector once, half by half, and nothing sends less."""
    shown = text(tables.plan_table(plan("ring", "one_shot"), ""))
    assert "all collectives sent by rank 2 8.0 kB" in " ".join(shown.split())
    shown = text(tables.plan_table(plan("ring", "native"), ""))
    assert "all collectives sent by rank 2 at least 8.0 kB" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("same", "words"),
    [
        (True, "same tokens as the unsharded model: yes"),
        (False, "same tokens as the unsharded model: no (token 3 is 7, not 8)"),
    ],
)
def test_the_claim_is_spelled_out(same: bool, words: str) -> None:
    outcome = tables.Outcome(
        model="tiny",
        plan=plan("ring"),
        memory=[600, 300],
        memory_alone=900,
        seconds=0.2,
        seconds_alone=0.1,
        unit="token",
        same=same,
        claim="same tokens as the unsharded model",
        detail="" if same else "token 3 is 7, not 8",
    )
    shown = text(tables.run_table(outcome))
    assert words in shown
    assert "200 ms; one process 100 ms: 2 times as long" in shown
    assert "600 B / 300 B; one process 900 B" in shown


def test_predictions_name_the_machine() -> None:
    lines = list(tables.predictions(plan("ring")))
    assert lines[0] == "predicted 2 ms a call on loopback[2]"
    assert lines[-1] == "note: a mask was recognised"
    measured = replace(plan("ring"), cluster='{"name": "this one, measured", "levels": []}')
    assert next(iter(tables.predictions(measured))) == "predicted 2 ms a call on this one, measured"


def candidate(tp: int, pp: int, seconds: float) -> Candidate:
    parts = {"compute": seconds, "waiting": 2e-19}
    return Candidate(tp, pp, 1, "tp pp dp", 1, "gpipe", "off", seconds, seconds, 1e6, parts)


def test_a_pipeline_names_its_stages_and_what_its_bytes_are_of() -> None:
    staged = Staged("p", (4, 4), "b", ("linear_2",), (), "1f1b", (1.0, 1.0), 1.0, (5000.0,), 0.1)
    piped = replace(plan("ring"), pp=2, staged=staged)
    shown = " ".join(text(tables.plan_table(piped, "")).split())
    words = "1f1b with 2 micro-batches, cut before linear_2"
    assert f"stages {words} 2 5.0 kB at a cut, of each micro-batch" in shown
    assert "sent by rank, all stages together 1 4.0 kB, of each micro-batch" in shown
    assert f"stages: {words}" in explain(piped)
    assert "bytes by rank, all stages together, of" in explain(piped)
    named = replace(piped, staged=replace(staged, modules=("layers.1.up",)))
    assert f"stages: {words} in layers.1.up" in explain(named)
    outcome = tables.Outcome("tiny", piped, [1] * 4, 4, 0.1, 0.1, "call", True, "same", "")
    assert tables.run_table(outcome).title == "tiny on 4 processes"


def test_a_choice_is_told_where_something_was_compared() -> None:
    alone = replace(plan("ring"), choice=Choice("p", (candidate(2, 1, 3e-3),), 1, "because"))
    assert "chosen" not in "\n".join([*tables.predictions(alone), explain(alone)])
    front = (candidate(2, 1, 2e-3), candidate(1, 2, 4e-3))
    two = replace(alone, choice=Choice("p", front, 7, "because"))
    assert "chosen of 7: because" in explain(two)
    assert "waiting" not in explain(two)  # what adding up numbers leaves is nothing
    rough = replace(two, seconds=1e-3)  # fused kernels are priced in the plan alone
    assert "compared without fused norms and graph launches" in "\n".join(tables.predictions(rough))


def test_every_rule_has_a_row() -> None:
    shown = text(tables.rules_table(aten.lines()))
    assert "input[* i] weight[o i] bias[o] -> [* o]" in shown
    assert all(tables._spelled(rule) for _, rule in aten.lines())


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e12, "2.5 TB")]
)
def test_sizes(count: float, words: str) -> None:
    assert tables.size(count) == words


@pytest.mark.parametrize(
    ("seconds", "words"), [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (4e-6, "4 us"), (1e-9, "0.001 us")]
)
def test_durations(seconds: float, words: str) -> None:
    assert tables.duration(seconds) == words


@pytest.mark.parametrize(
    ("name", "words"),
    [("model.layers.17.mlp", "model.layers.*.mlp"), ("0.weight", "*.weight"), ("h1.w2", "h1.w2")],
)
def test_patterns(name: str, words: str) -> None:
    assert tables.pattern(name) == words
