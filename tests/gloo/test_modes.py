"""Randomness, modes, agreement between ranks, and the order of collectives, on gloo."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import plait
from plait.errors import InputError, PlaitError, PlanError, RankError
from tests.cases import CASES, Case, Mesh
from tests.cases.case import Setup
from tests.compare import demand, differences, digest, discrepancies, plain
from tests.gloo import prove
from tests.gloo.harness import Failure, Pool

# -- inference mode -----------------------------------------------------------------------------


class Counts(nn.Module):
    """A buffer that every call moves, and another form of call."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, more: Tensor | None = None) -> Tensor:
        self.calls += 1
        for layer in self.layers:
            x = x + layer(x).tanh() * self.calls
        return x if more is None else x + more


def inferring(group: Any, mesh: str, training: bool, first: Any) -> None:
    """Programs that are made within inference mode serve outside of it, and the other way round."""
    torch.manual_seed(0)
    model, at = Counts(), Mesh.parse(mesh)
    plain_model, x = copy.deepcopy(model), torch.randn(4, 6)
    with first():
        parts = plait.compile(
            model, (x,), tp=at.tp, pp=at.pp, training=training, group=group, measure=False,
            cluster=prove.free(at.size), micro_batches=at.micro_batches or "auto",
        )  # fmt: skip
    for mode in (torch.inference_mode, torch.enable_grad, torch.inference_mode, torch.no_grad):
        for args in ((x,), (x, x), (x[:3],)):
            with mode():
                demand(differences(parts(*args), plain_model(*args)))
    demand(differences(dict(parts.state_dict()), dict(plain_model.state_dict())))
    if training:
        parts(x).sum().backward()


@pytest.mark.parametrize("first", [torch.inference_mode, pytest.param(torch.enable_grad, marks=pytest.mark.full)])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("mesh", [pytest.param("tp2", marks=pytest.mark.full), "pp2/2"])
@pytest.mark.sample(2)
def test_inference_mode_is_a_matter_of_each_call(pool: Pool, mesh: str, training: bool, first: Any) -> None:
    pool.run(inferring, 2, mesh, training, first)


# -- dropout ------------------------------------------------------------------------------------


def masks(group: Any, name: str) -> dict[str, str]:
    """What the two masks must satisfy: see the case."""
    case = CASES[name]
    setup = case.setup()
    parts = prove.compiled(case, setup, Mesh(dist.get_world_size(group)), group)
    (x,), _ = setup.inputs()
    torch.manual_seed(5)
    first, second = parts(x), parts(x)
    torch.manual_seed(5)
    again = parts(x)
    for mask in (*first, *second):
        assert set(mask.unique().tolist()) == {0.0, 2.0}, mask.unique()
        assert 0.45 < (mask == 0).float().mean() < 0.55
    inner, outer = first
    n = dist.get_world_size(group)
    blocks = inner.chunk(n, 1)
    assert not any(torch.equal(a, b) for i, a in enumerate(blocks) for b in blocks[:i])
    assert not torch.equal(inner, outer)
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    got = prove.run(parts, setup, True)
    up = got.gradients["up.weight"]
    assert up is not None
    return {"first": digest(first), "second": digest(second), "gradients": digest(got.gradients)}


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.full)])
def test_dropout_agrees_where_whole_and_differs_where_split(pool: Pool, n: int) -> None:
    prove.alike(pool.run(masks, n, "b22_dropout"))


def gradient_of_the_mask(group: Any) -> None:
    """The backward drops what the forward dropped: out = mask * (w x), so dw follows the mask."""
    case = CASES["b22_dropout"]
    setup = case.setup()
    parts = prove.compiled(case, setup, Mesh(2), group)
    (x,), _ = setup.inputs()
    inner, _ = parts(x)
    inner.sum().backward()
    up = parts.gradients()["up.weight"]
    assert up is not None
    demand(differences(up, inner.detach().sum(0)[:, None].expand(64, 64), "up.weight"))


def test_the_backward_of_dropout_uses_the_same_mask(pool: Pool) -> None:
    pool.run(gradient_of_the_mask, 2)


