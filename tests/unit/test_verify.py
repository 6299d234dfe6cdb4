"""`plait verify` and `plait run` without processes: what differs is found, and named."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait import generate, models, verify

MODULE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.spare = nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(2, 2)

    def forward(self, x):
        return {"y": self.down(self.up(x).relu()), "count": x.size(0)}

class Still(Net):  # as new adapters: all outputs are 0
    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

def f():
    return Net(), (torch.randn(3, 4),)

def small():
    net = Net()
    for p in net.parameters():
        p.data *= 1e-2
    return net, (torch.randn(3, 4) * 1e-2,)

def still():
    return Still(), (torch.randn(3, 4),)

def narrow():
    return Net().bfloat16(), (torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True),)
"""


class Split(nn.Module):
    """Stands for the compiled model: the model itself, with a fault put in."""

    replica = 0

    def __init__(self, model: nn.Module, fault: str) -> None:
        super().__init__()
        self.model, self.fault = copy.deepcopy(model), fault

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.model(*args, **kwargs)
        if self.fault == "output":
            out["y"] = out["y"] + 1e-3
        if self.fault == "structure":
            out["more"] = out["y"]
        return out

    def gradients(self) -> dict[str, Tensor | None]:
        grads = {name: p.grad for name, p in self.model.named_parameters()}
        bias, weight = grads["down.bias"], grads["up.weight"]
        if self.fault == "gradient" and bias is not None:
            grads["down.bias"] = bias / 2  # as a bias that each of two ranks adds half of
        if self.fault == "part" and weight is not None:
            grads["up.weight"] = weight * 0.97  # a part is missing
        if self.fault == "none":
            grads["up.bias"] = None
        return grads


