"""tp="auto" and pp="auto" under processes: rank 0's choice, in every rank's plan, and right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import plait
from plait.cluster import Cluster
from tests.compare import within
from tests.gloo import prove
from tests.gloo.harness import Pool


def slow_links() -> Cluster:
    """Transfers start late, so that a sum after every block costs more than one send."""
    free = prove.free(2)
    return replace(free, levels=(replace(free.levels[0], latency=0.1),))


def work(group: Any, links: str) -> dict[str, str]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(12, 36), nn.ReLU(), nn.Linear(36, 12)) for _ in range(3)]
    model = nn.Sequential(*layers)
    x = torch.randn(5, 12)
    cluster = prove.free(2) if links == "free" else slow_links()
    parts = plait.compile(model, (x,), group=group, training=True, cluster=cluster)
    out = parts(x)
    out.sum().backward()
    model(x).sum().backward()
    wrong = within()(out, model(x), "out")
    for name, gradient in parts.gradients().items():
        wrong += within()(gradient, model.get_parameter(name).grad, name)
    choice = parts.plan.choice
    return {
        "wrong": "; ".join(wrong),
        "mesh": f"tp={parts.plan.tp} pp={parts.plan.pp}",
        "winner": choice.winner.name if choice is not None else "",
        "digest": parts.plan.digest,
    }


@pytest.mark.parametrize(("links", "mesh"), [("free", "tp=2 pp=1"), ("slow", "tp=1 pp=2")])
def test_the_choice_is_made_once_and_runs(pool: Pool, links: str, mesh: str) -> None:
    told = pool.run(work, 2, links)
    assert [t["wrong"] for t in told] == ["", ""]
    assert [t["mesh"] for t in told] == [mesh, mesh]
    assert told[0]["winner"].startswith(mesh)
    assert told[0] == told[1]
