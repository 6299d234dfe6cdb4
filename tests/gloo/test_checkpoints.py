"""Sharded checkpoints with the optimizer's state, from any mesh to any other; training goes on."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import plait
from plait.errors import InputError, RankError, WeightError
from tests.compare import EXACT, demand, differences, within
from tests.gloo import prove
from tests.gloo.harness import Pool

Mesh = tuple[int, int, int]  # tp, pp, dp


class Small(nn.Module):
    """Widths that nothing divides, tied weights, a norm's buffer that moves, an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 7)
        self.up, self.down = nn.Linear(7, 11), nn.Linear(11, 7)
        self.more, self.less = nn.Linear(7, 5), nn.Linear(5, 7)
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.table.weight
        self.idle = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.full((7,), 0.5))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) * self.scale
        x = x + self.down(torch.tanh(self.up(x)))
        return self.head(x + self.less(torch.tanh(self.more(x))))


def made(mesh: Mesh, group: Any) -> tuple[plait.Compiled, torch.optim.Optimizer]:
    torch.manual_seed(0)
    tp, pp, dp = mesh
    parts = plait.compile(
        Small().double(), (batch(0)[:6],), tp=tp, pp=pp, dp=dp, training=True, measure=False,
        group=group, cluster=prove.free(tp * pp * dp),
    )  # fmt: skip
    named = dict(parts.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for n, p in named.items() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return parts, torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95))


def batch(step: int) -> Tensor:
    return torch.randint(13, (6, 4), generator=torch.Generator().manual_seed(step))