@pytest.fixture
def request_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> verify.Request:
    (tmp_path / "verifymodel.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return verify.Request(models.resolve("verifymodel:f"), True, 1, 1, "auto")


@pytest.mark.parametrize(
    ("fault", "wrong"),
    [
        ("", []),
        ("output", ["output['y']"]),
        ("structure", ["the structure of the output"]),
        ("gradient", ["gradient of down.bias"]),
        ("none", ["gradient of up.bias"]),
    ],
)
def test_a_fault_is_found_and_named(
    request_: verify.Request, monkeypatch: pytest.MonkeyPatch, fault: str, wrong: list[str]
) -> None:
    monkeypatch.setattr(verify, "compile_model", lambda model, *a, **k: Split(model, fault))
    lines = list(verify.compare(request_))
    found = [line.name for line in lines if not line.same]
    assert found[:1] == wrong  # an output that differs changes gradients too
    if not fault:
        assert len(lines) == 7
        assert {line.name for line in lines if line.note == "no gradient"} == {
            "gradient of spare.weight",
            "gradient of spare.bias",
        }
    assert all(str(line).startswith("same" if line.same else "DIFFERENT") for line in lines)


@pytest.mark.parametrize("form", ["small", "still", "narrow"])
@pytest.mark.parametrize("fault", ["", "gradient", "part"])
def test_small_gradients_and_narrow_models_hide_no_fault(
    request_: verify.Request, monkeypatch: pytest.MonkeyPatch, form: str, fault: str
) -> None:
    wrong = {"gradient": ["gradient of down.bias"], "part": ["gradient of up.weight"]}.get(fault, [])
    if form == "still":  # what lies before a weight of zeros learns nothing
        wrong = [name for name in wrong if "down" in name]
    monkeypatch.setattr(verify, "compile_model", lambda model, *a, **k: Split(model, fault))
    request_ = replace(request_, model=models.resolve(f"verifymodel:{form}"))
    lines = list(verify.compare(request_))
    assert [line.name for line in lines if not line.same] == wrong
    assert ("gradient of input[0][0]" in {line.name for line in lines}) == (form == "narrow")


def test_replicas_have_rows_of_their_own() -> None:
    x = torch.arange(6.0).view(3, 2)
    args = verify.of_replica(([x], {"mask": None, "scale": torch.tensor(2.0), "n": 3}), 1)
    assert torch.equal(args[0][0], x[[2, 0, 1]])
    assert args[1] == {"mask": None, "scale": torch.tensor(2.0), "n": 3}
    assert verify.of_replica([x], 0)[0] is x


def test_what_is_small_beside_large_values_may_be_rounded_as_they_are() -> None:
    want = torch.tensor([40.0, 1e-3, -7.0])
    assert models.close(want + torch.tensor([0.0, 3e-5, 0.0]), want)
    assert not models.close(want + torch.tensor([0.0, 3e-3, 0.0]), want)
    assert not models.close(want / 20 + torch.tensor([0.0, 3e-5, 0.0]), want / 20)
    assert not models.close(want * 1.1e-6, want * 1e-6), "what is small is held to its own size"
    assert not models.close(torch.tensor([float("nan"), 1.0]), torch.tensor([1.0, 1.0]))
    assert models.close(torch.tensor([float("inf"), 1.0]), torch.tensor([float("inf"), 1.0]))


def test_what_one_process_loses_to_rounding_may_be_lost() -> None:
    exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
    theirs = exact + torch.tensor([1e-3, 0.0])
    near, far = (exact - torch.tensor([0.0, error]) for error in (2e-3, 2e-2))
    found = [verify._line("w", a, theirs, exact, 1.0) for a in (near, far)]
    assert [line.same for line in found] == [True, False]
    assert all(line.note == "one process is 1.0e-03 from float64" for line in found)
    assert not verify._line("w", near, theirs, None, 1.0).same, "nothing is known of the noise"


def test_one_element_that_lost_much_does_not_excuse_the_others() -> None:
    exact = torch.ones(1000, dtype=torch.float64)
    theirs, ours = exact.clone(), exact.clone()
    theirs[0] += 1e-2
    ours[1:11] -= 1e-2  # none is further off than that one, but they are ten
    assert not verify._line("w", ours, theirs, exact, 1.0).same


@pytest.mark.parametrize(("scale", "same"), [(1.0, True), (1e-3, False)])
def test_where_one_process_knows_nothing_only_rounding_passes(scale: float, same: bool) -> None:
    """`scale` is the largest gradient of the model; this one is 0 by mathematics."""
    exact, theirs = torch.zeros(4), torch.full((4,), 1e-8)
    assert verify._line("w", -theirs, theirs, exact, scale).same is same
    taken_another_way = theirs + 0.5  # by experts that were chosen at a hair's breadth
    assert not verify._line("w", exact, taken_another_way, exact, scale).same


def test_no_element_of_an_output_is_left_out_of_the_loss() -> None:
    x = torch.randn(5, 7, requires_grad=True)
    verify.loss({"a": x, "b": [x * 2]}).backward()
    assert x.grad is not None
    assert (x.grad != 0).all()


def counting(input_ids: Tensor, use_cache: bool) -> Any:
    """The next token is the last one plus one, modulo 10."""
    logits = nn.functional.one_hot((input_ids + 1) % 10, 10).float()
    return SimpleNamespace(logits=logits)


def test_an_answer_ends_at_a_stop_token_or_at_the_limit() -> None:
    told: list[list[int]] = []
    answer = generate.greedy(counting, torch.tensor([[3]]), {7}, 20, lambda t: told.append(list(t)))
    assert answer.tokens == [4, 5, 6, 7]
    assert told == [[4], [4, 5], [4, 5, 6], [4, 5, 6, 7]]
    assert len(answer.seconds) == 4
    assert generate.greedy(counting, torch.tensor([[3]]), set(), 3).tokens == [4, 5, 6]


def test_the_first_different_token_is_named() -> None:
    assert generate._first_difference([1, 2], [1, 2]) == ""
    assert generate._first_difference([1, 2, 9], [1, 3, 9]) == "token 1 is 2, not 3"
    assert generate._first_difference([1, 2], [1, 2, 3]) == "2 tokens, not 3"


def test_outputs_are_compared_leaf_by_leaf() -> None:
    a = {"x": torch.ones(2), "y": [torch.zeros(3)], "n": 4}
    b = {"x": torch.ones(2), "y": [torch.tensor([0.0, 0.0, 0.5])], "n": 4}
    assert generate._compare(a, a) == (0.0, True)
    assert generate._compare(a, b) == (0.5, False)


def test_stored_bytes_count_tied_weights_once_and_whole_storages() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    assert generate._stored(model) == 128
    model[1].weight = model[0].weight
    assert generate._stored(model) == 64
    model[0].weight = nn.Parameter(torch.zeros(100)[:16].view(4, 4))  # a view keeps all of it
    assert generate._stored(model) == 464