class Noisy(torch.nn.Module):
    """Draws of many kinds, none of which is dropout, before and behind split widths."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(7, 12), torch.nn.Linear(12, 7)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.up(x + torch.rand(x.shape))
        h = h * torch.bernoulli(torch.full_like(h, 0.5)) + torch.randn_like(h)
        h = torch.nn.functional.rrelu(h, training=True)[:, torch.randperm(12)]
        return self.down(h), torch.multinomial(h.softmax(-1), 5)


def noise(group: Any) -> dict[str, str]:
    """The user's seeds differ between the ranks; rank 0's counts, and draws go on from there."""
    setup = Setup(Noisy(), (torch.randn(5, 7),))
    parts = prove.compiled(Case("noisy", lambda: setup, ()), setup, Mesh(2), group)
    torch.manual_seed(5 + dist.get_rank(group))
    calls = [parts(*setup.args) for _ in range(2)]
    assert not torch.equal(calls[0][0], calls[1][0])
    torch.manual_seed(5 + dist.get_rank(group))
    again = parts(*setup.args)
    assert torch.equal(again[0], calls[0][0])
    assert torch.equal(again[1], calls[0][1])
    prove.run(parts, setup, True)
    return {"calls": digest(calls), "gradients": digest(dict(parts.gradients()))}


def test_every_draw_is_the_same_on_all_ranks(pool: Pool) -> None:
    prove.alike(pool.run(noise, 2))


# -- train and eval -----------------------------------------------------------------------------


def modes(group: Any, mesh: str, start: bool) -> dict[str, str]:
    """Compiled in one mode, used in the other and back."""
    case = CASES["b24_modes"]
    setup = case.setup()
    setup.model.train(start)
    evaluated = replace(setup, model=setup.model.eval())
    want = plain(evaluated, train=False).out
    setup.model.train(start)
    parts = prove.compiled(case, setup, Mesh.parse(mesh), group)
    assert parts.training is start
    (x,), _ = setup.inputs()
    if start:
        assert not torch.equal(parts(x), parts(x)), "dropout is off in train mode"
        moved = dict(parts.state_dict())
        assert not torch.equal(moved["2.running_mean"], setup.model.state_dict()["2.running_mean"])
        parts.load_state_dict(setup.model.state_dict())
    parts.eval()
    before = digest(dict(parts.state_dict()))
    first, second = parts(x), parts(x)
    assert torch.equal(first, second), "dropout is on in eval mode"
    demand(differences(first, want), about="eval")
    assert digest(dict(parts.state_dict())) == before, "statistics moved in eval mode"
    parts.train()
    assert not torch.equal(parts(x), parts(x)), "dropout is off after train()"
    parts.eval()
    return {"first": digest(first)}


@pytest.mark.parametrize("start", [True, False])
@pytest.mark.parametrize("mesh", ["tp2", "pp2"])
@pytest.mark.sample(2)
def test_modes_switch(pool: Pool, mesh: str, start: bool) -> None:
    prove.alike(pool.run(modes, 2, mesh, start))


class Sorted(torch.nn.Module):
    """The way the weight is cut in eval mode is of no use in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(70, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight.sort(0).values if self.training else self.weight)


def cut_for_one_mode(group: Any) -> None:
    torch.manual_seed(0)
    setup = Setup(Sorted().double().eval(), (torch.randn(1, 70, dtype=torch.float64),), {})
    n = dist.get_world_size(group)
    parts = plait.compile(
        setup.model, setup.args, tp=n, training=True, group=group, cluster=prove.free(n)
    )
    assert dict(parts.named_parameters())["weight"].shape[0] < 70
    for mode in (False, True, False):
        setup.model.train(mode)
        parts.train(mode)
        parts.zero_grad()
        demand(discrepancies(prove.run(parts, setup, True), plain(setup)), about=f"train({mode})")


@pytest.mark.parametrize("n", [2, 3])
def test_weights_cut_for_one_mode_are_gathered_in_another(pool: Pool, n: int) -> None:
    pool.run(cut_for_one_mode, n)


def statistics(group: Any) -> dict[str, str]:
    """Batch norm in train mode: outputs, gradients and running statistics of one process."""
    case = CASES["batch_norm_trains"]
    setup = case.setup(torch.float64)
    want = plain(setup)
    parts = prove.compiled(case, setup, Mesh(2), group)
    got = prove.run(parts, setup, True)
    state = parts.state_dict()
    demand(
        differences(got.out, want.out),
        differences(got.gradients, want.gradients, "gradients"),
        differences({n: state[n] for n in want.buffers}, want.buffers, "buffers"),
    )
    return prove.report(parts, setup.model, got)


def test_running_statistics(pool: Pool) -> None:
    prove.alike(pool.run(statistics, 2))


# -- what ranks must agree on -------------------------------------------------------------------


def late(group: Any) -> dict[str, str]:
    if dist.get_rank(group) == 1:
        time.sleep(2)
    return prove.right(group, "b46_equal_branches", "tp2", torch.float32, {})


