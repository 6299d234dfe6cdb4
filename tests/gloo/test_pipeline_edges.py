"""Edges of pipelines on gloo: few rows, lengths that change, large messages, stages that
fail while they load or run, models that checkpoint their activations."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import plait
from plait.errors import CaptureError, InputError, RankError, WeightError
from plait.runtime.actions import Run
from tests.cases.case import Mesh, Setup, columns
from tests.cases.order import Branches
from tests.compare import EXACT, demand, differences, digest, plain, within
from tests.gloo import prove
from tests.gloo.harness import Pool

FULL = pytest.mark.full
LIMIT = 30.0  # seconds that a survivor may take


class Tower(nn.Module):
    """Residual blocks, one of them of a buffer's doing."""

    def __init__(self, d: int = 6, layers: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(d, d) for _ in range(layers))
        self.register_buffer("shift", torch.randn(d))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (block(x) + self.shift).tanh()
        return x


def tower(rows: int, dtype: torch.dtype = torch.float64) -> Setup:
    torch.manual_seed(0)
    return Setup(Tower(), (torch.randn(rows, 6),), loss=columns).to(dtype)


def compiled(setup: Setup, mesh: str, group: Any, **options: Any) -> plait.Compiled:
    at = Mesh.parse(mesh)
    defaults = dict(training=True, micro_batches=at.micro_batches or "auto", measure=False)
    return plait.compile(
        setup.model, setup.args, setup.kwargs, tp=at.tp, pp=at.pp, group=group,
        cluster=prove.free(at.size), **(defaults | options),
    )  # fmt: skip


def both_ways(parts: plait.Compiled, setup: Setup) -> prove.Report:
    """A loop of the user's own and a step, against one process."""
    want = plain(setup)
    parts.zero_grad()
    got = prove.run(parts, setup, True)
    parts.zero_grad()
    loss, out = parts.step(*setup.inputs()[0], loss_fn=setup.loss, **setup.inputs()[1])
    demand(
        differences(got.out, want.out),
        differences(got.gradients, want.gradients, "gradients"),
        differences((loss, out), (want.loss, want.out), "step"),
        differences(dict(parts.gradients()), want.gradients, "gradients of the step"),
    )
    return {"out": digest(out), "gradients": digest(got.gradients)}


# -- rows ----------------------------------------------------------------------------------------


def rows(group: Any, mesh: str, batch: int, schedule: str) -> tuple[prove.Report, int, list[str]]:
    setup = tower(batch)
    parts = compiled(setup, mesh, group, schedule=schedule)
    notes = [note for note in parts.plan.notes if note.startswith("micro_batches: ")]
    assert all(note in parts.explain() for note in notes)
    return both_ways(parts, setup), parts.plan.micro_batches, notes


@pytest.mark.parametrize(
    ("mesh", "batch", "schedule", "count"),
    [
        ("pp2/4", 1, "1f1b", 1),
        ("pp3/4", 3, "interleaved", 3),
        pytest.param("tp2xpp2/8", 5, "zero-bubble", 5, marks=FULL),
        pytest.param("pp4/7", 1, "interleaved", 1, marks=FULL),
        pytest.param("pp1/3", 2, "gpipe", 2, marks=FULL),
        pytest.param("pp1/3", 2, "interleaved", 2, marks=FULL),
    ],
)
@pytest.mark.sample(1)
def test_more_micro_batches_than_rows_are_lowered_and_said(
    pool: Pool, mesh: str, batch: int, schedule: str, count: int
) -> None:
    answers = pool.run(rows, Mesh.parse(mesh).size, mesh, batch, schedule)
    prove.alike([report for report, _, _ in answers])
    asked = Mesh.parse(mesh).micro_batches
    for _, found, notes in answers:
        assert found == count
        assert [note.split(":")[1] for note in notes] == [f" {count} instead of {asked}"]


# -- lengths -------------------------------------------------------------------------------------


class Attending(nn.Module):
    """Causal attention, whose mask and positions are made from the length."""

    def __init__(self, d: int = 6, vocab: int = 13) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, d), nn.Embedding(31, d)
        self.qkv, self.out, self.head = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.Linear(d, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.size(1)))
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return self.head(x)


