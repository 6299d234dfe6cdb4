"""Training on gloo: optimizer steps, clipping, accumulation, open forwards, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.errors import PlaitError
from tests.cases import CASES, Mesh
from tests.compare import digest
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
def test_steps_keep_weights_and_replicas(
    pool: Pool, case: str, mesh: str, optimizer: str, count: int, clip: float | None
) -> None:
    n = Mesh.parse(mesh).size
    prove.alike(pool.run(prove.steps, n, case, mesh, optimizer, count, clip))


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize(
    ("case", "mesh"),
    [
        on("b21_clipping", "tp2", full=True),
        on("b21_clipping", "tp4"),
        on("b14_tied_embedding_and_head", "tp3"),
        on("b31_tied_over_stages", "tp2", full=True),
        on("groups_nine_over_three", "tp2"),
        on("groups_nine_over_three", "tp4", full=True),
        on("frozen_parts", "tp3", full=True),
    ],
)
def test_clipping(pool: Pool, case: str, mesh: str, norm_type: float) -> None:
    n = Mesh.parse(mesh).size
    prove.alike(pool.run(prove.clipping, n, case, mesh, norm_type, 0.1))


def test_clipping_a_small_gradient_changes_nothing(pool: Pool) -> None:
    pool.run(prove.clipping, 2, "b01_bias_after_the_sum", "tp2", 2.0, 1e6)


ONES = ("b01_bias_after_the_sum", "b41_strided_and_expanded", "groups_nine_over_three")


@pytest.mark.parametrize("case", [*ONES, "tied_thrice", "b29_encoder_decoder"])
def test_gradients_accumulate(pool: Pool, case: str) -> None:
    prove.alike(pool.run(prove.accumulated, 2, case, "tp2"))


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


def foreign(group: Any, what: str) -> None:
    case = CASES["b07_fused_gate_up"]
    setup = case.setup()
    parts = prove.compiled(case, setup, Mesh.parse("tp2"), group)
    prove.run(parts, setup, True)
    match what:
        case "clip":
            torch.nn.utils.clip_grad_norm_(parts.parameters(), 1.0)
        case "lbfgs":
            torch.optim.LBFGS(parts.parameters()).step(lambda: torch.zeros(()))
        case "adafactor":
            torch.optim.Adafactor(parts.parameters()).step()
        case "muon":
            torch.optim.Muon([p for p in parts.parameters() if p.dim() == 2]).step()


@pytest.mark.xfail(reason="functions that read whole weights are not refused yet")
@pytest.mark.parametrize("what", ["clip", "lbfgs", "adafactor", "muon"])
def test_what_reads_whole_weights_is_refused(pool: Pool, what: str) -> None:
    """torch's own clipping and optimizers that are not element-wise see only this rank's part."""
    for failure in pool.errors(foreign, 2, what):
        assert isinstance(failure.error, PlaitError), failure.traceback