def test_a_rank_may_compile_late(pool: Pool) -> None:
    prove.alike(pool.run(late, 2))


def other_figures(group: Any) -> dict[str, str]:
    """Rank 1 believes in another machine: rank 0's plan is everyone's."""
    cluster = "loopback[2]" if dist.get_rank(group) == 1 else prove.free(2)
    return prove.right(group, "b46_equal_branches", "tp2", torch.float32, {"cluster": cluster})


def test_ranks_with_other_figures_run_one_plan(pool: Pool) -> None:
    answers = pool.ask(other_figures, 2)
    if any(isinstance(a, Failure) for a in answers):
        assert all(isinstance(a, Failure) and isinstance(a.error, PlaitError) for a in answers)
    else:
        prove.alike(answers)


SCRIPT = """
import torch, torch.distributed as dist
from tests.gloo import prove
torch.set_num_threads(1)
dist.init_process_group("gloo")
report = prove.right(None, "b46_equal_branches", "tp2", torch.float32, {})
reports = [None] * dist.get_world_size()
dist.all_gather_object(reports, report)
prove.alike(reports)
dist.destroy_process_group()
"""


@pytest.mark.full
def test_hash_seeds_may_differ(tmp_path: Path) -> None:
    """Two processes of their own, as torchrun would start them."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), str(root / "src")])
    common = os.environ | {
        "PYTHONPATH": path,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_port()),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SCRIPT],
            env=common | {"RANK": str(r), "LOCAL_RANK": str(r), "PYTHONHASHSEED": str(r + 1)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(2)
    ]
    texts = [p.communicate(timeout=90)[1] for p in started]
    assert [p.returncode for p in started] == [0, 0], "\n".join(texts)[-3000:]


def _port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def other_inputs(group: Any, what: str) -> None:
    case = CASES["b01_bias_after_the_sum"]
    setup = case.setup()
    parts = prove.compiled(case, setup, Mesh(2), group)
    (x,), _ = setup.inputs()
    if dist.get_rank(group) == 1:
        changes = {"contents": x + 1, "shape": x[:3], "dtype": x.double()}
        x = changes[what]
    parts(x)


@pytest.mark.parametrize("what", ["contents", "shape", "dtype"])
def test_ranks_that_pass_other_inputs_raise(pool: Pool, what: str) -> None:
    failures = pool.errors(other_inputs, 2, what)
    assert all(isinstance(f.error, InputError) for f in failures), failures
    assert len({f.message for f in failures}) == 1
    words = {"contents": "contents", "shape": "(3, ", "dtype": "float64"}[what]
    told = [line for line in failures[0].message.splitlines() if line.startswith("  rank 1: args[0]: ")]
    assert len(told) == 1, failures[0].message
    assert words in told[0]


KEYWORDS: dict[str, tuple[Any, Any]] = {
    "tp": (1, 2),
    "overlap": ("off", 2),
    "algorithm": ("ring", {"move_1": "ring"}),
    "training": (True, False),
    "outputs": ("all", "last"),
    "cluster": (None, "dgx-h100[2]"),
    "dynamic": (None, {"input": {0: "rows"}}),
}


def other_keywords(group: Any, name: str) -> None:
    value = KEYWORDS[name][dist.get_rank(group)]
    plait.compile(torch.nn.Linear(4, 6), (torch.ones(2, 4),), group=group, measure=False, **{name: value})


@pytest.mark.parametrize("name", KEYWORDS)
def test_ranks_that_pass_other_keywords_raise(pool: Pool, name: str) -> None:
    failures = pool.errors(other_keywords, 2, name)
    assert all(isinstance(f.error, InputError) for f in failures), failures
    assert len({f.message for f in failures}) == 1
    assert all(f"  rank {rank}: {name}=" in failures[0].message for rank in range(2))


def other_models(group: Any) -> None:
    model = torch.nn.Linear(4, 6 + dist.get_rank(group))
    plait.compile(model, (torch.ones(2, 4),), group=group, measure=False)


def test_ranks_that_compile_other_models_name_the_weights(pool: Pool) -> None:
    failures = pool.errors(other_models, 2)
    assert all("  rank 1: weight: (7, 4) torch.float32" in f.message for f in failures), failures


def other_values(group: Any, seeded: bool) -> dict[str, str]:
    torch.manual_seed(7 if seeded else dist.get_rank(group))
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.LayerNorm(6))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        plait.compile(model, (torch.ones(2, 4),), group=group, measure=False)
    return {str(i): str(w.message) for i, w in enumerate(found) if "other values" in str(w.message)}


@pytest.mark.parametrize("seeded", [True, False])
def test_ranks_whose_models_have_other_values_are_warned(pool: Pool, seeded: bool) -> None:
    """Only of what differs: norms are all ones and zeros."""
    for said in pool.run(other_values, 2, seeded):
        texts = list(said.values())
        assert len(texts) == (not seeded)
        assert all(": 0.weight, 0.bias. Call" in text for text in texts), texts


def wrong_on_one(group: Any, wrong: dict[str, Any]) -> None:
    asked = {"model": torch.nn.Linear(4, 6), "args": (torch.ones(2, 4),), "measure": False}
    plait.compile(**(asked | {"group": group} | (wrong if dist.get_rank(group) else {})))


@pytest.mark.parametrize("wrong", [{"overlap": "never"}, {"model": 3}, {"tp": 7}, {"cluster": "nowhere"}])
def test_a_rank_that_asks_for_what_there_is_not_tells_the_others(pool: Pool, wrong: dict[str, Any]) -> None:
    first, second = pool.errors(wrong_on_one, 2, wrong)
    assert isinstance(first.error, RankError) and "rank 1 failed" in first.message
    assert isinstance(second.error, PlaitError) and second.message in first.message


def by_one_rank(group: Any, what: str) -> None:
    parts = plait.compile(
        torch.nn.Linear(4, 6), (torch.ones(2, 4),), group=group, measure=False, training=True
    )
    if dist.get_rank(group) == 0:
        agreement = parts._store.agreement
        meet = agreement.meet
        agreement.meet = lambda name: meet(name, 1.0)  # type: ignore[method-assign]
        getattr(parts, what)()
    else:
        time.sleep(3)


@pytest.mark.parametrize("what", ["state_dict", "gradients"])
@pytest.mark.sample(1)
def test_what_all_ranks_gather_names_those_that_did_not_come(pool: Pool, what: str) -> None:
    failure, _ = pool.ask(by_one_rank, 2, what)
    assert isinstance(failure.error, RankError)
    assert failure.message == f"{what}: rank 1 did not come to it within 1 s"


def too_large(group: Any, memory: int, mesh: dict[str, int]) -> None:
    """Only rank 0 plans."""
    machine = plait.Cluster.of("loopback[2]")
    small = replace(machine, device=replace(machine.device, memory=memory))
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    plait.compile(model, (torch.ones(2, 64),), group=group, cluster=small, **mesh)


@pytest.mark.parametrize("mesh", [{}, {"tp": 2}, {"pp": 2}, {"dp": 2}], ids=str)
@pytest.mark.sample(2)
def test_what_does_not_fit_is_said_on_every_rank(pool: Pool, mesh: dict[str, int]) -> None:
    failures = pool.errors(too_large, 2, 20_000, mesh)
    assert all(isinstance(f.error, PlanError) for f in failures), failures
    (words,) = {f.message for f in failures}
    assert "does not fit" in words
    assert "the smallest number of devices like those of" in words


def flagged(group: Any, everywhere: bool) -> None:
    """`fail` is set on the user's module after the compile, on one rank or on all."""
    case = CASES["b47_one_rank_fails"]
    setup = case.setup()
    parts = prove.compiled(case, setup, Mesh(2), group)
    (x,), _ = setup.inputs()
    parts(x)
    if everywhere or dist.get_rank(group) == 1:
        setup.model.fail = True
    parts(x)


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_flag_read_at_capture_is_compared(pool: Pool, everywhere: bool) -> None:
    """Never the old value: the call captures again, and the user's error is told on every rank."""
    words = "bad input on this rank" if everywhere else "fail: False on rank 0, True on rank 1"
    failures = pool.errors(flagged, 2, everywhere)
    assert all(words in f.message for f in failures), failures
    assert all(isinstance(f.error, PlaitError) for f in failures), failures


