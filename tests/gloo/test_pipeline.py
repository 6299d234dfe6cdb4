"""`compiled.step` on gloo: every schedule, on every rank against one process."""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import plait
from plait.errors import InputError, RankError
from plait.passes.schedule import SCHEDULES
from plait.runtime import line
from plait.runtime.channel import Channel
from tests import zoo
from tests.cases import CASES, Case, Mesh, Setup
from tests.compare import demand, differences, digest, gradients, plain
from tests.gloo import prove
from tests.gloo.harness import Failure, Pool, RanksFailed


def grid() -> Iterator[Any]:
    """(case, mesh, schedule); each case meets one schedule in `make test`, each mesh several."""
    cases = [c for c in CASES.values() if c.exact and c.training and c.right == "R1"]
    for i, case in enumerate(c for c in cases if any(m.pipeline for m in c.meshes)):
        meshes = [m for m in case.meshes if m.pipeline]
        for j, mesh in enumerate(meshes):
            for k, name in enumerate(SCHEDULES):
                chosen = j == i % len(meshes) and k == i % len(SCHEDULES)
                marks = [] if chosen else [pytest.mark.full]
                yield pytest.param(case, mesh, name, id=f"{case.id}-{mesh}-{name}", marks=marks)


@pytest.mark.parametrize(("case", "mesh", "schedule"), grid())
def test_step(pool: Pool, case: Case, mesh: Mesh, schedule: str) -> None:
    answers = pool.ask(prove.stepped, mesh.size, case.id, str(mesh), schedule)
    failures = [a for a in answers if isinstance(a, Failure)]
    if failures and all(" can be cut apart at " in f.message for f in failures):
        pytest.skip(f"too few operators for {schedule}: {failures[0].message}")
    if failures:
        raise RanksFailed(failures, mesh.size)
    prove.alike(answers)


# -- losses -------------------------------------------------------------------------------------


def own_loss(group: Any, name: str, schedule: str) -> prove.Report:
    """A language model's own loss over labels of which one row has few and one has none."""
    model, args, kwargs = zoo.build(name)
    labels = kwargs["input_ids"].clone()
    labels[0, 3:], labels[1] = -100, -100
    setup = Setup(model.double(), args, {**kwargs, "labels": labels}, lambda out: out.loss)
    want = plain(setup)
    pp = dist.get_world_size(group)
    parts = plait.compile(
        model, args, setup.kwargs, pp=pp, training=True, group=group, cluster=prove.free(pp),
        micro_batches=2, schedule=schedule, measure=False,
    )  # fmt: skip
    loss, out = parts.step(**setup.kwargs)
    assert [line.split(",")[1] for line in prove.schedules(parts)] == [" 2 micro-batches"]
    demand(
        differences(loss, want.loss, "loss"),
        differences(out.logits, want.out.logits, "logits"),
        differences(dict(parts.gradients()), want.gradients, "gradients"),
        about=f"{name} {schedule}",
    )
    return {"loss": digest(loss), "gradients": digest(dict(parts.gradients()))}


@pytest.mark.parametrize(
    ("name", "schedule"),
    [("llama", "1f1b"), pytest.param("gpt2", "zero-bubble", marks=pytest.mark.full)],
)
def test_the_models_own_loss(pool: Pool, name: str, schedule: str) -> None:
    prove.alike(pool.run(own_loss, 2, name, schedule))


def tower() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
    return model.double(), torch.randn(7, 6, dtype=torch.float64)


def centred(out: Tensor, target: Tensor) -> Tensor:
    """Rows against their median: no equation cuts it."""
    return (out - out.median(0).values - target).pow(2).mean()


def branching(out: Tensor, target: Tensor) -> Tensor:
    """What runs depends on a value: it cannot be captured."""
    return (out - target).abs().mean() if out.sum() > 100 else (out - target).pow(2).sum()


def steps_of(group: Any, mesh: str, options: dict[str, Any], loss_fn: Any) -> Any:
    """A step with a target, against one process; what explain() says of it, and the outputs."""
    model, x = tower()
    target = torch.linspace(-1, 1, 21, dtype=torch.float64).view(7, 3)
    plain_model = copy.deepcopy(model)
    want_out = plain_model(x)
    want = loss_fn(want_out, target)
    want.backward()
    at = Mesh.parse(mesh)
    parts = plait.compile(
        model, (x,), tp=at.tp, pp=at.pp, training=True, group=group, measure=False,
        cluster=prove.free(at.size), micro_batches=at.micro_batches or "auto", **options,
    )  # fmt: skip
    loss, out = parts.step(x, target=target, loss_fn=loss_fn)
    demand(
        differences(loss, want.detach(), "loss"),
        differences(dict(parts.gradients()), gradients(plain_model), "gradients"),
        [] if out is None else differences(out, want_out.detach()),
        about=mesh,
    )
    return prove.schedules(parts), out is not None


