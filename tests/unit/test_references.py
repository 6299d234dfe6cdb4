"""The cases themselves: a loss that sees every output, and gradients that would show a fault.

Before a case proves anything about a split model, its reference must be able to: every parameter's
gradient, doubled, must differ; every bias and norm weight must carry noise.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.cases import CASES, Case, Mesh
from tests.compare import as_good_as, differences, digest, plain

ALL = list(CASES.values())
STRICT = [c for c in ALL if torch.float64 in c.dtypes and c.training]


@pytest.mark.parametrize("case", ALL, ids=lambda c: c.id)
def test_a_case_is_the_same_wherever_it_is_built(case: Case) -> None:
    first, second = case.setup(case.dtypes[0]), case.setup(case.dtypes[0])
    assert digest(first.model.state_dict()) == digest(second.model.state_dict())
    assert digest((first.args, first.kwargs)) == digest((second.args, second.kwargs))
    assert digest(first.inputs()) == digest((first.args, first.kwargs))


@pytest.mark.parametrize("case", STRICT, ids=lambda c: c.id)
def test_a_wrong_factor_on_any_gradient_shows(case: Case) -> None:
    setup = case.setup(torch.float64)
    run = plain(setup)
    blind = {
        name
        for name, g in run.gradients.items()
        if g is None or not differences({name: g * 2}, {name: g}, "gradient")
    }
    assert blind == set(case.flat)
    assert all(g is not None and differences(g * 2, g) for g in run.inputs)


@pytest.mark.parametrize("case", STRICT, ids=lambda c: c.id)
def test_a_wrong_output_shows_in_the_loss_or_the_output(case: Case) -> None:
    run = plain(case.setup(torch.float64))
    leaves = pytree.tree_leaves(run.out)
    floating = [x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()]
    assert run.loss.isfinite()
    assert run.loss.abs() > 1e-6
    assert floating
    assert all(differences(x * 2, x) for x in floating)


@pytest.mark.parametrize("case", [c for c in ALL if c.noise], ids=lambda c: c.id)
def test_no_parameter_is_constant(case: Case) -> None:
    for name, parameter in case.setup(case.dtypes[0]).model.named_parameters():
        values = parameter.detach().flatten()
        assert parameter.numel() == 1 or values.std() > 0.02, name


def test_meshes_parse_back() -> None:
    for text in ("tp2", "pp3", "tp2xpp2", "pp2/4", "tp2xpp2/8", "tp13"):
        assert str(Mesh.parse(text)) == text
    assert Mesh.parse("tp2xpp3").size == 6


def test_differences_are_found_and_named() -> None:
    x = torch.linspace(-1, 1, 12).view(3, 4)
    assert differences({"a": (x, None)}, {"a": (x.clone(), None)}) == []
    assert "all x 2" in differences(x * 2, x)[0]
    assert "at (1, 2)" in differences(x + 0.1 * torch.eye(3, 4).roll((0, 1), (0, 1)), x)[0]
    assert "shape (4, 3) instead of (3, 4)" in differences(x.T, x)[0]
    assert "torch.float64 instead of torch.float32" in differences(x.double(), x)[0]
    assert "list instead of tuple" in differences([x], (x,))[0]
    assert "keys missing ['b'], extra ['c']" in differences({"c": x}, {"b": x})[0]
    assert "another order" in differences({"b": 1, "a": 2}, {"a": 2, "b": 1})[0]
    assert (
        "out['a'][1]: None instead of a tensor" in differences({"a": [x, None]}, {"a": [x, x]})[0]
    )
    assert differences(torch.full((2,), torch.nan), x[0, :2])
    assert differences(x[0, :2], torch.full((2,), torch.nan))
    assert not differences(
        torch.tensor([torch.nan, torch.inf]), torch.tensor([torch.nan, torch.inf])
    )
    assert differences(torch.tensor([1]), torch.tensor([2]))
    assert differences(3, 4) == ["out: 3 instead of 4"]


def test_short_dtypes_are_judged_by_their_own_error() -> None:
    exact = {"a": torch.linspace(1, 2, 50, dtype=torch.float64) / 3}
    own = {"a": exact["a"].bfloat16()}
    assert not differences({"a": own["a"].clone()}, own, close=as_good_as(own, exact))
    worse = {"a": (exact["a"] * 1.05).bfloat16()}
    assert differences(worse, own, close=as_good_as(own, exact))
