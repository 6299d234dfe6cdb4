"""A model that asks whether it is traced is captured as in a plain call, or says where it is not."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.fx._symbolic_trace import is_fx_symbolic_tracing, is_fx_tracing

from plait.capture import capture
from plait.errors import CaptureError
from plait.program import Program
from tests import pretend
from tests.cases import Setup
from tests.compare import demand, discrepancies, plain


class Asks(nn.Module):
    """Equal blocks, each with the function, between two linears."""

    def __init__(self, function: Callable[[Tensor], Tensor], blocks: int = 3) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 8), nn.Linear(8, 5)
        self.blocks = nn.ModuleList(Block(function) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.down(x)
        return y


class Block(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.inner(x))


def proven(function: Callable[[Tensor], Tensor]) -> Program:
    """Captured, and equal to the plain module."""
    torch.manual_seed(0)
    setup = Setup(Asks(function), (torch.randn(3, 5),)).to(torch.float64)
    program = pretend.trace(setup, training=True)
    want = plain(setup)
    for got in pretend.run(pretend.divide(program, 2, pretend.Free(2)), setup, train=True):
        demand(discrepancies(got, want), about=function.__name__)
    return program


def exporting(x: Tensor) -> Tensor:
    return x * 2 if torch.compiler.is_exporting() else x * 3


def helper(x: Tensor) -> bool:
    return torch.compiler.is_compiling() or isinstance(x, torch._subclasses.FakeTensor)


def by_every_name(x: Tensor) -> Tensor:
    answers = [
        is_compiling(), torch.compiler.is_compiling(), torch._dynamo.is_compiling(), is_fx_tracing(), helper(x),
        torch._subclasses.fake_tensor.is_fake(x),
    ]  # fmt: skip
    return x * (1 + sum(2**i for i, yes in enumerate(answers) if yes))


def by_torch(x: Tensor) -> Tensor:
    """torch's own function asks is_compiling(), and has to be told that it is."""
    return x * 2 if is_fx_symbolic_tracing() else x * 3


def none_given(x: Tensor) -> Tensor:
    mask = None if torch.compiler.is_compiling() else torch.ones_like(x)
    return x * mask[:, :1]  # type: ignore[index]


def asked_twice(x: Tensor) -> Tensor:
    if not helper(x) and bool(x.abs().max() > 100):
        raise ValueError("too large")
    return exporting(x)


@pytest.mark.parametrize("function", [exporting, by_every_name, by_torch, none_given])
def test_the_way_of_a_plain_call_is_captured(function: Callable[[Tensor], Tensor]) -> None:
    asked = [torch.compiler.is_compiling, torch.compiler.is_exporting]
    before = [(f.__code__, f.__kwdefaults__) for f in asked]
    assert proven(function).notes == ()
    assert [(f.__code__, f.__kwdefaults__) for f in asked] == before
    assert not torch.compiler.is_compiling()


def test_what_looks_at_a_value_is_told_the_truth_and_nothing_else() -> None:
    (note,) = proven(asked_twice).notes
    line = inspect.getsourcelines(asked_twice)[1] + 1
    assert f"test_capture_questions.py:{line}: `if not helper(x) and" in note
    assert "forward is told here that it is traced" in note
    assert "(what runs depends on the value of a tensor" in note


def by_values(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def after_a_mask(x: Tensor) -> Tensor:
    return by_values(none_given(x))


def after_a_question(x: Tensor) -> Tensor:
    return by_values(exporting(x))


@pytest.mark.parametrize("function", [by_values, after_a_question, after_a_mask])
def test_what_no_answer_helps_is_refused_by_its_line(function: Callable[[Tensor], Tensor]) -> None:
    """And not by what goes wrong where another answer was tried."""
    with pytest.raises(CaptureError, match=r"`return x if x\.sum\(\) > 0 else -x`: what runs depends on the value"):
        capture(Asks(function), (torch.randn(3, 5),))


# -- what has values -----------------------------------------------------------------------------------


def counted(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[-1], device=x.device).unsqueeze(0)
    new = torch.diff(at, prepend=at[:, :1] - 1, dim=-1) != 1
    return x * 3 if (new.cumsum(-1)[:, -1] == 0).all() else x * 2


def numbers(x: Tensor) -> Tensor:
    return x * int(x.new_full((3,), 4).sum()) * torch.tensor([1, 2]).tolist()[1] * torch.full_like(x, 2.0)[0, 0].item()


def through_views(x: Tensor) -> Tensor:
    mask = torch.ones_like(x, dtype=torch.bool)
    first, rest = mask[0], mask[1:]
    first[:] = False
    if rest.all() and not mask.all():
        x = x * 3
    mask.logical_not_()
    return x * 2 if rest.any() else x * 5


@pytest.mark.parametrize("function", [counted, numbers, through_views])
def test_what_is_made_of_numbers_alone_has_values(function: Callable[[Tensor], Tensor]) -> None:
    proven(function)


def overwritten(x: Tensor) -> Tensor:
    seen = torch.ones(3, 8)
    part = seen[1:]
    part.copy_(x[1:].detach())
    return x * 3 if seen.all() else x


def dynamic(x: Tensor) -> Tensor:
    return x * 3 if torch.arange(x.shape[0]).sum() == 3 else x


@pytest.mark.parametrize(
    ("function", "options"), [(overwritten, {}), (dynamic, {"dynamic": {"x": {0: "rows"}}})]
)
def test_what_depends_on_more_has_none(function: Callable[[Tensor], Tensor], options: dict[str, Any]) -> None:
    with pytest.raises(CaptureError, match=r"`return x \* 3 if .*: what runs depends on the value"):
        capture(Asks(function), (torch.randn(3, 5),), **options)