@pytest.mark.parametrize("mesh", ["tp2", "pp1/3", "pp2/3", "tp2xpp2/3"])
@pytest.mark.sample(2)
def test_a_target(pool: Pool, mesh: str) -> None:
    answers = pool.run(steps_of, Mesh.parse(mesh).size, mesh, {}, F.mse_loss)
    assert all(has for _, has in answers)
    if mesh != "tp2":
        assert all("3 micro-batches, cut with loss_fn mse_loss" in said[0] for said, _ in answers)


def picking(out: Tensor, target: Tensor) -> Tensor:
    return (out[target > 0] - 1).pow(2).mean()


@pytest.mark.parametrize(
    ("loss_fn", "why"),
    [(centred, "needs the whole batch"), (branching, "what runs depends on"), (picking, "at the loss: ")],
)
def test_a_loss_that_cannot_be_cut_runs_on_the_gathered_output(pool: Pool, loss_fn: Any, why: str) -> None:
    for said, _ in pool.run(steps_of, 2, "pp2/3", {}, loss_fn):
        (line,) = said
        assert line.startswith(f"step: loss_fn {loss_fn.__name__} runs on the gathered output: ")
        assert why in line


def columns_apart(out: Tensor, target: Tensor) -> Tensor:
    """Of the first column by itself, so that it and the others are two factors, where the model has one."""
    return (out[:, :1] - target).pow(2).mean() + out[:, 1:].abs().mean()


def apart(group: Any) -> str:
    torch.manual_seed(0)
    model, x = nn.Linear(6, 5).double(), torch.randn(7, 6, dtype=torch.float64)
    plain_model, target = copy.deepcopy(model), torch.ones(7, 1, dtype=torch.float64)
    want = columns_apart(plain_model(x), target)
    want.backward()
    parts = plait.compile(
        model, (x,), tp=2, training=True, group=group, cluster=prove.free(2), measure=False,
        micro_batches=2,
    )  # fmt: skip
    loss, _ = parts.step(x, target=target, loss_fn=columns_apart)
    demand(
        differences(loss, want.detach(), "loss"),
        differences(dict(parts.gradients()), gradients(plain_model), "gradients"),
        about="columns apart",
    )
    return parts.explain()


def test_a_loss_that_takes_apart_what_is_loaded_as_one_runs_on_the_gathered_output(pool: Pool) -> None:
    for said in pool.run(apart, 2):
        assert (
            "loss_fn columns_apart runs on the gathered output: this form of call cannot use "
            "weight as it is loaded (rows 0:3 | 3:5 of dim 0), bias as it is loaded"
        ) in said


@pytest.mark.parametrize("loss_fn", [F.l1_loss, centred])
def test_outputs_on_the_last_stage(pool: Pool, loss_fn: Any) -> None:
    answers = pool.run(steps_of, 4, "tp2xpp2/3", {"outputs": "last"}, loss_fn)
    assert [has for _, has in answers] == [False, False, True, True]


def refused(group: Any, what: str) -> None:
    model, x = tower()
    parts = plait.compile(
        model, (x,), pp=2, training=what != "training", group=group, cluster=prove.free(2),
        outputs="last" if what == "last" else "all", measure=False,
    )  # fmt: skip
    match what:
        case "last":
            parts(x)
        case "no loss":
            parts.step(x)
        case "target":
            parts.step(x, target=x)
        case "detached":
            parts.step(x, loss_fn=lambda out: out.detach().sum())
        case "rows":
            parts.step(x, loss_fn=lambda out: out.sum(1))
        case "number":
            parts.step(x, loss_fn=as_number)
        case "several":
            parts.step(x, loss_fn=lambda out: (out.sum(), out.mean()))
        case "training":
            parts.step(x, loss_fn=torch.sum)


def as_number(out: Tensor) -> float:
    return out.pow(2).mean().item()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("last", "outputs='last' leaves the other stages nothing to call backward on"),
        ("no loss", "needs a model that returns its loss as `loss`"),
        ("target", "target= is for a loss_fn; the model's own loss takes its labels as the model does"),
        ("detached", "a loss without a gradient"),
        ("rows", "gives a tensor of [7]; step takes a loss of one real element"),
        ("number", "`def as_number(out: Tensor) -> float:`: loss_fn as_number gives a number of Python's"),
        ("several", "gives a tuple of 2; step takes a loss of one real element"),
        ("training", "compile with training=True"),
    ],
)
@pytest.mark.sample(4)
def test_what_a_step_refuses(pool: Pool, what: str, words: str) -> None:
    for failure in pool.errors(refused, 2, what):
        assert isinstance(failure.error, InputError), failure.traceback
        assert words in failure.message


# -- buffers and failures -----------------------------------------------------------------------


def kept(group: Any, schedule: str, pieces: int) -> int:
    """Messages that a rank kept at once in a step."""
    model, _ = tower()
    x = torch.randn(pieces, 6, dtype=torch.float64)
    parts = plait.compile(
        model, (x,), pp=2, training=True, group=group, cluster=prove.free(2),
        micro_batches=pieces, schedule=schedule, measure=False,
    )  # fmt: skip
    stages = parts._holdings.stages
    assert stages is not None
    parts.step(x, loss_fn=prove_loss)
    before, stages.channel.most = stages.channel.most, 0
    parts.step(x, loss_fn=prove_loss)
    assert stages.channel.most == before
    return before