def lengths(group: Any, mesh: str, dynamic: bool, training: bool) -> list[str]:
    """Calls of other lengths and of other numbers of rows than the compiled one."""
    torch.manual_seed(0)
    model = Attending().double()

    def call(batch: int, length: int) -> Setup:
        return Setup(model, (torch.randint(13, (batch, length)),), loss=columns)

    dims = {"ids": {1: "length"}} if dynamic else None
    parts = compiled(call(2, 11), mesh, group, dynamic=dims, training=training)
    reports = []
    for batch, length in ((2, 5), (1, 17), (3, 11), (2, 11)):
        setup = call(batch, length)
        want = plain(setup, training)
        parts.zero_grad()
        got = prove.run(parts, setup, training)
        demand(
            differences(got.out, want.out),
            differences(got.gradients, want.gradients, "gradients"),
            about=f"{batch} x {length}",
        )
        reports.append(digest((got.out, got.gradients)))
    return reports


@pytest.mark.parametrize(
    ("mesh", "dynamic", "training"),
    [
        ("pp2/2", False, True),
        ("pp3/2", True, False),
        pytest.param("pp4", True, False, marks=FULL),
        pytest.param("tp2xpp2/2", False, True, marks=FULL),
        pytest.param("pp2/2", True, True, marks=FULL),
    ],
)
@pytest.mark.sample(1)
def test_lengths_and_rows_may_change(pool: Pool, mesh: str, dynamic: bool, training: bool) -> None:
    answers = pool.run(lengths, Mesh.parse(mesh).size, mesh, dynamic, training)
    assert all(answer == answers[0] for answer in answers)


# -- large messages ------------------------------------------------------------------------------


def large(group: Any, mesh: str, schedule: str) -> prove.Report:
    """16 MiB a message, both ways between two stages."""
    torch.manual_seed(0)
    pieces = Mesh.parse(mesh).micro_batches or 1
    setup = Setup(Branches(), (torch.randn(pieces * 65536, 64),), loss=columns)
    parts = compiled(setup, mesh, group, schedule=schedule)
    loss, out = parts.step(*setup.args, loss_fn=setup.loss)
    want = plain(setup)
    atol = 1e-5 * float(max(g.abs().max() for g in want.gradients.values() if g is not None))
    demand(
        differences((loss, out), (want.loss, want.out)),
        differences(dict(parts.gradients()), want.gradients, "gradients", within(1e-4, atol)),
    )
    return {"loss": digest(loss), "out": digest(out)}


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["pp2/3", "tp2xpp2/3"])
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_messages_far_above_the_sockets_buffers(pool: Pool, mesh: str, schedule: str) -> None:
    prove.alike(pool.run(large, Mesh.parse(mesh).size, mesh, schedule))


# -- failures ------------------------------------------------------------------------------------


def loading(group: Any, mesh: str, culprit: int, folder: str) -> str:
    """The culprit loads another file than the others."""
    setup = tower(4, torch.float32)
    setup.model.to("meta")
    name = "bad" if dist.get_rank(group) == culprit else "good"
    start = time.monotonic()
    with pytest.raises((RankError, WeightError, OSError)) as caught:
        compiled(setup, mesh, group, weights=str(Path(folder, f"{name}.safetensors")))
    assert time.monotonic() - start < LIMIT
    dist.all_reduce(torch.ones(1), group=group)  # the group is as good as before
    return f"{type(caught.value).__name__}: {caught.value}"


