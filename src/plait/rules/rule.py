"""Rules spelled as equations: one line of text describes an operator.

    Equation("input[* i] weight[o i] bias[o] -> [* o]", sum="i", added="bias", carry="input")

Operands are named as in the operator's ATen schema; those that are absent or no tensors are left
out. `*` stands for any number of leading dims, aligned from the right; a dim of size 1 binds
nothing. A letter that no keyword names is parallel. `carry` lists groups of operands that may be
partial sums together ("self+other | self").
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from plait.rules.describe import Access, Describer, Letter, bind
from plait.rules.equation import ONE, Dims, Factor

_TERM = re.compile(r"(\w*)\[([^\]]*)\]")


class Equation:
    """A rule read from its text; calling it describes one node."""

    def __init__(self, text: str, *, added: str = "", carry: str = "", **properties: str):
        left, right = text.split("->")
        self.text = text
        self.terms = [(name, letters.split()) for name, letters in _TERM.findall(left)]
        self.results = [letters.split() for _, letters in _TERM.findall(right)]
        self.added = set(added.split())
        self.carry = [group.strip().split("+") for group in carry.split("|") if group.strip()]
        self.property = {
            letter: kind for kind, letters in properties.items() for letter in letters.split()
        }

    def __call__(self, d: Describer, node: fx.Node) -> Access:
        bound = bind(node)
        present = [(n, ls) for n, ls in self.terms if is_tensor(bound.get(n))]
        operands = [d.operand(bound[n], n in self.added) for n, _ in present]
        binder = Binder(d, node)
        for (_, letters), operand in zip(present, operands, strict=True):
            binder.bind(spread(letters, len(operand.dims)), operand.dims)
        results = tuple(
            binder.result(spread(letters, len(d.sizes(node, i))), d.sizes(node, i))
            for i, letters in enumerate(self.results)
        )
        names = [n for n, _ in present]
        return Access(
            tuple(operands),
            results,
            binder.letters(self.property),
            carry_groups(self.carry, names),
        )

    def __str__(self) -> str:
        notes = [f"{ls} {kind}" for ls, kind in self.property.items()]
        return self.text + ("   " + ", ".join(notes) if notes else "")


class Elementwise:
    """Every tensor argument broadcast against the others; all dims parallel."""

    def __init__(self, carry: str = ""):
        self.carry = [group.strip().split("+") for group in carry.split("|") if group.strip()]
        self.text = "*, * -> *"

    def __call__(self, d: Describer, node: fx.Node) -> Access:
        bound = bind(node)
        names = [n for n, v in bound.items() if is_tensor(v)]
        operands = [d.operand(bound[n]) for n in names]
        binder = Binder(d, node)
        for operand in operands:
            binder.bind(spread(["*"], len(operand.dims)), operand.dims)
        sizes = d.sizes(node)
        result = binder.result(spread(["*"], len(sizes)), sizes)
        results = (result,) * max(1, outputs(node))
        groups = carry_groups(self.carry, names)
        if node.target in _CASTS and not _is_float_cast(node):
            groups = ()
        return Access(tuple(operands), results, binder.letters({}), groups)

    def __str__(self) -> str:
        groups = " or ".join("+".join(g) for g in self.carry)
        return self.text + (f"   partial {groups} passes" if groups else "")


class Scaled(Elementwise):
    """`self` times or divided by `other`. Parts of a sum may be scaled alike, but not by infinity: of parts whose
    signs differ that makes nan."""

    def __call__(self, d: Describer, node: fx.Node) -> Access:
        access = super().__call__(d, node)
        bound = bind(node)
        names = [n for n, v in bound.items() if is_tensor(v)]
        divides = node.target in _DIVISIONS
        carries = []
        for group in access.carries:
            scales = [v for n, v in bound.items() if n not in [names[i] for i in group]]
            if all(_finite(d, x, divides) for x in scales):
                carries.append(group)
        return replace(access, carries=tuple(carries))


def _finite(d: Describer, by: Any, divides: bool) -> bool:
    """What is computed may well be zero, and is taken as finite where it is no inverse. One number is no zero: it is
    the count of a mean, and where nothing counts, every part of the sum is zero too."""
    if is_tensor(by) and by.op != "get_attr" and all(size == 1 for size in d.sizes(by)):
        return True
    while isinstance(by, fx.Node) and by.target in _MOVES:
        by = by.args[0]
    if isinstance(by, fx.Node) and by.op == "get_attr":
        value = d.constants[str(by.target)]
        return bool(value.isfinite().all() and (not divides or value.all()))
    if isinstance(by, fx.Node) and by.target in _CHOICES:
        return all(_finite(d, by.args[i], divides) for i in _CHOICES[by.target])
    if is_tensor(by):
        return not divides and by.target not in _INVERSES
    return not isinstance(by, (int, float)) or (math.isfinite(by) and not (divides and by == 0))


class Binder:
    """Binds letters to factors; a conflict makes the letter whole and its result dim new."""

    def __init__(self, d: Describer, node: fx.Node):
        self.d, self.node = d, node
        self.bound: dict[str, Factor] = {}
        self.apart: dict[str, list[Factor]] = {}
        self.why: dict[str, str] = {}

    def bind(self, letters: list[str], dims: Dims) -> None:
        assert len(letters) == len(dims), (self.node, letters, dims)
        for letter, f in zip(letters, dims, strict=True):
            have = self.bound.get(letter, ONE)
            if have.size == 1:
                self.bound[letter] = f
            elif f.size != 1:
                conflict = self.d.tie(self.node, have, f)
                if conflict is not None:
                    self.apart.setdefault(letter, [have]).append(f)
                    self.why[letter] = str(conflict)

    def result(self, letters: list[str], sizes: tuple[int, ...]) -> Dims:
        out = []
        for letter, size in zip(letters, sizes, strict=True):
            f = self.bound.get(letter)
            if f is None or f.size != size or letter in self.apart:
                fresh = self.d.fresh(size)
                self.apart.setdefault(letter, [f] if f is not None else []).append(fresh)
                f = fresh
            out.append(f)
        return tuple(out)

    def letters(self, properties: dict[str, str]) -> tuple[Letter, ...]:
        out = []
        for letter, f in self.bound.items():
            if letter in self.apart:
                continue
            out.append(Letter(f, properties.get(letter, "parallel")))
        for letter, factors in self.apart.items():
            reason = self.why.get(letter, f"{letter} is new here")
            out += [Letter(f, "whole", reason) for f in factors]
        return tuple(out)


def spread(letters: list[str], rank: int) -> list[str]:
    """Letters for every dim: `*` becomes `*2 *1 *0`, numbered from the right."""
    if "*" not in letters:
        return letters
    at = letters.index("*")
    count = rank - len(letters) + 1
    return letters[:at] + [f"*{i}" for i in reversed(range(count))] + letters[at + 1 :]


def carry_groups(groups: list[list[str]], names: list[str]) -> tuple[tuple[int, ...], ...]:
    """Those groups whose operands are all present, as positions."""
    return tuple(
        tuple(names.index(n) for n in group) for group in groups if all(n in names for n in group)
    )


def is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)


def outputs(node: fx.Node) -> int:
    """How many results a node returns."""
    value = node.meta["val"]
    return len(value) if isinstance(value, (tuple, list)) else 1


aten = torch.ops.aten
_DIVISIONS = {aten.div.Tensor, aten.div.Scalar}
_INVERSES = {aten.reciprocal.default, aten.rsqrt.default}
_CHOICES: dict[Any, tuple[int, int]] = {  # and which of their arguments they choose from
    **dict.fromkeys((aten.where.self, aten.where.Scalar, aten.where.ScalarSelf, aten.where.ScalarOther), (1, 2)),
    **dict.fromkeys((aten.masked_fill.Scalar, aten.masked_fill.Tensor), (0, 2)),
}
_MOVES = {aten.unsqueeze.default, aten.expand.default, aten.view.default, aten._to_copy.default}
_CASTS = {torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype}


def _is_float_cast(node: fx.Node) -> bool:
    source = node.all_input_nodes[0].meta["val"]
    return bool(source.is_floating_point() and node.meta["val"].is_floating_point())


__all__ = ["Binder", "Elementwise", "Equation", "Scaled", "is_tensor", "outputs", "spread"]
