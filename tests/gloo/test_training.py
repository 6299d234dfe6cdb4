"""Training on gloo: optimizer steps, clipping, accumulation, open forwards, what is refused."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from plait.errors import InputError
from tests.cases import CASES, Mesh
from tests.compare import demand, differences, digest, within
from tests.gloo import prove
from tests.gloo.harness import Pool

FULL = pytest.mark.full


def on(case: str, mesh: str, *rest: Any, full: bool = False) -> Any:
    return pytest.param(
        case, mesh, *rest, marks=[FULL] if full else [], id="-".join(map(str, (case, mesh, *rest)))
    )


@pytest.mark.parametrize(
    ("case", "mesh", "optimizer", "count", "clip"),
    [
        on("b14_tied_embedding_and_head", "tp2", "sgd", 3, None, full=True),
        on("b14_tied_embedding_and_head", "tp3", "sgd", 3, None, full=True),
        on("b14_tied_embedding_and_head", "tp5", "sgd", 3, None),
        on("b19_norm_shared_by_heads", "tp2", "adam", 5, None, full=True),
        on("b19_norm_shared_by_heads", "tp4", "adam", 5, None),
        on("b27_buffer_used_by_all_layers", "tp3", "sgd", 3, None, full=True),
        on("b31_tied_over_stages", "tp2", "adamw", 5, 0.1),
        on("b31_tied_over_stages", "tp3", "adamw", 5, 0.1, full=True),
        on("b31_tied_over_stages", "pp2/4", "adamw", 5, 0.1, full=True),
        on("b31_tied_over_stages", "pp3/4", "adamw", 5, 0.1),
        on("b31_tied_over_stages", "pp4/4", "adamw", 5, 0.1, full=True),
        on("b31_tied_over_stages", "tp2xpp2", "adamw", 5, 0.1, full=True),
        on("b27_buffer_used_by_all_layers", "pp2", "sgd", 3, None),
        on("b27_buffer_used_by_all_layers", "pp4", "sgd", 3, None, full=True),
        on("b10_values_made_per_head", "tp4", "adamw", 3, None, full=True),
        on("groups_nine_over_three", "tp2", "adam", 3, 0.5),
        on("adapters", "tp3", "adamw", 3, None, full=True),
        on("frozen_parts", "tp2", "adam", 3, 0.1),
        on("unused_parts", "tp2", "sgd", 3, 0.1, full=True),
        on("scalars_that_learn", "tp3", "adamw", 3, 0.1, full=True),
        on("tied_bias_and_norm", "tp2", "sgd", 3, 0.1, full=True),
        on("buffers_that_move", "tp3", "adam", 3, None),
    ],
)  # fmt: skip
@pytest.mark.sample(3)
def test_steps_keep_weights_and_replicas(
    pool: Pool, case: str, mesh: str, optimizer: str, count: int, clip: float | None
) -> None:
    n = Mesh.parse(mesh).size
    prove.alike(pool.run(prove.steps, n, case, mesh, optimizer, count, clip))


@pytest.mark.parametrize("norm_type", [2.0, pytest.param(1.0, marks=FULL), float("inf")])
@pytest.mark.parametrize(
    ("case", "mesh"),
    [
        on("b21_clipping", "tp2", full=True),
        on("b21_clipping", "tp4"),
        on("b21_clipping", "pp3"),
        on("b21_clipping", "tp2xpp2", full=True),
        on("b31_tied_over_stages", "pp3/4", full=True),
        on("b14_tied_embedding_and_head", "tp3"),
        on("b31_tied_over_stages", "tp2", full=True),
        on("groups_nine_over_three", "tp2"),
        on("groups_nine_over_three", "tp4", full=True),
        on("frozen_parts", "tp3", full=True),
    ],
)
@pytest.mark.sample(3)
def test_clipping(pool: Pool, case: str, mesh: str, norm_type: float) -> None:
    n = Mesh.parse(mesh).size
    prove.alike(pool.run(prove.clipping, n, case, mesh, norm_type, 0.1))


def test_a_norm_that_is_none_is_refused(pool: Pool) -> None:
    for failure in pool.errors(prove.clipping, 2, "b21_clipping", "tp2", 0.0, 1.0):
        assert failure.kind == "InputError"
        assert "norm_type is 0.0; it is a number above 0" in failure.message


def test_clipping_a_small_gradient_changes_nothing(pool: Pool) -> None:
    pool.run(prove.clipping, 2, "b01_bias_after_the_sum", "tp2", 2.0, 1e6)


ONES = ("b01_bias_after_the_sum", "b41_strided_and_expanded", "groups_nine_over_three")


@pytest.mark.parametrize("case", [*ONES, "tied_thrice", "b29_encoder_decoder"])
@pytest.mark.sample(2)
def test_gradients_accumulate(pool: Pool, case: str) -> None:
    prove.alike(pool.run(prove.accumulated, 2, case, "tp2"))


@pytest.mark.parametrize("mesh", ["pp2/2", pytest.param("tp2xpp2", marks=pytest.mark.full)])
def test_gradients_accumulate_over_stages(pool: Pool, mesh: str) -> None:
    prove.alike(pool.run(prove.accumulated, Mesh.parse(mesh).size, "b31_tied_over_stages", mesh))


@pytest.mark.parametrize("case", [*ONES, "b14_tied_embedding_and_head"])
def test_forwards_may_be_open_together(pool: Pool, case: str) -> None:
    prove.alike(pool.run(prove.interleaved, 3, case, "tp3"))


def second_derivative(group: Any) -> None:
    case = CASES["b01_bias_after_the_sum"]
    setup = case.setup()
    parts = prove.compiled(case, setup, Mesh.parse("tp2"), group)
    args, _ = setup.inputs()
    loss = setup.loss(parts(*args))
    (grad,) = torch.autograd.grad(loss, next(iter(parts.parameters())), create_graph=True)
    grad.pow(2).sum().backward()


def test_a_second_derivative_is_refused(pool: Pool) -> None:
    """By every rank, in autograd's own words: the moves are differentiable once."""
    for failure in pool.errors(second_derivative, 2):
        assert failure.kind == "RuntimeError"
        assert "once_differentiable" in failure.message or "twice" in failure.message