def followed(group: Any, mesh: str) -> dict[str, str]:
    """Weights frozen and thawed on the compiled module, by the ranks that hold them."""
    case = CASES["frozen_parts"]
    setup = case.setup(torch.float64)
    parts = prove.compiled(case, setup, Mesh.parse(mesh), group)
    got: dict[str, str] = {}
    for frozen in ("up.bias", "down.weight", "up.weight"):
        for name, p in parts.named_parameters():
            p.requires_grad_(name != frozen)
        for name, p in setup.model.named_parameters():
            p.requires_grad_(name != frozen)
        want = plain(setup)
        parts.zero_grad()
        ours = prove.run(parts, setup, True)
        demand(differences(ours.gradients, want.gradients, frozen))
        with torch.no_grad():
            demand(differences(parts(*setup.inputs()[0]), want.out))
        got[frozen] = digest(ours.gradients)
    return got


@pytest.mark.parametrize("mesh", ["tp2", pytest.param("pp2", marks=pytest.mark.full)])
def test_weights_are_frozen_and_thawed(pool: Pool, mesh: str) -> None:
    prove.alike(pool.run(followed, 2, mesh))


def alone(group: Any, what: str) -> None:
    """Rank 1 does otherwise than rank 0."""
    case = CASES["b24_modes"]
    setup = case.setup()
    parts = prove.compiled(case, setup, Mesh(2), group)
    (x,), _ = setup.inputs()
    other = dist.get_rank(group) == 1
    if other and what == "eval":
        parts.eval()
    if other and what == "frozen":
        next(iter(parts.parameters())).requires_grad_(False)
    with torch.set_grad_enabled(not (other and what == "no_grad")):
        parts(x)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("eval", "training: True on rank 0, False on rank 1"),
        ("frozen", "0.weight.requires_grad: True on rank 0, False on rank 1"),
        ("no_grad", "gradients on, autocast off on rank 0, gradients off, autocast off on rank 1"),
    ],
)
@pytest.mark.sample(2)
def test_modes_of_one_rank_alone_are_refused(pool: Pool, what: str, words: str) -> None:
    for failure in pool.errors(alone, 2, what):
        assert isinstance(failure.error, InputError)
        assert words in failure.message


