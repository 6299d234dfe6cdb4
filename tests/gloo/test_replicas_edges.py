"""Replicas at their edges: tied, frozen and unused weights, dropout, batch norms, one row, clipping."""

from __future__ import annotations

import copy
import os
import re
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import plait
from plait.errors import InputError, RankError
from plait.plan import gradients as buckets
from plait.runtime.replicas import Reduction, Replicas
from plait.runtime.transport import Transport
from tests import zoo
from tests.compare import demand, differences, digest, gradients, within
from tests.gloo import prove
from tests.gloo.harness import Pool
from tests.gloo.test_replicas import compiled, replica_of


class Parts(nn.Module):
    """Two heads of one table, a tied one, a frozen layer, and a layer that one output alone reads."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.middle = nn.Linear(6, 6)
        self.other = nn.Linear(6, 4)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.middle(self.frozen(self.table(ids))))
        return self.head(x), self.other(x)


def ids(replica: int) -> Tensor:
    return (torch.arange(6).view(2, 3) * (replica + 2)) % 11


def parts_of_a_loss(group: Any, mesh: Any) -> dict[str, str]:
    """Replica 1 alone reads the second output; the norm is the whole model's; optimizers agree."""
    torch.manual_seed(0)
    model = Parts().double()
    dp = mesh[2]
    parts = compiled(model, (ids(0),), mesh, group)
    plain, mine = copy.deepcopy(model), replica_of(parts)
    ours = torch.optim.AdamW([p for p in parts.parameters() if p.requires_grad], lr=0.01)
    theirs = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.01)

    def loss(outs: tuple[Tensor, Tensor], replica: int) -> Tensor:
        first = outs[0].pow(2).mean()
        return first + outs[1].sum() if replica == 1 else first

    for _ in range(2):
        ours.zero_grad()
        theirs.zero_grad()
        loss(parts(ids(mine)), mine).backward()
        for r in range(dp):
            (loss(plain(ids(r)), r) / dp).backward()
        demand(differences(dict(parts.gradients()), gradients(plain), "gradients"), about=f"{mesh}")
        norms = [plait.clip_grad_norm_(parts, 0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1)]
        demand(differences(*norms, "norm"), about=f"{mesh}")
        ours.step()
        theirs.step()
    state = dict(parts.state_dict())
    demand(differences(state, dict(plain.state_dict()), "state", within(1e-7, 1e-9)), about=f"{mesh}")
    return {"state": digest(state)}


@pytest.mark.parametrize("mesh", [(1, 1, 2), (1, 2, 2), (2, 1, 2)])
def test_tied_frozen_and_unused_weights(pool: Pool, mesh: Any) -> None:
    tp, pp, dp = mesh
    prove.alike(pool.run(parts_of_a_loss, tp * pp * dp, mesh))


# -- random operators and batch norms -------------------------------------------------------------------


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(self.first(x))
        return y, self.drop(torch.ones_like(y))


def noise(group: Any, training: bool) -> dict[str, Any]:
    """Equal batches draw apart; statistics are replica 0's on all; a step says what its loss is of."""
    torch.manual_seed(0)
    model = Noisy()
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(dist.get_rank(group)))
    parts = compiled(model, (torch.randn(6, 5),), (1, 1, 2), group, training=training)
    with torch.set_grad_enabled(training):
        _, mask = parts(x)
    plain = copy.deepcopy(model)
    plain(torch.randn(6, 5, generator=torch.Generator().manual_seed(0)))  # replica 0's
    state = dict(parts.state_dict())
    demand(differences(state, dict(plain.state_dict()), "statistics"), about="batch norm")
    told = ""
    if training:
        own = copy.deepcopy(plain)
        loss, _ = parts.step(x, loss_fn=lambda out: out[0].pow(3).mean())
        values = [torch.zeros(()) for _ in range(2)]
        for r in range(2):
            batch = torch.randn(6, 5, generator=torch.Generator().manual_seed(r))
            values[r] = own(batch)[0].pow(3).mean()
            (values[r] / 2).backward()
        demand(
            differences(loss, (sum(values) / 2).detach(), "loss", within(1e-5, 1e-6)),
            differences(dict(parts.gradients()), gradients(own), "gradients", within(1e-4, 1e-6)),
            about="batch norm",
        )
        (told,) = (line for line in parts.explain().splitlines() if line.startswith("step: "))
    return {"state": digest(state), "mask": digest(mask), "told": told}


@pytest.mark.parametrize("training", [True, False])
def test_replicas_draw_apart_and_share_statistics(pool: Pool, training: bool) -> None:
    a, b = pool.run(noise, 2, training)
    assert a["state"] == b["state"] and a["mask"] != b["mask"]
    assert not training or "on the output of each replica, and is averaged" in a["told"]


# -- language models --------------------------------------------------------------------------------------