def absent(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {}


def misshaped(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return state | {"blocks.1.weight": torch.ones(6, 5)}


@pytest.mark.parametrize(
    ("culprit", "change", "words"),
    [
        (1, misshaped, "blocks.1.weight"),
        pytest.param(2, misshaped, "blocks.1.weight", marks=FULL),
        pytest.param(2, absent, "bad.safetensors", marks=FULL),
    ],
)
def test_a_stage_that_fails_while_loading_is_named(
    pool: Pool, tmp_path: Path, culprit: int, change: Callable[..., Any], words: str
) -> None:
    """Every stage knows all shapes, so each could say what is wrong with a file."""
    state = dict(tower(4, torch.float32).model.state_dict())
    save_file(state, tmp_path / "good.safetensors")
    if change(state):
        save_file(change(state), tmp_path / "bad.safetensors")
    answers = pool.run(loading, 3, "pp3", culprit, str(tmp_path))
    assert words in answers.pop(culprit)
    for text in answers:
        assert text.startswith(f"RankError: load: rank {culprit} ")
        assert words in text


def running(group: Any, culprit: int, kind: str) -> str:
    """A stage raises in an action of a step; what this rank raises."""
    setup = tower(7)
    parts = compiled(setup, "pp3/7", group, schedule="1f1b")
    parts.step(*setup.args, loss_fn=setup.loss)
    if dist.get_rank(group) == culprit:
        own = Run._do

        def fail(run: Run, action: Any, *rest: Any) -> None:
            if (action.kind, action.piece) == (kind, 3):
                raise ValueError("bad input on this rank")
            own(run, action, *rest)

        Run._do = fail  # type: ignore[method-assign]
    start = time.monotonic()
    try:
        with pytest.raises((RankError, ValueError)) as caught:
            parts.step(*setup.args, loss_fn=setup.loss)
        assert time.monotonic() - start < LIMIT
    finally:
        if dist.get_rank(group) == culprit:
            time.sleep(2)  # it lives on while the others must raise
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("culprit", "kind"), [(1, "B"), pytest.param(2, "F", marks=FULL), pytest.param(0, "B", marks=FULL)]
)
def test_a_stage_that_fails_in_a_step_is_named(fresh: Pool, culprit: int, kind: str) -> None:
    answers = fresh.run(running, 3, culprit, kind)
    assert answers.pop(culprit) == "ValueError: bad input on this rank"
    for text in answers:
        assert text.startswith(f"RankError: step: rank {culprit} failed: ValueError: bad input"), text


def shapes(group: Any, by: str) -> str:
    """One rank brings rows that the others do not; then all bring the same."""
    setup = tower(6)
    odd = tower(5 if dist.get_rank(group) == 1 else 6)
    parts = compiled(setup, "pp3/2", group)
    ways: dict[str, Callable[[], Any]] = {
        "compile": lambda: compiled(odd, "pp3/2", group),
        "call": lambda: parts(*odd.args),
        "step": lambda: parts.step(*odd.args, loss_fn=odd.loss),
    }
    with pytest.raises(InputError) as caught:
        ways[by]()
    both_ways(parts, setup)
    return str(caught.value)


@pytest.mark.parametrize(
    "by", ["step", pytest.param("call", marks=FULL), pytest.param("compile", marks=FULL)]
)
def test_other_shapes_on_one_rank_are_refused_by_all(pool: Pool, by: str) -> None:
    words = pool.run(shapes, 3, by)
    assert words[0] == words[1] == words[2]
    assert "rank 1" in words[0]


# -- activations that a model lets go ------------------------------------------------------------


class Checkpointed(Tower):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(lambda x, f=block: f(x).tanh(), x, use_reentrant=False)
        return x


def checkpointing(group: Any, training: bool) -> Any:
    model = Checkpointed()
    x = torch.randn(3, 6)
    parts = plait.compile(
        model, (x,), pp=2, training=training, group=group, cluster=prove.free(2), measure=False
    )
    with torch.no_grad():
        return differences(parts(x), model(x), close=EXACT)


def test_a_models_own_checkpointing_is_refused_in_training_alone(pool: Pool) -> None:
    assert pool.run(checkpointing, 2, False) == [[], []]
    for failure in pool.errors(checkpointing, 2, True):
        assert isinstance(failure.error, CaptureError), failure.traceback
        assert "the model checkpoints its activations" in failure.message


# -- complex numbers -------------------------------------------------------------------------------------


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(6, 6, 2).double()), nn.Linear(6, 6).double()

    def forward(self, z: Tensor) -> Tensor:
        a = torch.view_as_complex(self.a)
        y = self.b((z @ a).imag)
        return torch.view_as_real(torch.complex(y, y.tanh()) @ a.conj() * z)


def turned(group: Any, mesh: str) -> prove.Report:
    """Inputs that are conjugates by a bit, and such as are not."""
    torch.manual_seed(0)
    setup = Setup(Turned(), (torch.randn(4, 6, dtype=torch.complex128),))
    x = setup.args[0]
    parts = compiled(Setup(setup.model, (x.conj(),)), mesh, group)
    want = plain(Setup(setup.model, (x.conj().resolve_conj(),)))
    for given in (x.conj(), x.conj().resolve_conj()):
        parts.zero_grad()
        out = parts(given)
        setup.loss(out).backward()
        demand(differences(out, want.out), differences(dict(parts.gradients()), want.gradients, "gradients"))
    return {"gradients": digest(dict(parts.gradients()))}


@pytest.mark.parametrize("mesh", ["tp2", "pp2/2"])
def test_conjugates_are_read_as_what_they_are(pool: Pool, mesh: str) -> None:
    prove.alike(pool.run(turned, 2, mesh))