def prove_loss(out: Tensor) -> Tensor:
    return out.pow(2).sum()


@pytest.mark.full
def test_what_is_kept_does_not_grow_with_the_micro_batches(pool: Pool) -> None:
    """Outputs apart, which are sent once each at the end: by the last stage alone."""
    few, many = (pool.run(kept, 2, "1f1b", pieces) for pieces in (4, 16))
    assert few[0] == many[0] <= 4
    assert pool.run(kept, 2, "gpipe", 16)[0] >= 16


def killed(group: Any, mesh: str, culprit: int) -> tuple[float, str]:
    """A rank dies in the middle of a step; seconds until this one raised, and its words."""
    model, x = tower()
    parts = plait.compile(
        model, (x,), pp=3, training=True, group=group, cluster=prove.free(3), micro_batches=7,
        schedule="1f1b", measure=False,
    )  # fmt: skip
    parts.step(x, loss_fn=prove_loss)
    if dist.get_rank(group) == culprit:
        own, left = Channel.send, iter(range(5))

        def send(*args: Any, **kwargs: Any) -> None:
            if next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            own(*args, **kwargs)

        Channel.send = send  # type: ignore[method-assign]
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        parts.step(x, loss_fn=prove_loss)
    return time.monotonic() - start, str(caught.value)


@pytest.mark.parametrize("culprit", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_rank_killed_in_the_middle_of_a_step(fresh: Pool, culprit: int) -> None:
    answers = fresh.ask(killed, 3, "pp3/7", culprit)
    answers.pop(culprit)
    for seconds, words in answers:
        assert f"rank {culprit}" in words
        assert seconds < 30


def stopped(group: Any, where: str, culprit: int, alone: bool) -> tuple[float, str]:
    """A rank is stopped, in a step or before it, until another has raised; `alone`: each on a host of its own."""
    line.LOOK, identity = 0.2, line._identity  # type: ignore[misc]
    if alone:
        line._identity = lambda path: f"{path} of rank {dist.get_rank(group)}"  # type: ignore[assignment]
    model, x = tower()
    parts = plait.compile(
        model, (x,), pp=3, training=True, group=group, cluster=prove.free(3), micro_batches=7,
        schedule="1f1b", measure=False,
    )  # fmt: skip
    rank, pids = dist.get_rank(group), [None] * 3
    dist.all_gather_object(pids, os.getpid(), group=group)
    if rank == culprit and where == "in":
        own = Channel.send

        def send(*args: Any, **kwargs: Any) -> None:
            Channel.send = own  # type: ignore[method-assign]
            os.kill(os.getpid(), signal.SIGSTOP)
            own(*args, **kwargs)

        Channel.send = send  # type: ignore[method-assign]
    elif rank == culprit:
        os.kill(os.getpid(), signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        parts.step(x, loss_fn=prove_loss)
    if rank == 2:
        os.kill(int(str(pids[culprit])), signal.SIGCONT)
    line.LOOK, line._identity = 5.0, identity  # type: ignore[misc]
    return time.monotonic() - start, str(caught.value)


@pytest.mark.parametrize(
    ("where", "culprit", "alone"),
    [
        ("in", 1, False),
        pytest.param("before", 1, False, marks=pytest.mark.full),
        pytest.param("in", 1, True, marks=pytest.mark.full),
        ("before", 0, True),  # in the middle of the side channel, which then passes nothing on
    ],
)
@pytest.mark.sample(2)
def test_a_rank_that_is_stopped_and_stays_so(fresh: Pool, where: str, culprit: int, alone: bool) -> None:
    answers = fresh.run(stopped, 3, where, culprit, alone)
    for seconds, words in answers:
        assert f"rank {culprit} was stopped (SIGSTOP" in words
        assert seconds < 10
    assert line.LOOK * line.STOPPED < 30


def raising(group: Any, mesh: str) -> str:
    """A loss on the gathered output raises on one rank, which lives on; what every rank is told."""
    model, x = tower()
    at, culprit = Mesh.parse(mesh), dist.get_rank(group) == 1

    def loss(out: Tensor) -> Tensor:
        if out.sum() < 100 and culprit:
            raise ValueError("bad loss on this rank")
        return out.sum()

    parts = plait.compile(
        model, (x,), tp=at.tp, pp=at.pp, training=True, group=group, cluster=prove.free(2), measure=False
    )
    with pytest.raises((RankError, ValueError)) as caught:
        parts.step(x, loss_fn=loss)
    time.sleep(2 * culprit)
    return str(caught.value)


@pytest.mark.parametrize("mesh", ["tp2", pytest.param("pp2/3", marks=pytest.mark.full)])
def test_a_loss_that_raises_on_one_rank_is_told(fresh: Pool, mesh: str) -> None:
    others, own = fresh.run(raising, 2, mesh)
    assert own == "bad loss on this rank"
    assert "rank 1 failed: ValueError: bad loss on this rank" in others