def not_for_training(group: Any) -> bool:
    case = CASES["b01_bias_after_the_sum"]
    setup = case.setup()
    parts = prove.compiled(case, setup, Mesh.parse("tp2"), group, training=False)
    return bool(parts(*setup.inputs()[0]).requires_grad)


def test_a_model_compiled_for_inference_gives_no_graph(pool: Pool) -> None:
    assert pool.run(not_for_training, 2) == [False, False]


def twice(group: Any) -> dict[str, str]:
    """Two compiles of one model, in use together: neither sees the other's steps, nor the model."""
    case = CASES["buffers_that_move"]
    setup = case.setup(torch.float64)
    before = digest(setup.model.state_dict())
    one, two = (prove.compiled(case, setup, Mesh.parse("tp2"), group) for _ in range(2))
    untouched = digest(dict(two.state_dict()))
    for _ in range(2):
        one.zero_grad()
        prove.run(one, setup, True)
        torch.optim.SGD(one.parameters(), lr=0.1).step()
    assert digest(dict(two.state_dict())) == untouched
    assert digest(dict(one.state_dict())) != untouched
    assert digest(setup.model.state_dict()) == before
    return {"one": digest(dict(one.state_dict()))}


def test_two_compiles_are_independent(pool: Pool) -> None:
    prove.alike(pool.run(twice, 2))


# -- what torch does to gradients and weights ---------------------------------------------------------


class Lamb(torch.optim.Optimizer):
    """Of nobody's library: a step is scaled by the norms of the weight and of its gradient."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    rate = group["lr"] * p.norm() / p.grad.norm()
                    p.data.sub_(p.grad * rate)


class Lion(torch.optim.Optimizer):
    """Of nobody's library either, and element-wise."""

    def __init__(self, params: Any, speed: float, decay: float) -> None:
        super().__init__(params, {"lr": speed, "decay": decay})
        self.speed = speed

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.mul_(1 - group["decay"]).sub_(p.grad.sign() * self.speed)


WHOLE: dict[str, Any] = {
    "Adafactor": torch.optim.Adafactor,
    "Muon": lambda ps: torch.optim.Muon([p for p in ps if p.dim() == 2]),
    "LBFGS": torch.optim.LBFGS,
    "Lamb": Lamb,
}


def foreign(group: Any, what: str, mesh: str) -> None:
    case = CASES["b07_fused_gate_up"]
    setup = case.setup()
    parts = prove.compiled(case, setup, Mesh.parse(mesh), group)
    before = digest(dict(parts.state_dict()))
    prove.run(parts, setup, True)
    try:
        WHOLE[what](parts.parameters()).step(*([lambda: torch.ones(())] if what == "LBFGS" else []))
    finally:
        assert digest(dict(parts.state_dict())) == before


@pytest.mark.parametrize("what", WHOLE)
def test_what_reads_whole_weights_is_refused(pool: Pool, what: str) -> None:
    for failure in pool.errors(foreign, 2, what, "tp2"):
        assert isinstance(failure.error, InputError), failure.traceback
        assert f"{what} on weights that are split" in failure.message
        assert "AdamW" in failure.message


@pytest.mark.parametrize("what", ["LBFGS", pytest.param("Lamb", marks=FULL)])
def test_stages_hold_whole_weights(pool: Pool, what: str) -> None:
    """In a pipeline what counts is whether a weight's step depends on other weights."""
    if what == "LBFGS":
        for failure in pool.errors(foreign, 2, what, "pp2"):
            assert "depends on the others" in failure.message, failure.traceback
    else:
        with pytest.raises(AssertionError, match="AssertionError"):  # it steps
            pool.run(foreign, 2, what, "pp2")


