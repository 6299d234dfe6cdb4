"""Moves: every backward is the transpose of its forward under the layouts of the gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from plait.rules.equation import Factor, product
from plait.rules.layout import COPIED, PARTIAL, WHOLE, Layout, shard
from plait.rules.moves import Cut, conversion, only_own, take, together, widen
from plait.rules.split import Split

N = 3
G, R = Factor(4), Factor(2)
DIMS = (Factor(5), product((G,)), Factor(3))
KINDS = ("whole", "copied", "partial", "even", "covering")


def layout(kind: str) -> Layout:
    match kind:
        case "even":
            return shard(Split.even((G,), N))
        case "covering":
            return shard(Split.even((G, R), N))
    return {"whole": WHOLE, "copied": COPIED, "partial": PARTIAL}[kind]


def lay(value: Tensor, form: Layout) -> list[Tensor]:
    """A value in a layout."""
    if form.split is not None:
        cut = Cut.of(DIMS, form.split)
        return [take(value, cut.dim, rows).clone() for rows in cut.rows]
    if form.kind == "partial":
        terms = [torch.randn_like(value) for _ in range(N - 1)]
        return [*terms, value - sum(terms)]
    return [value.clone() for _ in range(N)]


def lay_gradient(value: Tensor, form: Layout) -> list[Tensor]:
    """The gradient of a value in that layout: copied is a sum of terms, shared rows too."""
    if form.split is not None:
        cut = Cut.of(DIMS, form.split)
        return [only_own(take(value, cut.dim, cut.rows[r]), cut, r) for r in range(N)]
    if form.kind == "copied":
        return lay(value, PARTIAL)
    return [value.clone() for _ in range(N)]


def read(parts: list[Tensor], form: Layout) -> Tensor:
    """The value that the parts stand for; asserts what the layout promises."""
    if form.split is not None:
        cut = Cut.of(DIMS, form.split)
        return sum(widen(parts[r], cut, cut.rows[r], cut.own[r]) for r in range(N))
    if form.kind == "partial":
        return sum(parts)
    for part in parts[1:]:
        assert torch.equal(part, parts[0])
    return parts[0]


def read_gradient(parts: list[Tensor], form: Layout) -> Tensor:
    if form.split is not None:
        cut = Cut.of(DIMS, form.split)
        return sum(widen(parts[r], cut, cut.rows[r], cut.rows[r]) for r in range(N))
    if form.kind == "copied":
        return sum(parts)
    for part in parts[1:]:
        assert torch.equal(part, parts[0])
    return parts[0]


@pytest.mark.parametrize("a", KINDS)
@pytest.mark.parametrize("b", KINDS)
def test_a_move_keeps_the_value_and_its_dual_the_gradient(a: str, b: str) -> None:
    torch.manual_seed(0)
    source, target = layout(a), layout(b)
    value = torch.randn(5, 4, 3, dtype=torch.float64)
    gradient = torch.randn_like(value)
    steps = conversion(source, target, DIMS)
    parts = lay(value, source)
    for c in steps:
        parts = together(c.forward, parts, c.cut)
    assert torch.allclose(read(parts, target), value)
    grads = lay_gradient(gradient, target)
    for c in reversed(steps):
        grads = together(c.backward, grads, c.cut)
    assert torch.allclose(read_gradient(grads, source), gradient)
    assert [g.shape for g in grads] == [p.shape for p in lay(value, source)]