def train(parts: Any, optimizer: Any, first: int, last: int, dp: int) -> list[float]:
    losses = []
    for step in range(first, last):
        own = batch(step).chunk(dp)[parts.replica]
        optimizer.zero_grad()
        loss, _ = parts.step(own, target=own, loss_fn=score)
        plait.clip_grad_norm_(parts, 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


def score(out: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out.flatten(0, 1), ids.flatten())


def saved(group: Any, mesh: Mesh, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    """Two steps, a save, two more: the losses after it, and what the weights came to."""
    parts, optimizer = made(mesh, group)
    train(parts, optimizer, 0, 2, mesh[2])
    optimizer.param_groups[0]["lr"] = 0.02  # a schedule's
    parts.save(folder, optimizer)
    return train(parts, optimizer, 2, 4, mesh[2]), dict(parts.state_dict())


def went_on(
    group: Any, mesh: Mesh, folder: str, losses: list[float], state: dict[str, Tensor], exact: bool
) -> None:
    parts, optimizer = made(mesh, group)
    parts.load(folder, optimizer)
    assert [g["lr"] for g in optimizer.param_groups] == [0.02, 0.01]
    got = train(parts, optimizer, 2, 4, mesh[2])
    close = EXACT if exact else within(1e-7, 1e-9)
    demand(
        differences(torch.tensor(got), torch.tensor(losses), "losses", close),
        differences(dict(parts.state_dict()), state, "state", close),
        about=f"{mesh}",
    )


@pytest.mark.parametrize(
    ("source", "targets"),
    [
        ((2, 2, 1), [(2, 2, 1), (3, 1, 1), (1, 2, 2)]),
        pytest.param((1, 1, 3), [(1, 1, 3), (1, 1, 1)], marks=pytest.mark.full),
        pytest.param((3, 1, 1), [(2, 1, 2), (1, 3, 1)], marks=pytest.mark.full),
        pytest.param((1, 3, 1), [(2, 2, 1)], marks=pytest.mark.full),
    ],
)
def test_training_goes_on_on_another_mesh(
    pool: Pool, tmp_path: Path, source: Mesh, targets: list[Mesh]
) -> None:
    folder = str(tmp_path / "checkpoint")
    (losses, state), *_ = pool.run(saved, source[0] * source[1] * source[2], source, folder)
    for target in targets:
        size = target[0] * target[1] * target[2]
        pool.run(went_on, size, target, folder, losses, state, target == source)


def killed(group: Any, mesh: Mesh, folder: str, culprit: int, what: str) -> tuple[str, dict[str, Tensor]]:
    """A whole save, then one in which a rank is killed at its first `what`; the words of another rank."""
    parts, optimizer = made(mesh, group)
    train(parts, optimizer, 0, 2, mesh[2])
    optimizer.param_groups[0]["lr"] = 0.02
    parts.save(folder, optimizer)
    state = dict(parts.state_dict())
    train(parts, optimizer, 2, 3, mesh[2])
    if dist.get_rank(group) == culprit:
        setattr(os, what, lambda *args: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RankError) as caught:
        parts.save(folder, optimizer)
    return str(caught.value), state


def read(group: Any, mesh: Mesh, folder: str, state: dict[str, Tensor]) -> None:
    parts, optimizer = made(mesh, group)
    parts.load(folder, optimizer)
    demand(differences(dict(parts.state_dict()), state, "state", EXACT), about=f"{mesh}")
    assert optimizer.param_groups[0]["lr"] == 0.02
    parts.save(folder, optimizer)


@pytest.mark.parametrize(
    ("culprit", "what"), [(1, "fsync"), *(pytest.param(0, w, marks=pytest.mark.full) for w in ("fsync", "replace"))]
)
def test_a_rank_killed_in_the_middle_of_a_save_leaves_the_one_before(
    pool: Pool, fresh: Pool, tmp_path: Path, culprit: int, what: str
) -> None:
    answers = fresh.ask(killed, 3, (1, 3, 1), str(tmp_path), culprit, what)
    answers.pop(culprit)
    assert all(f"rank {culprit} " in words for words, _ in answers), answers
    assert len({p.name.split("-")[1] for p in tmp_path.glob("shard-*")}) == 2, "the second has begun"
    pool.run(read, 2, (2, 1, 1), str(tmp_path), answers[0][1])
    assert len({p.name.split("-")[1] for p in tmp_path.glob("shard-*")}) == 1, "what it left is gone"


def as_weights(group: Any, folder: str, state: dict[str, Tensor]) -> None:
    """A sharded folder is read by compile, too; a whole save takes its place."""
    with torch.device("meta"):
        empty = Small().double()
    parts = plait.compile(
        empty, (batch(0),), tp=3, weights=folder, group=group, measure=False, cluster=prove.free(3)
    )
    demand(differences(dict(parts.state_dict()), state, "state", EXACT), about="weights=")
    parts.save(folder)
    parts.load(folder)
    demand(differences(dict(parts.state_dict()), state, "state", EXACT), about="whole")


def written(group: Any, mesh: Mesh, folder: str) -> dict[str, Tensor]:
    parts, _ = made(mesh, group)
    parts.save(folder, sharded=True)
    return dict(parts.state_dict())


def test_a_sharded_folder_is_weights(pool: Pool, tmp_path: Path) -> None:
    state, *_ = pool.run(written, 4, (2, 1, 2), str(tmp_path))
    assert len(list(tmp_path.glob("shard-1-*.safetensors"))) > 1, "one rank wrote everything"
    pool.run(as_weights, 3, str(tmp_path), state)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def refused(group: Any, folder: str, what: str) -> None:
    parts, optimizer = made((2, 1, 1), group)
    if what == "no optimizer":
        parts.save(folder, sharded=True)
        parts.load(folder, optimizer)
    if what == "other groups":
        parts.save(folder, optimizer)
        parts.load(folder, torch.optim.AdamW(parts.parameters()))
    if what == "a stranger":
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 3))]})
        parts.save(folder, optimizer)
    if what == "a state of another shape":
        for p in optimizer.param_groups[0]["params"]:
            optimizer.state[p]["row"] = torch.ones(2)
        parts.save(folder, optimizer)


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("no optimizer", WeightError, "holds no optimizer"),
        ("other groups", InputError, "1 groups, saved were 2"),
        ("a stranger", InputError, r"a parameter \[2, 3\] of it is none of the module"),
        ("a state of another shape", InputError, r"row of table.weight is \[2\], the weight here"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(
    pool: Pool, tmp_path: Path, what: str, kind: type[Exception], words: str
) -> None:
    for failure in pool.errors(refused, 2, str(tmp_path), what):
        assert isinstance(failure.error, kind), failure.traceback
        assert re.search(words, failure.message), failure.message


def some_without(group: Any, folder: str, forgets: bool) -> list[str]:
    """Saved and read by stages of which the last alone learns."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4)).double()
    model[0].requires_grad_(forgets)
    x = torch.randn(4, 6, dtype=torch.float64)
    parts = plait.compile(model, (x,), pp=2, training=True, group=group, measure=False, micro_batches=2)
    mine = [p for p in parts.parameters() if p.requires_grad and p.numel()]
    last = any(name.startswith("2.") for name, _ in parts.named_parameters())
    optimizer = torch.optim.AdamW(mine) if mine and (last or not forgets) else None
    parts.step(x, loss_fn=torch.sum)
    if optimizer is not None:
        optimizer.step()
    parts.save(folder, optimizer)
    parts.load(folder, optimizer)
    return [key for state in optimizer.state.values() for key in state] if optimizer is not None else []


def test_a_stage_that_learns_nothing_has_no_optimizer_to_save(pool: Pool, tmp_path: Path) -> None:
    first, last = pool.run(some_without, 2, str(tmp_path / "a"), False)
    assert not first
    assert last
    for failure in pool.errors(some_without, 2, str(tmp_path / "b"), True):
        assert "save: other ranks give an optimizer, this one none for 0.weight, 0.bias" in failure.message


def far(out: Tensor) -> Tensor:
    return (out - 1).pow(2).mean()


def of_one(group: Any, mesh: Mesh, folder: str, dtype: torch.dtype) -> list[tuple[str, list[int]]]:
    """All learn on one stage; every rank makes the same optimizer, trains, saves and goes on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Softmax(-1)).double()
    model[0].requires_grad_(False)
    x, (tp, pp, dp) = torch.randn(4, 6, dtype=dtype), mesh
    parts = plait.compile(
        model, (x,), tp=tp, pp=pp, dp=dp, training=True, group=group, measure=False, dtype=dtype,
        cluster=prove.free(tp * pp * dp),
    )  # fmt: skip
    with pytest.raises(InputError, match=r"LBFGS on weights that are split over ranks .*2\."):
        torch.optim.LBFGS([p for p in parts.parameters() if p.requires_grad]).step(lambda: x.sum())
    model = model.to(dtype)
    for module in (parts, model):
        learn = [p for p in module.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW([{"params": learn, "lr": 0.1}])
        for step in range(4):
            if module is parts and step % 2:
                parts.step(x, loss_fn=far)
            else:
                far(module(x)).backward()
            if module is parts:
                with pytest.raises(InputError, match=r"the gradient of 2\..*: each stage of a pipeline"):
                    torch.nn.utils.clip_grad_norm_(learn, 0.01)
            clip = plait.clip_grad_norm_ if module is parts else torch.nn.utils.clip_grad_norm_
            clip(module if module is parts else learn, 0.01)
            torch.nn.utils.clip_grad_value_(learn, 0.002)
            optimizer.step()
            optimizer.zero_grad()
            if module is parts and step == 1:
                parts.save(folder, optimizer)
                optimizer = torch.optim.AdamW([{"params": learn, "lr": 0.2}])
                parts.load(folder, optimizer)
    demand(differences(dict(parts.state_dict()), dict(model.state_dict()), "state"), about=f"{mesh}")
    assert all(p.dtype == dtype for p in parts.parameters())
    return [(n, list(p.shape)) for n, p in parts.named_parameters() if p.requires_grad]


@pytest.mark.parametrize(
    ("mesh", "dtype"), [((1, 3, 1), torch.float32), pytest.param((2, 2, 1), torch.float64, marks=pytest.mark.full)]
)
def test_an_optimizer_is_made_on_a_stage_that_trains_nothing_too(
    pool: Pool, tmp_path: Path, mesh: Mesh, dtype: torch.dtype
) -> None:
    held = pool.run(of_one, mesh[0] * mesh[1] * mesh[2], mesh, str(tmp_path), dtype)
    assert [("2.bias", [0])] in held
    assert all(held)