ELEMENTWISE: dict[str, Any] = {
    "Adadelta": torch.optim.Adadelta,
    "Adagrad": torch.optim.Adagrad,
    "Adamax": torch.optim.Adamax,
    "Adam, fused": lambda ps: torch.optim.Adam(ps, fused=True),
    "ASGD": torch.optim.ASGD,
    "Lion": lambda ps: Lion(ps, 0.01, decay=0.1),  # its constructor's names are not its defaults'
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, foreach=True),
    "Rprop": torch.optim.Rprop,
    "SGD, from a rate of zero": lambda ps: torch.optim.SGD(ps, lr=0.0, momentum=0.9, nesterov=True),
}


def accepted(group: Any) -> dict[str, str]:
    """Steps of each, on the compiled module and on the plain one."""
    case = CASES["b07_fused_gate_up"]
    setup = case.setup(torch.float64)
    out = {}
    parts = prove.compiled(case, setup, Mesh.parse("tp2"), group)
    for name, make in ELEMENTWISE.items():
        parts.load_state_dict(setup.model.state_dict())
        module = copy.deepcopy(setup.model)
        draws = torch.get_rng_state()
        for each in (parts, module):
            optimizer = make(each.parameters())
            for _ in range(2):
                prove._step(setup, each, optimizer, None)
        assert torch.equal(draws, torch.get_rng_state()), "the trial drew from the user's generator"
        state = dict(parts.state_dict())
        demand(differences(state, dict(module.state_dict()), close=within(1e-6, 1e-8)), about=name)
        out[name] = digest(state)
    return out


def test_element_wise_optimizers_are_right(pool: Pool) -> None:
    prove.alike(pool.run(accepted, 2))


def torchs_own(group: Any, name: str, norm_type: float, foreach: bool | None) -> dict[str, str]:
    """torch.nn.utils.clip_grad_norm_ and clip_grad_value_ on a compiled module."""
    case = CASES[name]
    setup = case.setup(torch.float64)
    parts = prove.compiled(case, setup, Mesh(2), group)
    module = copy.deepcopy(setup.model)
    norms = []
    for each in (parts, module):
        args, kwargs = setup.inputs()
        for _ in range(2):
            setup.loss(each(*args, **kwargs)).backward()
        norms.append(
            nn.utils.clip_grad_norm_(each.parameters(), 0.1, norm_type, foreach=foreach)
        )
    assert type(norms[0]) is torch.Tensor
    ours, want = dict(parts.gradients()), {n: p.grad for n, p in module.named_parameters()}
    demand(differences(*norms, "norm"), differences(ours, want, "clipped"))
    for each in (parts, module):
        nn.utils.clip_grad_value_(each.parameters(), 1e-3)
    demand(differences(dict(parts.gradients()), want, "clipped by value"))
    return {"norm": digest(norms[0]), "gradients": digest(dict(parts.gradients()))}


@pytest.mark.parametrize("norm_type", [2.0, *(pytest.param(p, marks=FULL) for p in (1.0, float("inf")))])
@pytest.mark.parametrize("case", ["b21_clipping", "groups_nine_over_three"])
def test_torchs_own_clipping(pool: Pool, case: str, norm_type: float) -> None:
    prove.alike(pool.run(torchs_own, 2, case, norm_type, None))


def scaled(group: Any, mesh: str, bad: int | None) -> list[bool]:
    """Steps of torch's GradScaler; one rank's part of a gradient is made infinite."""
    case = CASES["b07_fused_gate_up"]
    setup = case.setup()
    parts = prove.compiled(case, setup, Mesh.parse(mesh), group)
    optimizer = torch.optim.SGD(parts.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = {n: p.detach().clone() for n, p in parts.named_parameters()}
    args, kwargs = setup.inputs()
    scaler.scale(setup.loss(parts(*args, **kwargs))).backward()
    if dist.get_rank(group) == bad:
        first = next(p for p in parts.parameters() if p.grad is not None)
        assert type(first.grad) is not torch.Tensor, "the test needs a split weight"
        first.grad.view(-1)[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (4.0 if bad is None else 2.0)
    return [not torch.equal(p, before[n]) for n, p in parts.named_parameters()]


@pytest.mark.parametrize("bad", [None, 0, 1])
def test_a_scaler_is_one_for_all_ranks(pool: Pool, bad: int | None) -> None:
    for moved in pool.run(scaled, 2, "tp2", bad):
        assert all(moved) if bad is None else not any(moved)


def test_a_scaler_of_stages_is_refused(pool: Pool) -> None:
    for failure in pool.errors(scaled, 2, "pp2", None):
        assert "each stage of a pipeline" in failure.message, failure.traceback


def kept(group: Any) -> None:
    """A gradient is saved and copied as a tensor."""
    case = CASES["b07_fused_gate_up"]
    setup = case.setup()
    parts = prove.compiled(case, setup, Mesh(2), group)
    prove.run(parts, setup, True)
    grads = [p.grad for p in parts.parameters() if p.grad is not None]
    assert any(type(g) is not torch.Tensor for g in grads)
    stream = io.BytesIO()
    torch.save(grads, stream)
    stream.seek(0)
    for was, g in zip(grads, torch.load(stream, weights_only=True), strict=True):
        assert type(g) is torch.Tensor
        assert torch.equal(g, was)


def test_gradients_are_saved_as_tensors(pool: Pool) -> None:
    pool.run(kept, 2)