# -- order and repetition -----------------------------------------------------------------------


def repeated(group: Any, count: int) -> dict[str, str]:
    """The same call gives the same bits, also with one rank slow before every collective."""
    case = CASES["b43_chain_of_collectives"]
    setup = case.setup()
    parts = prove.compiled(case, setup, Mesh(2), group)
    first = prove.run(parts, setup, True)
    want = digest((first.out, first.gradients))
    for i in range(count):
        with slow(group, 0.02 if i % 10 == 9 else 0.0):
            parts.zero_grad()
            got = prove.run(parts, setup, True)
        assert digest((got.out, got.gradients)) == want, f"run {i} differs"
    return {"first": want}


class slow:  # noqa: N801 - reads as a word
    """A sleep on rank 1 before each collective that torch is asked for."""

    NAMES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "batch_isend_irecv")

    def __init__(self, group: Any, seconds: float) -> None:
        self.seconds = seconds if dist.get_rank(group) == 1 else 0.0
        self.kept: dict[str, Any] = {}

    def __enter__(self) -> None:
        for name in self.NAMES if self.seconds else ():
            self.kept[name] = getattr(dist, name)
            setattr(dist, name, self._wrap(self.kept[name]))

    def _wrap(self, call: Any) -> Any:
        def late(*args: Any, **kwargs: Any) -> Any:
            time.sleep(self.seconds)
            return call(*args, **kwargs)

        return late

    def __exit__(self, *_: object) -> None:
        for name, call in self.kept.items():
            setattr(dist, name, call)


@pytest.mark.parametrize("count", [10, pytest.param(50, marks=pytest.mark.full)])
def test_runs_are_the_same_bits(pool: Pool, count: int) -> None:
    prove.alike(pool.run(repeated, 2, count, timeout=120))


def sites(group: Any, name: str) -> list[Any]:
    """The collectives of this rank's program, in order: op, whole shape, dtype."""
    case = CASES[name]
    setup = case.setup()
    parts = prove.compiled(case, setup, Mesh(dist.get_world_size(group)), group)
    return [(p.name, p.collective, p.nbytes, p.algorithm) for p in parts.plan.collectives]


@pytest.mark.parametrize("name", ["b45_independent_reductions", "b46_equal_branches"])
@pytest.mark.sample(1)
def test_one_order_of_collectives_for_all(pool: Pool, name: str) -> None:
    lists = pool.run(sites, 4, name)
    assert lists[0]
    assert all(other == lists[0] for other in lists)


def odd_input(group: Any, kind: str) -> Any:
    x = torch.randn(4, 6)
    compiled = plait.compile(torch.nn.Linear(6, 8), (x,), tp=dist.get_world_size(group), group=group)
    return compiled(x.to_sparse() if kind == "sparse" else x.to("meta"))


@pytest.mark.parametrize(
    ("kind", "words"), [("sparse", "of layout sparse_coo: pass a plain"), ("meta", "without values")]
)
def test_inputs_without_strides_or_values_are_refused_on_each_call(pool: Pool, kind: str, words: str) -> None:
    for failure in pool.errors(odd_input, 2, kind):
        assert "args[0]" in failure.message
        assert words in failure.message