def one_row(group: Any, mesh: Any) -> dict[str, str]:
    """A row each, few labels on one replica and none on another: the loss of one process."""
    model, _, kwargs = zoo.build("llama")
    model = model.double()
    dp = mesh[2]
    tokens = kwargs["input_ids"][:1]
    batch = torch.cat([(tokens + r) % (int(tokens.max()) + 1) for r in range(dp)])
    labels = batch.clone()
    labels[0, 3:], labels[1] = -100, -100
    parts = plait.compile(
        model, (), {"input_ids": tokens, "labels": tokens}, tp=mesh[0], pp=mesh[1], dp=dp,
        training=True, measure=False, group=group, cluster=prove.free(4),
    )  # fmt: skip
    mine, plain = replica_of(parts), copy.deepcopy(model)
    want = plain(input_ids=batch, labels=labels)
    want.loss.backward()
    rows = slice(mine, mine + 1)
    loss, out = parts.step(input_ids=batch[rows], labels=labels[rows])
    demand(
        differences(loss, want.loss.detach(), "loss"),
        differences(out.loss, want.loss.detach(), "the output's own loss"),
        differences(out.logits, want.logits.detach()[rows], "logits"),
        differences(dict(parts.gradients()), gradients(plain), "gradients"),
        about=f"{mesh}",
    )
    return {"gradients": digest(dict(parts.gradients()))}


@pytest.mark.parametrize(
    "mesh", [(1, 1, 3), *(pytest.param(m, marks=pytest.mark.full) for m in ((2, 1, 2), (1, 2, 2)))]
)
@pytest.mark.full
def test_a_row_each_of_a_language_model(pool: Pool, mesh: Any) -> None:
    tp, pp, dp = mesh
    prove.alike(pool.run(one_row, tp * pp * dp, mesh))


# -- what cannot be -----------------------------------------------------------------------------------------


def unequal(group: Any, what: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    rank = dist.get_rank(group)
    x = torch.randn(2, 3, 4)
    parts = compiled(model, (x,), (1 if what == "lengths" else 2, 1, 2), group)
    if what == "lengths":
        parts.step(torch.randn(2, 3 + rank, 4), loss_fn=lambda out: out.mean())
    else:
        parts(torch.randn(2, 3 + rank % 2, 4))


@pytest.mark.parametrize(
    ("what", "words"),
    [("lengths", "input 0: .*they may differ in dim 0 alone"), ("a replica", "ranks of one replica")],
)
def test_batches_that_do_not_fit_are_refused(pool: Pool, what: str, words: str) -> None:
    ranks = 2 if what == "lengths" else 4
    for failure in pool.errors(unequal, ranks, what):
        assert isinstance(failure.error, InputError), failure.traceback
        assert re.search(words, failure.message, re.S), failure.message


# -- buckets ------------------------------------------------------------------------------------------------


def test_buckets_are_full_in_reverse_order_of_use() -> None:
    replicas = Replicas(Transport(None, 0, 1), torch.device("cpu"))
    leaves = {f"w{i}": torch.empty(buckets.FIRST // 8) for i in range(7)}
    replicas.used(list(leaves))
    leaves["half"] = torch.empty(4, dtype=torch.bfloat16)
    assert replicas.buckets(leaves) == [["half"], ["w6", "w5", "w4", "w3", "w2", "w1", "w0"]]
    del leaves["half"]
    assert replicas.buckets(leaves) == [["w6", "w5"], ["w4", "w3", "w2", "w1", "w0"]]


def beside(group: Any) -> list[str]:
    """What happens in a backward, in order: gradients of layers, and buckets that leave."""
    buckets_were = Replicas.buckets
    layers = [nn.Linear(8, 8) for _ in range(4)]
    model = nn.Sequential(*layers)
    parts = compiled(model, (torch.randn(3, 8),), (1, 1, 2), group)
    told: list[str] = []
    launch, added = Reduction._launch, Reduction._added

    def one_each(self: Replicas, leaves: Any) -> list[list[str]]:
        return [[n] for bucket in buckets_were(self, leaves) for n in bucket]

    def launched(self: Reduction, bucket: Any) -> None:
        told.append(f"sum {bucket.nodes[0]}")
        launch(self, bucket)

    def there(self: Reduction, node: str, leaf: Tensor) -> None:
        told.append(node)
        added(self, node, leaf)

    Replicas.buckets, Reduction._launch, Reduction._added = one_each, launched, there  # type: ignore[method-assign]
    try:
        parts(torch.randn(3, 8)).sum().backward()
    finally:
        Replicas.buckets, Reduction._launch, Reduction._added = buckets_were, launch, added  # type: ignore[method-assign]
    return told


def test_sums_leave_while_the_backward_goes_on(pool: Pool) -> None:
    first, second = pool.run(beside, 2)
    assert [t for t in first if t.startswith("sum")] == [t for t in second if t.startswith("sum")]
    for told in (first, second):
        left = next(i for i, t in enumerate(told) if t.startswith("sum"))
        after = [t for t in told[left:] if not t.startswith("sum")]
        assert len(after) >= 6, told  # of eight gradients


# -- a replica that ends ------------------------------------------------------------------------------------


def killed(group: Any) -> tuple[float, str]:
    """Replica 1 dies as its first bucket is to leave; seconds until this one raised, and its words."""
    parts = compiled(nn.Linear(4, 3), (torch.randn(2, 4),), (1, 1, 3), group)
    parts(torch.randn(2, 4)).sum().backward()
    if parts.replica == 1:
        Reduction._launch = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, method-assign]
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        parts(torch.randn(2, 4)).sum().backward()
    return time.monotonic() - start, str(caught.value)


def test_a_replica_killed_in_its_backward_ends_all(fresh: Pool) -> None:
    answers = fresh.ask(killed, 3)
    del answers[1]
    for seconds, words in answers:
        assert "rank 1" in words
        assert seconds < 30
