"""Fine-tuning a language model: the losses of one process on every mesh, step by step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import plait
from tests import zoo
from tests.compare import demand, differences, within
from tests.gloo import prove
from tests.gloo.harness import Pool

STEPS = 4


def batches(vocabulary: int) -> list[dict[str, torch.Tensor]]:
    """Four rows; row r has labels for its first r + 1 tokens."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocabulary, (STEPS, 4, 6), generator=generator)
    labels = ids.clone()
    for row in range(4):
        labels[:, row, row + 2 :] = -100
    return [{"input_ids": x, "labels": y} for x, y in zip(ids, labels, strict=True)]


def curve(group: Any, mesh: tuple[int, int, int]) -> list[float]:
    tp, pp, dp = mesh
    model, _, kwargs = zoo.build("llama")
    data = batches(int(kwargs["input_ids"].max()) + 1)
    own = [{n: x.chunk(dp) for n, x in batch.items()} for batch in data]
    parts = plait.compile(
        model, (), {n: x[0] for n, x in own[0].items()}, tp=tp, pp=pp, dp=dp, training=True,
        measure=False, group=group, cluster=prove.free(tp * pp * dp),
        **({"micro_batches": 2} if pp > 1 else {}),
    )  # fmt: skip
    plain = copy.deepcopy(model)
    ours = torch.optim.AdamW(parts.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    got, want = list[float](), list[float]()
    for batch, rows in zip(data, own, strict=True):
        ours.zero_grad()
        theirs.zero_grad()
        loss, _ = parts.step(**{n: x[parts.replica] for n, x in rows.items()})
        plain(**batch).loss.backward()
        want.append(plain(**batch).loss.item())
        got.append(loss.item())
        ours.step()
        theirs.step()
    assert want[-1] != want[0], "nothing is learned"
    told = differences(torch.tensor(got), torch.tensor(want), "losses", within(1e-3, 0.0))
    demand(told, about=f"{mesh}")
    return got


@pytest.mark.parametrize(
    "mesh",
    [(1, 2, 1), *(pytest.param(m, marks=pytest.mark.full) for m in ((1, 1, 2), (2, 1, 1), (2, 2, 1)))],
)
def test_losses_are_those_of_one_process(pool: Pool, mesh: tuple[int, int, int]) -> None:
    tp, pp, dp = mesh
    losses = pool.run(curve, tp * pp * dp, mesh)
    assert all(each == losses[0] for each in losses)
